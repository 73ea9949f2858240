"""The reference room: NumPy, one function per equation, the oracle of all the others."""

from .addressing import hash_slots_forward, product_key_topk_backward, product_key_topk_forward
from .bag import (
    embedding_bag_backward,
    embedding_bag_forward,
    embedding_bag_weights_backward,
    number_slots,
)
from .delta import sparse_delta_backward, sparse_delta_forward, sparse_delta_update, values_are_fine
from .nearest import distances_backward, idw_product_key_topk_forward, key_step_backward, key_step_forward

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
