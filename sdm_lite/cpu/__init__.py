"""The CPU room: Numba kernels over an own small pool of threads."""

from .addressing import hash_slots_forward, product_key_topk_backward, product_key_topk_forward
from .sparse_delta import sparse_delta_backward, sparse_delta_forward, sparse_delta_update

__all__ = [
    "hash_slots_forward",
    "product_key_topk_backward",
    "product_key_topk_forward",
    "sparse_delta_backward",
    "sparse_delta_forward",
    "sparse_delta_update",
    "unavailable",
]


def unavailable() -> str | None:
    """Return None: this room is always ready."""
    return None
