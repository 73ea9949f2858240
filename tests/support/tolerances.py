"""The one table of tolerances, each with its reason.

A tolerance bounds max |got - want| / max |want| over an array; `want` comes from the reference room
in float64 on the same numbers. Where `want` is zero everywhere, so must `got` be.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Tolerance(NamedTuple):
    """A relative bound and why it is what it is."""

    rtol: float
    reason: str


#: (op, dtype, restore); dtype is the state's, restore None where it does not matter
TOLERANCES = {
    ("delta_forward", "float64", None): Tolerance(1e-13, "order of sums only, over T <= 130 tokens"),
    ("delta_forward", "float32", None): Tolerance(4e-6, "order of sums; the float32 reference itself is off by 1.4e-6"),
    ("delta_forward", "bfloat16", None): Tolerance(
        1e-2, "a sum beside a rounding boundary falls to either side, 2^-8 each time; float32 reference: 2.8e-3"
    ),
    ("delta_forward", "float16", None): Tolerance(1.5e-3, "as bfloat16, with steps of 2^-11; float32 reference: 3e-4"),
    ("delta_backward", "float64", "snapshot"): Tolerance(1e-13, "order of sums only, over T <= 130 tokens"),
    ("delta_backward", "float32", "snapshot"): Tolerance(3e-6, "exact rows; the float32 reference is off by 5e-7"),
    ("delta_backward", "float64", "hybrid"): Tolerance(1e-12, "exp(tau) = 10 times the roundings of snapshot"),
    ("delta_backward", "float32", "hybrid"): Tolerance(1e-5, "exp(tau) = 10 times the roundings of snapshot"),
    ("delta_backward", "float64", "invert"): Tolerance(1e-11, "only where a slot's decays multiply to >= 1e-3"),
    ("delta_backward", "float32", "invert"): Tolerance(1e-3, "only where a slot's decays multiply to >= 1e-3"),
    ("delta_backward", "bfloat16", "snapshot"): Tolerance(1e-2, "rows one rounding apart, as in the forward"),
    ("delta_backward", "float16", "snapshot"): Tolerance(1.5e-3, "rows one rounding apart, as in the forward"),
    ("delta_chunked", "float64", None): Tolerance(1e-10, "another algorithm: one triangular solve per chunk"),
    ("delta_chunked", "float32", None): Tolerance(2e-5, "another algorithm: one triangular solve per chunk; 4e-6 seen"),
    ("topk_forward", "float32", None): Tolerance(0.0, "a rule, not an approximation: the same bits"),
    ("topk_forward", "float64", None): Tolerance(0.0, "a rule, not an approximation: the same bits"),
    ("topk_backward", "float32", None): Tolerance(0.0, "a scatter-add in a fixed order: the same bits"),
    ("topk_backward", "float64", None): Tolerance(0.0, "a scatter-add in a fixed order: the same bits"),
    ("product_keys", "float64", None): Tolerance(1e-12, "order of sums; a logarithm and an exponential per weight"),
    ("product_keys", "float32", None): Tolerance(2e-6, "order of sums; 6e-7 seen, eps times scores of about 10"),
    ("fwpkm", "float64", None): Tolerance(1e-12, "the definition's own bound; 1e-14 seen over three chunks"),
    ("fwpkm", "float32", None): Tolerance(1e-5, "the definition's bound, of the largest change, on equal slots"),
}


def tolerance(op: str, dtype: str, restore: str | None = None) -> float:
    """Return the bound of one row of the table."""
    return TOLERANCES[op, dtype, restore].rtol


def relative_error(got, want) -> float:
    """Return max |got - want| / max |want|; inf where shapes, or the places of NaN and infinities, differ."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    if got.shape != want.shape:
        return float("inf")
    finite = np.isfinite(want)
    if not np.array_equal(got[~finite], want[~finite], equal_nan=True) or not np.isfinite(got[finite]).all():
        return float("inf")
    error = np.abs(got[finite] - want[finite]).max(initial=0.0)
    scale = np.abs(want[finite]).max(initial=0.0)
    return float(error / scale) if scale > 0 else (0.0 if error == 0 else float("inf"))


def assert_close(got, want, op: str, dtype: str, restore: str | None = None, *, what: str = "") -> None:
    """Fail unless `got` is within the table's bound of `want`."""
    bound, error = tolerance(op, dtype, restore), relative_error(got, want)
    assert error <= bound, f"{what}: relative error {error:.3g} > {bound:.3g} ({op}, {dtype}, {restore})"
