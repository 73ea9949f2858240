"""Gates of the recurrent layers, their initialisation, and the choices shared by all of them (spec section 3)."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import ValueRangeError, message

DECAY_INITS = ("fla", "slow", "stratified")
KEY_INITS = ("independent", "shared")
OUTPUT_GATES = (False, True, "silu")


def choose(op: str, argument: str, value: Any, allowed: tuple) -> None:
    """Raise ValueRangeError unless `value` is one of `allowed`."""
    if not any(type(value) is type(one) and value == one for one in allowed):
        raise ValueRangeError(message(op, argument, f"one of {allowed}", repr(value), "choose one of these"))


def check_divides(op: str, argument: str, divisor: int, total: int, what: str) -> None:
    """Raise ValueRangeError unless `divisor` >= 1 divides `total`, which is called `what` in the text."""
    if divisor < 1 or total % divisor:
        raise ValueRangeError(
            message(op, argument, f"a divisor of {what} = {total}", str(divisor), f"change {argument} or {what}")
        )


def widen(x: Tensor) -> Tensor:
    """Return `x` in the gates' dtype: float64 stays, everything else becomes float32."""
    return x if x.dtype == torch.float64 else x.float()


def plain_precision(x: Tensor) -> AbstractContextManager[Any]:
    """Return a context in which autocast does not narrow the arithmetic on `x`'s device."""
    if x.device.type == "meta":  # which has no autocast
        return nullcontext()
    return torch.autocast(device_type=x.device.type, enabled=False)


def log_decay_and_beta(
    x: Tensor, a_proj: nn.Linear, b_proj: nn.Linear, A_log: Tensor, dt_bias: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the log decay and the write strength of every token and head, in float32 also under autocast::

        log_decay = -exp(A_log) * softplus(x W_a + dt_bias)        beta = sigmoid(x W_b)

    Parameters
    ----------
    x : Tensor [B, T, dim]
    a_proj, b_proj : nn.Linear dim -> H
    A_log, dt_bias : Tensor [H]

    Returns
    -------
    log_decay, beta : Tensor [B, T, H]
        float32, or float64 for float64 input; log_decay <= 0.
    """
    with plain_precision(x):
        a, b = (F.linear(widen(x), widen(p.weight), widen(p.bias)) for p in (a_proj, b_proj))
        return -widen(A_log).exp() * F.softplus(a + widen(dt_bias)), b.sigmoid()


@torch.no_grad()
def init_decay(a_proj: nn.Linear, A_log: Tensor, dt_bias: Tensor, kind: str) -> None:
    """Fill the decay gate's parameters in place.

    "fla": A uniform in (0, 16), dt log-uniform in [0.001, 0.1], per head: with few heads one draw sets the
    whole layer's decay. "slow": A = 1, dt = 0.001 (alpha about 0.999) and a_proj with std 0.02.
    "stratified": as slow, but dt at the middles of H equal strata of log [0.001, 0.1]: slow to fast heads,
    the same on every seed.
    """
    heads = A_log.numel()
    low, high = math.log(0.001), math.log(0.1)
    if kind == "fla":
        # 1 - rand() lies in (0, 1], so that log A is finite
        A_log.copy_(((1 - torch.rand_like(A_log)) * 16).log())
        log_dt = low + torch.rand_like(A_log) * (high - low)
    else:
        A_log.zero_()
        a_proj.weight.normal_(std=0.02)
        middles = (torch.arange(heads, dtype=A_log.dtype, device=A_log.device) + 0.5) / heads
        log_dt = torch.full_like(A_log, low) if kind == "slow" else low + middles * (high - low)
    dt = log_dt.exp()
    dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))  # inverse softplus


def gate_readings(readings: Tensor, gate: Tensor, kind: bool | str) -> Tensor:
    """Return the readings times sigmoid(gate) (True) or silu(gate) ("silu")."""
    return readings * (F.silu(gate) if kind == "silu" else gate.sigmoid())
