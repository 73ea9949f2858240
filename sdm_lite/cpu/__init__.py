"""The CPU room: Numba kernels over an own small pool of threads."""

from .addressing import hash_slots_forward, product_key_topk_backward, product_key_topk_forward
from .bag import (
    embedding_bag_backward,
    embedding_bag_forward,
    embedding_bag_weights_backward,
    number_slots,
)
from .key_step import distances_backward, key_step_backward, key_step_forward
from .nearest import idw_product_key_topk_forward
from .sparse_delta import sparse_delta_backward, sparse_delta_forward, sparse_delta_update
from .values import values_are_fine

__all__ = [
    "distances_backward",
    "embedding_bag_backward",
    "embedding_bag_forward",
    "embedding_bag_weights_backward",
    "hash_slots_forward",
    "idw_product_key_topk_forward",
    "key_step_backward",
    "key_step_forward",
    "number_slots",
    "product_key_topk_backward",
    "product_key_topk_forward",
    "sparse_delta_backward",
    "sparse_delta_forward",
    "sparse_delta_update",
    "unavailable",
    "values_are_fine",
]


def unavailable() -> str | None:
    """Return None: this room is always ready."""
    return None
