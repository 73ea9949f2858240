"""`check_grads`: a gradient held against differences of the function itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..errors import DtypeError, SdmError, message
from . import arithmetic
from .tape import Tensor, no_grad

#: step sizes of the difference table: step, step / 2, .. ; five remove the error terms up to step ** 8
_LEVELS = 5
_FIX = "correct the backward (or, where the function has a kink within `step` of the inputs, lower step)"


class GradientError(SdmError, AssertionError):
    """A gradient does not agree with differences of the function, or could not be compared."""


def check_grads(
    f: Callable[..., Any],
    inputs: Sequence[Any],
    *,
    tolerance: float = 1e-6,
    step: float = 1e-2,
    seed: int = 0,
) -> None:
    """Hold the gradients of `f` against central differences along one random direction for each input.

    With L = sum of (c * output) for fixed random c, and a random unit direction u of one input x,

        <dL/dx, u>  must equal  (L(x + h u) - L(x - h u)) / 2h  extrapolated to h = 0,

    so the cost does not grow with the size of `x`: ten calls of `f` an input. Everything runs in float64.

    Parameters
    ----------
    f : callable
        Takes tensors, returns a tensor or a tuple; what is no tensor in that tuple is left out. It must be smooth
        within `step` of the inputs: keep selections, bounds and kinks farther away.
    inputs : sequence of arrays or tensors
        Floating-point ones are checked, others are handed through.
    tolerance : float
        Largest difference, relative to the root mean square of <dL/dx, u> over the signs of u.
    step : float
        Largest h.
    seed : int
        Of the directions and of c.

    Raises
    ------
    GradientError
        A gradient is wrong, is not finite, or the differences are too rough to tell at this tolerance.
    DtypeError
        `f` cannot be called, or `inputs` is one array instead of a list.

    >>> from sdm_lite.autograd import sigmoid
    >>> check_grads(sigmoid, [np.linspace(-3, 3, 5)])
    """
    if not callable(f):
        raise DtypeError(
            message("check_grads", "f", "a function of tensors", type(f).__name__, "pass the function first")
        )
    if not isinstance(inputs, (list, tuple)):
        fix = "pass [x], one entry for each argument of f"
        raise DtypeError(message("check_grads", "inputs", "a list of arrays", type(inputs).__name__, fix))
    arrays = [np.asarray(x.data if isinstance(x, Tensor) else x) for x in inputs]
    arrays = [a.astype(np.float64) if a.dtype.kind == "f" else a for a in arrays]
    rng = np.random.default_rng(seed)
    cotangents: list[np.ndarray] = []

    def loss(values: Sequence[Any]) -> Any:
        """Return L on the tape."""
        outputs = f(*values)
        outputs = [o for o in (outputs if isinstance(outputs, tuple) else (outputs,)) if isinstance(o, Tensor)]
        if not cotangents:
            cotangents.extend(rng.standard_normal(o.shape) for o in outputs)
        total: Any = 0.0
        for output, cotangent in zip(outputs, cotangents, strict=True):
            total = arithmetic.add(total, arithmetic.sum(arithmetic.mul(output, cotangent)))
        return total

    tensors = [Tensor(a, requires_grad=a.dtype.kind == "f") for a in arrays]
    top = loss(tensors)
    if top.requires_grad:
        top.backward()
    for i, (tensor, array) in enumerate(zip(tensors, arrays, strict=True)):
        if not tensor.requires_grad or not array.size:
            continue
        direction = rng.standard_normal(array.shape)
        direction /= np.linalg.norm(direction)

        def along(h: float, i: int = i, direction: np.ndarray = direction) -> float:
            moved = [Tensor(a + h * direction if j == i else a) for j, a in enumerate(arrays)]
            with no_grad():
                return loss(moved).item()

        gradient = np.zeros_like(array) if tensor.grad is None else tensor.grad
        _compare(i, gradient, direction, _slope(along, step), abs(top.item()), tolerance)


def _slope(along: Callable[[float], float], step: float) -> tuple[float, float]:
    """Return d along / dh at 0 and an estimate of its error (Ridders: differences extrapolated to h = 0)."""
    best, error = float("nan"), float("inf")
    previous: list[float] = []
    for level in range(_LEVELS):
        h = step / 2**level
        row = [(along(h) - along(-h)) / (2 * h)]
        for order, coarser in enumerate(previous, start=1):
            row.append(row[-1] + (row[-1] - coarser) / (4**order - 1))
            doubt = max(abs(row[-1] - row[-2]), abs(row[-1] - coarser))
            if doubt < error:
                best, error = row[-1], doubt
        previous = row
    return best, error


def _compare(
    i: int, gradient: np.ndarray, direction: np.ndarray, slope: tuple[float, float], size: float, tolerance: float
) -> None:
    """Raise GradientError unless <gradient, direction> is the measured slope."""
    measured, doubt = slope
    claimed = float(np.sum(gradient * direction))
    name = f"gradient of input {i}"
    # What <gradient, direction> comes to with random signs; it does not vanish where the sum does by chance. Where the
    # gradient itself vanishes, rounding in L is what limits the comparison.
    scale = max(float(np.linalg.norm(gradient * direction)), abs(measured), 1e-5 * size)
    allowed = tolerance * scale
    if abs(claimed - measured) <= allowed and doubt <= allowed:
        return
    if abs(claimed - measured) <= 10 * doubt and doubt > allowed:
        expected, got = f"differences sure to {allowed:.1e}", f"{measured:.10g} +- {doubt:.1e}, against {claimed:.10g}"
        fix = "move the inputs away from kinks and bounds, or try another step"
        raise GradientError(message("check_grads", name, expected, got, fix))
    expected = f"{measured:.10g} +- {allowed:.1e} along a random direction"
    raise GradientError(message("check_grads", name, expected, f"{claimed:.10g}", _FIX))
