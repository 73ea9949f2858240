"""Builds and calls row_limit.cpp: the limit that memory sets to the forward. Without g++ there is no limit."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import pathlib
import shutil
import subprocess
import tempfile
from collections.abc import Callable

import numpy as np

from ..shapes import Inputs

SOURCE = pathlib.Path(__file__).with_name("row_limit.cpp")
FLAGS = ["-O3", "-march=native", "-ffast-math", "-fopenmp", "-shared", "-fPIC"]


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the compiled library, or None where g++ is not there; built once per source and machine."""
    compiler = shutil.which("g++")
    if compiler is None:
        return None
    # -march=native: another machine's build may not run here, so its processor is part of the name
    machine = subprocess.run([compiler, *FLAGS, "-Q", "--help=target"], capture_output=True, text=True).stdout
    digest = hashlib.sha256(SOURCE.read_bytes() + machine.encode()).hexdigest()[:16]
    path = pathlib.Path(tempfile.gettempdir()) / f"sdm-lite-row-limit-{digest}.so"
    if not path.exists():
        partial = path.with_suffix(".partial")
        subprocess.run([compiler, *FLAGS, str(SOURCE), "-o", str(partial)], check=True, timeout=60)
        partial.rename(path)
    loaded = ctypes.CDLL(str(path))
    loaded.move_rows.restype = None
    return loaded


def row_mover(inputs: Inputs, table: np.ndarray, threads: int) -> Callable[[], None] | None:
    """Return a call that moves the rows of `inputs` in `table` [B, H, N, D] (its values stay), or None without g++."""
    loaded = library()
    if loaded is None:
        return None
    batch, heads, num_slots, width = table.shape
    lanes, tokens = batch * heads, inputs.values.shape[1]
    tiles = -(-threads // lanes) if lanes < threads else 1
    if width % (8 * tiles):
        raise ValueError("the limit is written for widths that are a multiple of 8 per tile")

    def lane_first(slots: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(np.moveaxis(slots, 2, 1).reshape(lanes, tokens, -1))

    write_slots, read_slots = lane_first(inputs.write_slots), lane_first(inputs.read_slots)
    sink = np.zeros((threads, 16), np.float32)
    pointers = [x.ctypes.data_as(ctypes.c_void_p) for x in (table, write_slots, read_slots, sink)]
    sizes = (lanes, tokens, num_slots, width, write_slots.shape[-1], read_slots.shape[-1], tiles)
    arguments = [*pointers, ctypes.c_float(1.0), *map(ctypes.c_long, sizes), ctypes.c_int(threads)]

    def call() -> None:
        loaded.move_rows(*arguments)

    call.keep_alive = (table, write_slots, read_slots, sink)  # the pointers above are into these
    return call
