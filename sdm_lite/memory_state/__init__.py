"""Copy-on-write memories of sequences: see docs/state.md."""

from .. import compile_notice
from .state import MemoryState, StateBytes
from .undo import Mark

__all__ = ["Mark", "MemoryState", "StateBytes"]

compile_notice.listen()  # its kernels are called past the rooms
