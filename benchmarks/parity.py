"""What must agree before anything is timed. A benchmark with a wrong peer, or a wrong op, reports nothing."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from . import ours
from .peers import dense_gdn, torch_loop, torch_topk
from .shapes import Shape, make_inputs

# float32 in two orders of summation: relative to the largest entry, over few tokens
FORWARD, BACKWARD = 1e-5, 2e-5


def relative_error(got, want) -> float:
    """Return max |got - want| / max |want|."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return float(np.abs(got - want).max() / np.abs(want).max())


def check(name: str, got, want, tolerance: float) -> None:
    """Raise AssertionError where two results differ by more than `tolerance`."""
    error = relative_error(got, want)
    if not error <= tolerance:
        raise AssertionError(f"parity, {name}: relative error {error:.3g} > {tolerance:g}; nothing is timed")


def check_delta(shape: Shape, tokens: int = 12) -> None:
    """Hold the ops, the torch loop and its two backward forms to each other at the shape's widths."""
    shape = dataclasses.replace(shape, T=tokens, N=min(shape.N, 2048))  # few slots: the collisions matter more
    inputs = make_inputs(shape, seed=1)
    loop_inputs = torch_loop.from_inputs(inputs, shape.N)

    def fresh_table() -> torch.Tensor:
        return torch.from_numpy(inputs.state.copy()).view(-1, shape.D)

    table = fresh_table()
    with torch.no_grad():
        want = torch_loop.from_loop(torch_loop.forward(table, loop_inputs), shape.B)
    state = inputs.state.copy()
    check("in place, readings", ours.update(inputs, state)(), want, FORWARD)
    check("in place, state", state, table.view(state.shape).numpy(), FORWARD)
    check("functional, readings", ours.functional(inputs)(), want, FORWARD)

    auto = torch_loop.autograd_gradients(fresh_table(), loop_inputs)
    dtable = torch.zeros(shape.B * shape.H * shape.N, shape.D)
    hand = {**torch_loop.hand_gradients(fresh_table(), dtable, loop_inputs), "table": dtable}
    for name, want_gradient in auto.items():
        check(f"hand-written backward, {name}", hand[name], want_gradient, BACKWARD)
    # the op differentiates log alpha: dlog_alpha = alpha dalpha
    auto["log_decay"] = auto.pop("alpha") * loop_inputs.alpha
    auto["state"] = auto.pop("table").view(state.shape)
    for restore in ("hybrid", "snapshot", "invert"):
        for name, got in ours.gradients(inputs, restore=restore, of_state=True)().items():
            wanted = auto[name] if name == "state" else torch_loop.from_loop(auto[name], shape.B)
            check(f"{restore}, {name}", got, wanted, BACKWARD)


def check_gdn(shape: Shape) -> None:
    """Hold the chunked dense form to its token loop."""
    shape = dataclasses.replace(shape, T=128)
    loop_inputs = torch_loop.from_inputs(make_inputs(dataclasses.replace(shape, N=256), seed=1), 256)
    dense = torch.zeros(shape.lanes, shape.W, shape.D)
    with torch.no_grad():
        check(
            "dense, chunked",
            dense_gdn.chunked(dense, loop_inputs),
            dense_gdn.token_loop(dense.clone(), loop_inputs),
            1e-4,
        )


def check_topk(scores: np.ndarray, k: int) -> None:
    """Hold the selection to both torch pipelines: equal sets of values; equal slots where no two sums tie."""
    values, slots = ours.topk(scores, k)()
    tensor = torch.from_numpy(scores)
    for peer in (torch_topk.outer_sum(tensor, k), torch_topk.staircase(tensor, k, torch_topk.staircase_ranks(k))):
        if not np.array_equal(np.sort(values, -1), np.sort(peer[0].numpy(), -1)):
            raise AssertionError("parity, top-k: the selected sums differ; nothing is timed")
        same = (slots == peer[1].numpy()).all(-1).mean()
        if same < 0.99:
            raise AssertionError(f"parity, top-k: only {same:.1%} of the rows have the same slots; nothing is timed")
