"""Kernel files to compiled kernels: nothing is compiled before its first launch, and CuPy keeps the result on disk."""

from __future__ import annotations

import concurrent.futures
import functools
import importlib.resources
import re
import threading
from collections.abc import Iterable
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
#: files whose kernels are small and launched together: one module, so that the compiler starts once
_TOGETHER = ("plan.cu", "check_values.cu")
_kernels: dict[tuple, Any] = {}
_turns: dict[tuple, threading.Lock] = {}
_lock = threading.Lock()


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


def module_of(file: str, expression: str) -> tuple[str, ...]:
    """Return the kernels that are compiled with `expression` of `file`, itself among them."""
    assert expression in INSTANCES[file], f"{expression} is not among INSTANCES, so no check compiles it"
    return INSTANCES[file] if file in _TOGETHER else (expression,)


def kernel(file: str, expression: str, device: int) -> Any:
    """Return the kernel `expression` (a C++ name, with its template arguments) of `file` for a device."""
    together, text = module_of(file, expression), source(file)
    key = (text, expression, OPTIONS, device)
    found = _kernels.get(key)
    if found is None:
        with _lock:
            turn = _turns.setdefault((text, together, OPTIONS, device), threading.Lock())
        with turn:  # of one module; others compile meanwhile
            if key not in _kernels:
                _kernels.update(_load(text, together, device))
            found = _kernels[key]
    return found


def prepare(wanted: Iterable[tuple[str, str]], device: int) -> None:
    """Compile the modules of kernels, (file, expression) each, side by side: NVRTC runs without Python's lock."""
    missing = {}
    for file, expression in wanted:
        if (source(file), expression, OPTIONS, device) not in _kernels:
            missing[file, module_of(file, expression)] = expression
    if len(missing) < 2:
        return  # its launch compiles it
    with concurrent.futures.ThreadPoolExecutor(len(missing)) as pool:
        for job in [pool.submit(kernel, file, name, device) for (file, _), name in missing.items()]:
            job.result()


def _load(text: str, expressions: tuple[str, ...], device: int) -> dict[tuple, Any]:
    reason = device_unavailable(device)
    if reason:
        fix = "use another device or the cpu room"
        raise BackendError(message("the cuda room", "device", "one that the kernels run on", reason, fix))
    found = {}
    with cupy().cuda.Device(device):  # each thread has a current device of its own
        module = cupy().RawModule(code=text, options=OPTIONS, name_expressions=expressions)
        for expression in expressions:
            one = found[text, expression, OPTIONS, device] = module.get_function(expression)
            # once, here: what a launch really takes is said by the launch
            one.max_dynamic_shared_size_bytes = limits_of(device).shared_per_block - one.shared_size_bytes
    return found
