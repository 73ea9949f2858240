"""Sparse, updatable memories for sequence models.

A large table of slots per head, of which each token reads and writes only a few, chosen by product keys
and updated by the gated delta rule. The ops take and give NumPy arrays, torch tensors,
``sdm_lite.autograd`` tensors, or anything with ``__dlpack__``.

>>> import numpy as np, sdm_lite
>>> values, slots = sdm_lite.product_key_topk(np.zeros((2, 8), np.float32), 3)
>>> slots.tolist()
[[0, 1, 2], [0, 1, 2]]
"""

from typing import TYPE_CHECKING

from .errors import (
    BackendError,
    DeviceError,
    DtypeError,
    FileError,
    FileFormatError,
    SdmError,
    ShapeError,
    SlotError,
    StateBusy,
    StateFull,
    ValueRangeError,
)
from .fwpkm_op import fwpkm
from .fwpkm_state import FwPKMState
from .ops import hash_slots, product_key_topk, sparse_delta_rule, sparse_delta_rule_
from .product_key_memory import embedding_bag, embedding_bag_gradient, idw_product_key_topk, product_key_lookup
from .rooms import backends

if TYPE_CHECKING:
    from .memory_state import MemoryState

__version__ = "0.1.0"

__all__ = [
    "BackendError",
    "DeviceError",
    "DtypeError",
    "FileError",
    "FileFormatError",
    "MemoryState",
    "FwPKMState",
    "SdmError",
    "ShapeError",
    "SlotError",
    "StateBusy",
    "StateFull",
    "ValueRangeError",
    "backends",
    "embedding_bag",
    "embedding_bag_gradient",
    "fwpkm",
    "hash_slots",
    "idw_product_key_topk",
    "product_key_lookup",
    "product_key_topk",
    "sparse_delta_rule",
    "sparse_delta_rule_",
]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> object:
    """Import what needs Numba when it is first used: `import sdm_lite` stays quick."""
    if name == "MemoryState":
        from .memory_state import MemoryState

        return MemoryState
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
