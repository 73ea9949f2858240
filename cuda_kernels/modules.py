"""Kernel files to compiled kernels: nothing is compiled before its first launch, and CuPy keeps the result on disk."""

from __future__ import annotations

import functools
import importlib.resources
import re
import threading
from typing import Any

from .devices import cupy, limits_of

#: without contraction of a * b + c, so that the CPU emulation gives the same bits
OPTIONS = ("-std=c++17", "-fmad=false")
#: what CuPy adds to OPTIONS, for those who compile without it
ADDED_BY_CUPY = ("-ftz=true", "--device-as-default-execution-space")

_INCLUDE = re.compile(r'^#include "(\w+\.cuh)"$', re.MULTILINE)
_kernels: dict[tuple, Any] = {}
_lock = threading.RLock()


@functools.cache
def source(file: str) -> str:
    """Return a kernel file with each of this folder's headers put in where it is first included.

    One text needs no include path, and is the whole key of the compiled kernel: an edited header compiles anew.
    """
    seen: set[str] = set()

    def expand(name: str) -> str:
        if name in seen:
            return ""
        seen.add(name)
        text = importlib.resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
        text = text.replace("#pragma once\n", "\n")
        return f'#line 1 "{name}"\n' + _INCLUDE.sub(lambda found: expand(found[1]) + _resume(name, text, found), text)

    return expand(file)


def _resume(name: str, text: str, found: re.Match) -> str:
    """Return the directive after an include, so that compilers name the right line."""
    return f'\n#line {text.count(chr(10), 0, found.start()) + 2} "{name}"'


def kernel(file: str, expression: str, device: int) -> Any:
    """Return the kernel `expression` (a C++ name, with its template arguments) of `file` for a device."""
    text = source(file)
    key = (text, expression, OPTIONS, device)
    with _lock:
        found = _kernels.get(key)
        if found is None:
            module = cupy().RawModule(code=text, options=OPTIONS, name_expressions=(expression,))
            found = _kernels[key] = module.get_function(expression)
            # once, here: what a launch really takes is said by the launch
            found.max_dynamic_shared_size_bytes = limits_of(device).shared_per_block
        return found
