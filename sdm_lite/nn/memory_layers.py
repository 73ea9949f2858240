"""Where a language model has memory layers beside its mixers: ``memory=("fwpkm@1,3", "pkm@2")``."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from ..errors import ValueRangeError, message
from .fwpkm_layer import FwPKM
from .product_key_memory import ProductKeyMemory

MEMORIES: dict[str, type[nn.Module]] = {"fwpkm": FwPKM, "pkm": ProductKeyMemory}


def layers_with(op: str, memory: Sequence[str], num_layers: int) -> dict[str, set[int]]:
    """Return the layers, counted from 1, that have each kind of memory, or raise ValueRangeError.

    >>> layers_with("HybridLM", ("fwpkm@1,3", "pkm@2"), 3)
    {'fwpkm': {1, 3}, 'pkm': {2}}
    """
    found: dict[str, set[int]] = {kind: set() for kind in MEMORIES}
    kinds = " or ".join(MEMORIES)
    for entry in (memory,) if isinstance(memory, str) else memory:
        kind, at, numbers = str(entry).partition("@")
        if kind not in MEMORIES or not at:
            expected, fix = f"{kinds}, @ and layer numbers", "write fwpkm@1,3 or pkm@2"
            raise ValueRangeError(message(op, "memory", expected, repr(entry), fix))
        for number in numbers.split(","):
            if not number.strip().isdecimal() or not 1 <= int(number) <= num_layers:
                expected, got = f"layers from 1 to {num_layers}", f"{number!r} in {entry!r}"
                raise ValueRangeError(message(op, "memory", expected, got, "count layers from 1"))
            if int(number) in found[kind]:
                got = f"layer {int(number)} twice for {kind}"
                raise ValueRangeError(message(op, "memory", "each layer once", got, "name it once"))
            found[kind].add(int(number))
    return found


def memories_of(
    dim: int, memory: Sequence[str], options: Mapping[str, Mapping[str, Any]], num_layers: int
) -> list[dict[str, nn.Module]]:
    """Return the new memory layers of each layer, by kind."""
    places = layers_with("HybridLM", memory, num_layers)
    return [
        {
            kind: build_layer("HybridLM", MEMORIES[kind], kind, dim, options.get(kind, {}))
            for kind in MEMORIES
            if number in places[kind]
        }
        for number in range(1, num_layers + 1)
    ]


def build_layer(op: str, layer: Any, kind: str, dim: int, options: Mapping[str, Any]) -> nn.Module:
    """Return layer(dim, **options), or raise ValueRangeError for an option that it has not."""
    known = list(inspect.signature(layer).parameters)[1:]
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            fix = f"did you mean {near[0]}?" if near else f"one of {', '.join(known)}"
            raise ValueRangeError(message(op, "options", f"options of {kind!r}", repr(name), fix))
    return layer(dim, **options)
