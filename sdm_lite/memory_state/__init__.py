"""Copy-on-write memories of sequences: see docs/state.md."""

from .state import MemoryState, StateBytes
from .undo import Mark

__all__ = ["Mark", "MemoryState", "StateBytes"]
