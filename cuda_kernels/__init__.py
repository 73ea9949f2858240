"""The CUDA room: raw CUDA kernels through CuPy, and Numba CUDA kernels; needs a GPU and an extra, cuda12 or cuda13."""

if __name__ != "sdm_lite.cuda_kernels":
    raise ImportError("this folder is the package sdm_lite.cuda_kernels: install sdm-lite and import that")

from .addressing import count_accesses, hash_slots_forward, product_key_topk_backward, product_key_topk_forward
from .devices import unavailable
from .embedding_bag import (
    embedding_bag_backward,
    embedding_bag_forward,
    embedding_bag_weights_backward,
    number_slots,
)
from .foreign import borrowed, view
from .sparse_delta import sparse_delta_backward, sparse_delta_forward, sparse_delta_update, values_are_fine

__all__ = [
    "borrowed",
    "count_accesses",
    "embedding_bag_backward",
    "embedding_bag_forward",
    "embedding_bag_weights_backward",
    "hash_slots_forward",
    "number_slots",
    "product_key_topk_backward",
    "product_key_topk_forward",
    "sparse_delta_backward",
    "sparse_delta_forward",
    "sparse_delta_update",
    "unavailable",
    "values_are_fine",
    "view",
]
