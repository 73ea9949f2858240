"""Run kernels of `cuda_kernels/` on the CPU, driven with NumPy arrays: see README.md beside this file.

>>> emulate("scale.cu", "scale<float>", grid=1, block=32, args=[x, np.float32(2), np.int32(x.size)])  # doctest: +SKIP
"""

from __future__ import annotations

import os
import pathlib
import struct
import subprocess
import tempfile
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .build import ENVIRONMENT, EmulationError, needs, program

__all__ = ["SCHEDULES", "EmulationError", "Launch", "emulate", "needs", "several"]

#: the ways to run a kernel under which a right one gives the same bits
SCHEDULES = (
    {"schedule": "forward"},
    {"schedule": "reverse"},
    {"schedule": "random", "seed": 1},
    {"schedule": "forward", "async_copies": "early"},
)
_SCHEDULE = {"forward": 0, "reverse": 1, "random": 2}
_NULL, _ARRAY, _SCALAR = range(3)


class Launch(NamedTuple):
    """One launch of a kernel; grid and block are integers or up to three of them."""

    kernel: str
    grid: int | Sequence[int]
    block: int | Sequence[int]
    args: Sequence
    shared_bytes: int = 0


def emulate(source, kernel, *, grid, block, args, shared_bytes=0, **options) -> None:
    """Run one launch; the arrays among `args` are changed in place.

    Parameters
    ----------
    source : str or path
        The kernel file: a name in `cuda_kernels/`, or a path.
    kernel : str
        The kernel as C++ writes it, template arguments included.
    grid, block : int or tuple
        Blocks, and threads of a block.
    args : sequence
        C-contiguous NumPy arrays (pointers), NumPy scalars (values), None (a null pointer). One array given twice is
        one array for the kernel too.
    shared_bytes : int
        Dynamic shared memory of a block.
    **options
        build ("plain", "asan", "tsan"), schedule ("forward", "reverse", "random"), seed, async_copies ("late",
        "early"), workers (OS threads that run blocks), defines (``["NAME=1"]``), timeout (seconds),
        serve: kernels to compile into the same program, so that launches of any of them share one compilation.

    Raises
    ------
    EmulationError
        The kernel did not compile, or the emulator or a sanitizer found a fault: the text is its report.
    """
    several(source, [Launch(kernel, grid, block, args, shared_bytes)], **options)


def several(
    source, launches: Sequence[Launch], *, build="plain", schedule="forward", seed=0, async_copies="late", workers=1,
    defines=(), serve=(), timeout=300,
) -> None:  # fmt: skip
    """Run launches of one file in order in one process; arrays keep their values from one launch to the next."""
    kernels = list(dict.fromkeys([*serve, *(launch.kernel for launch in launches)]))
    path = program(source, kernels, build, defines)
    arrays: dict[int, np.ndarray] = {}
    how = struct.pack("<IQII", _SCHEDULE[schedule], seed, async_copies == "late", workers)
    packed = [_pack(launch, kernels.index(launch.kernel), how, arrays) for launch in launches]
    with tempfile.TemporaryDirectory() as folder:
        request, answer = pathlib.Path(folder, "request"), pathlib.Path(folder, "answer")
        with open(request, "wb") as file:
            file.write(struct.pack("<I", len(arrays)))
            for a in arrays.values():
                file.write(struct.pack("<Q", a.nbytes))
                file.write(a.tobytes())
            file.write(struct.pack("<I", len(packed)) + b"".join(packed))
        _run([path, request, answer], timeout)
        _read_back(answer, arrays.values())


def _three(sizes) -> list[int]:
    sizes = [sizes] if np.ndim(sizes) == 0 else list(sizes)
    return sizes + [1] * (3 - len(sizes))


def _pack(launch: Launch, kernel: int, how: bytes, arrays: dict[int, np.ndarray]) -> bytes:
    head = struct.pack("<I6IQ", kernel, *_three(launch.grid), *_three(launch.block), launch.shared_bytes)
    parts = [head, how, struct.pack("<I", len(launch.args))]
    for number, argument in enumerate(launch.args):
        if argument is None:
            parts.append(struct.pack("<IIQ", _NULL, 0, 0))
        elif isinstance(argument, np.ndarray):
            if not argument.flags.c_contiguous:
                raise TypeError(f"argument {number} of {launch.kernel} is not C-contiguous")
            arrays.setdefault(id(argument), argument)
            parts.append(struct.pack("<IIQ", _ARRAY, 0, list(arrays).index(id(argument))))
        elif isinstance(argument, np.generic):
            parts.append(struct.pack("<II", _SCALAR, argument.nbytes) + argument.tobytes().ljust(8, b"\0"))
        else:
            raise TypeError(f"argument {number} of {launch.kernel} is a {type(argument).__name__}: give a NumPy value")
    return b"".join(parts)


def _run(command, timeout: float) -> None:
    told = {**os.environ, **ENVIRONMENT}
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=timeout, env=told)
    except subprocess.TimeoutExpired as error:
        raise EmulationError(f"the launch ran longer than {timeout} s") from error
    if done.returncode:
        raise EmulationError(f"exit status {done.returncode}: {done.stderr.strip() or 'no report (a crash)'}")


def _read_back(answer: pathlib.Path, arrays) -> None:
    data, start = answer.read_bytes(), 0
    for a in arrays:
        if a.flags.writeable:
            a.reshape(-1).view(np.uint8)[:] = np.frombuffer(data, np.uint8, a.nbytes, start)
        start += a.nbytes
