"""Copy-on-write memories of sequences: see docs/state.md."""

from .pool import StateBytes
from .state import MemoryState
from .undo import Mark

__all__ = ["Mark", "MemoryState", "StateBytes"]
