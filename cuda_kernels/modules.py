"""Kernel files to compiled kernels: nothing is compiled before its first launch, and CuPy keeps the result on disk."""

from __future__ import annotations

import functools
import importlib.resources
import re
import threading
from typing import Any

from ..errors import BackendError, message
from .devices import cupy, device_unavailable, limits_of
from .tiling import TILES

#: without contraction of a * b + c, so that the CPU emulation gives the same bits
OPTIONS = ("-std=c++17", "-fmad=false")
#: what CuPy adds to OPTIONS, for those who compile without it
ADDED_BY_CUPY = ("-ftz=true", "--device-as-default-execution-space")


def _instances() -> dict[str, tuple[str, ...]]:
    rules = ("false", "true")  # PER_SLOT
    tiled = [(state, tile) for state in ("float", "bf16", "fp16") for tile in TILES] + [("double", TILES[-1])]
    reals = ("float", "double")
    found = {
        f"{name}.cu": [f"{name}<{state}, {tile}, {rule}>" for state, tile in tiled for rule in rules]
        for name in ("sparse_delta_forward", "sparse_delta_backward")
    }
    states = ("float", "bf16", "fp16", "double")
    found["decode_step.cu"] = [f"decode_step<{state}, {TILES[-1]}, {rule}>" for state in states for rule in rules]
    found["sum_partials.cu"] = [f"sum_partials<{real}, {rule}>" for real in reals for rule in rules]
    found["sparse_delta_gates.cu"] = [f"decay_factors<{real}>" for real in reals]
    found["sparse_delta_gates.cu"] += [f"undo_factors<{real}, {rule}>" for real in reals for rule in rules]
    found["plan.cu"] = [f"{name}<256>" for name in ("plan_rows", "plan_chunks", "plan_links")]
    for name in ("product_key_topk_forward", "product_key_topk_backward"):
        found[f"{name}.cu"] = [f"{name}<{real}, 128>" for real in reals]
    found["embedding_bag_forward.cu"] = [f"embedding_bag_forward<{real}>" for real in reals]
    backward = ("embedding_bag_values_backward", "embedding_bag_weights_backward")
    found["embedding_bag_backward.cu"] = [f"{name}<{real}>" for name in backward for real in reals]
    decays = [f"check_decays<{real}>" for real in reals]
    found["check_values.cu"] = ["check_slots", *decays, "check_offsets", "safe_offsets"]
    found["row_bandwidth.cu"] = [f"move_rows<{scatter}>" for scatter in rules]
    return {file: tuple(names) for file, names in found.items()}


#: every kernel that a launch may ask for, by file: what the compile checks compile
INSTANCES = _instances()

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
    assert expression in INSTANCES[file], f"{expression} is not among INSTANCES, so no check compiles it"
    text = source(file)
    key = (text, expression, OPTIONS, device)
    with _lock:
        found = _kernels.get(key)
        if found is None:
            reason = device_unavailable(device)
            if reason:
                fix = "use another device or the cpu room"
                raise BackendError(message("the cuda room", "device", "one that the kernels run on", reason, fix))
            module = cupy().RawModule(code=text, options=OPTIONS, name_expressions=(expression,))
            found = _kernels[key] = module.get_function(expression)
            # once, here: what a launch really takes is said by the launch
            found.max_dynamic_shared_size_bytes = limits_of(device).shared_per_block - found.shared_size_bytes
        return found
