"""What a layer may be given: checked before anything is computed, so that no error speaks of the inside."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..errors import DeviceError, DtypeError, ShapeError, ValueRangeError, message

#: autocast brings these together; it leaves float64 alone
_AUTOCAST = (torch.float32, torch.bfloat16, torch.float16)
IDS = (torch.int32, torch.int64)


def check_tensor(op: str, name: str, x: Any) -> None:
    """Raise DtypeError unless x is a torch tensor."""
    if not isinstance(x, Tensor):
        raise DtypeError(message(op, name, "a torch tensor", type(x).__name__, "pass torch.as_tensor(...)"))


def check_vectors(op: str, x: Any, width: int, like: Tensor, *, rank: int | None = 3, name: str = "x") -> None:
    """Raise unless x is [B, T, width] (any rank for None) in the dtype and on the device of the parameter `like`."""
    check_tensor(op, name, x)
    if (rank is not None and x.ndim != rank) or x.ndim < 1 or x.shape[-1] != width:
        expected = f"[{'B, T' if rank else '...'}, {width}]"
        raise ShapeError(message(op, name, expected, str(list(x.shape)), "pass a batch of vectors"))
    check_like(op, name, x, like)


def check_like(op: str, name: str, x: Tensor, like: Tensor, what: str = "the layer's") -> None:
    """Raise unless x has the dtype and the device of `like`; under autocast the dtypes that it casts are one."""
    if x.device != like.device:
        fix = "call .to(device) on one of the two"
        raise DeviceError(message(op, name, f"a tensor on {what} device, {like.device}", f"one on {x.device}", fix))
    if x.dtype == like.dtype:
        return
    known = x.dtype in _AUTOCAST and like.dtype in _AUTOCAST and x.device.type != "meta"  # which has no autocast
    if not (known and torch.is_autocast_enabled(x.device.type)):
        fix = "convert one of the two, or call under torch.autocast"
        raise DtypeError(message(op, name, f"dtype {like.dtype}, {what}", str(x.dtype), fix))


def check_ids(op: str, ids: Any, vocab_size: int, device: torch.device) -> None:
    """Raise unless ids are int32 or int64 [B, T] on `device`, in [0, vocab_size).

    The range is looked at on the CPU and outside of traced graphs only: elsewhere a look would wait for the device.
    """
    check_tensor(op, "ids", ids)
    if ids.dtype not in IDS:
        raise DtypeError(message(op, "ids", "int32 or int64", str(ids.dtype), "pass token ids, ids.long()"))
    if ids.ndim != 2:
        raise ShapeError(message(op, "ids", "[B, T]", str(list(ids.shape)), "add the batch axis"))
    if ids.device != device:
        fix = "call .to(device) on one of the two"
        raise DeviceError(message(op, "ids", f"ids on the model's device, {device}", f"on {ids.device}", fix))
    if ids.device.type != "cpu" or torch.compiler.is_compiling() or not ids.numel():
        return
    low, high = (int(end) for end in ids.aminmax())
    if low < 0 or high >= vocab_size:
        expected, fix = f"tokens in [0, {vocab_size})", "check the tokenizer"
        raise ValueRangeError(message(op, "ids", expected, f"{low if low < 0 else high}", fix))


def slot_factors(op: str, slots_per_head: int, factors: Any) -> tuple[int, ...]:
    """Return the widths of the product-key factors, by default two of sqrt(N), or raise ValueRangeError."""
    if factors is None:
        n = math.isqrt(max(slots_per_head, 0))
        if n < 1 or n * n != slots_per_head:
            raise ValueRangeError(
                message(
                    op,
                    "slots_per_head",
                    "a square number when no factors are given",
                    str(slots_per_head),
                    f"pass {max(n, 1) ** 2} or {(n + 1) ** 2}, or factors whose product is {slots_per_head}",
                )
            )
        return n, n
    factors = tuple(int(n) for n in factors)
    if not factors or min(factors) < 1 or math.prod(factors) != slots_per_head:
        raise ValueRangeError(
            message(op, "factors", f"widths whose product is {slots_per_head}", str(factors), "change either")
        )
    return factors
