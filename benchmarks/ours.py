"""The library's side of each comparison: calls without arguments, over arrays prepared outside the timing."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import torch

import sdm_lite

from .shapes import Inputs

LEAVES = ("values", "write_weights", "log_decay", "beta", "read_weights")


def set_threads(count: int) -> None:
    """Give ours and torch the same number of threads."""
    os.environ["SDM_LITE_NUM_THREADS"] = str(count)
    torch.set_num_threads(count)


def update(inputs: Inputs, state: np.ndarray) -> Callable[[], np.ndarray]:
    """Return the in-place form on `state`, which goes on from call to call."""
    return lambda: sdm_lite.sparse_delta_rule_(*inputs.call, state)


def functional(inputs: Inputs, *, final: bool = False) -> Callable[[], np.ndarray]:
    """Return the functional form, which leaves the state as it is; `final` also copies out the final state."""
    return lambda: sdm_lite.sparse_delta_rule(*inputs.call, inputs.state, output_final_state=final)[0]


def gradients(inputs: Inputs, *, restore: str = "hybrid", of_state: bool = False) -> Callable[[], dict]:
    """Return forward + backward through torch; gradients of the five float inputs, and of the state where asked."""
    named = {name: torch.from_numpy(array) for name, array in vars(inputs).items()}
    leaves = [named[name].requires_grad_() for name in LEAVES]
    if of_state:
        leaves.append(named["state"].requires_grad_())
    call = (
        "values",
        "write_slots",
        "write_weights",
        "log_decay",
        "beta",
        "read_slots",
        "read_weights",
        "state",
    )

    def run() -> dict:
        readings, _ = sdm_lite.sparse_delta_rule(*(named[name] for name in call), restore=restore)
        found = torch.autograd.grad(readings, leaves, named["dreadings"])
        return dict(zip((*LEAVES, "state"), found))

    return run


def topk(scores: np.ndarray, k: int) -> Callable[[], tuple[np.ndarray, np.ndarray]]:
    """Return the selection over two equal factors."""
    return lambda: sdm_lite.product_key_topk(scores, k)


def logged_rows(inputs: Inputs, restore: str = "hybrid") -> int:
    """Return how many rows a forward logs for its backward, from what it saves.

    Asks the cpu room's door, since the public functions rightly do not show it.
    """
    from sdm_lite import cpu
    from sdm_lite.rooms import DeltaInputs, DeltaOptions

    call = list(inputs.call)
    call[3] = call[3][..., None]
    _, _, saved = cpu.sparse_delta_forward(DeltaInputs(*call), inputs.state, DeltaOptions(restore=restore), save=True)
    log_place = saved[7]  # the row's number in the log, or -1
    return int((log_place >= 0).sum())
