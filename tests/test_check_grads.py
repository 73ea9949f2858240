"""The gradient checker is checked: it catches a thousandth, and says so where it cannot tell."""

from __future__ import annotations

import numpy as np
import pytest
from primitives import IDS, PRIMITIVES, normal

from sdm_lite import autograd as ag
from sdm_lite.autograd import Function, GradientError, Tensor, check_grads
from sdm_lite.errors import DtypeError, SdmError


def wrong_in(position, factor):
    """Return a function that is the identity on its inputs, with one input's gradient off by `factor`."""

    class Wrong(Function):
        @staticmethod
        def forward(ctx, *arrays):
            return tuple(np.copy(a) for a in arrays)

        @staticmethod
        def backward(ctx, *gradients):
            return tuple(d * factor if i == position else d for i, d in enumerate(gradients))

    return Wrong.apply


@pytest.mark.parametrize("name", PRIMITIVES)
def test_the_checker_catches_a_thousandth_in_each_input(name):
    f, arrays = PRIMITIVES[name]
    for position in range(len(arrays)):
        for seed in range(3):  # no lucky direction
            with pytest.raises(GradientError, match=f"gradient of input {position}"):
                check_grads(lambda *x, i=position: f(*wrong_in(i, 1.001)(*x)), arrays, seed=seed)


def test_the_checker_passes_a_right_identity_and_sees_other_faults():
    x, y = normal(50, 40), 1e-4 * normal(3)

    def f(x, y):
        return ag.exp(x) + y[0] * y[1] * y[2]

    check_grads(lambda *z: f(*wrong_in(0, 1.0)(*z)), [x, y])
    for factor in (0.0, -1.0, np.nan, 0.999):
        with pytest.raises(GradientError, match="gradient of input 0"):
            check_grads(lambda *z, factor=factor: f(*wrong_in(0, factor)(*z)), [x, y])
    with pytest.raises(GradientError, match="gradient of input 0"):  # a forgotten branch
        check_grads(lambda x: ag.exp(x) + x.detach(), [x])


def test_the_checker_catches_an_input_whose_gradient_is_small_beside_the_others():
    def f(a, b):
        return a * 1000.0 + b

    with pytest.raises(GradientError, match="gradient of input 1"):
        check_grads(lambda *x: f(*wrong_in(1, 1.001)(*x)), [normal(4), normal(4)])


def test_the_checker_says_so_where_it_cannot_measure():
    class Rough(Function):  # right, but computed in float32 inside
        @staticmethod
        def forward(ctx, x):
            ctx.save(x)
            return np.exp(x.astype(np.float32)).astype(x.dtype)

        @staticmethod
        def backward(ctx, dy):
            return dy * np.exp(ctx.saved[0])

    with pytest.raises(GradientError, match="sure to"):
        check_grads(Rough.apply, [normal(30)])
    check_grads(Rough.apply, [normal(30)], tolerance=1e-2)


def test_a_kink_outside_the_smallest_steps_does_no_harm():
    check_grads(lambda x: (x * x) ** 0.5, [np.full(3, 5e-3)])  # |x|: only the largest of the steps crosses 0


def test_the_checker_promotes_float32_and_hands_integers_through():
    seen = []

    def f(table, ids):
        seen.append((table.dtype, ids.dtype))
        return ag.embedding(table, ids)

    check_grads(f, [normal(5, 2).astype(np.float32), IDS])
    assert set(seen) == {(np.dtype(np.float64), IDS.dtype)}
    assert issubclass(GradientError, SdmError) and issubclass(GradientError, AssertionError)


def test_the_cost_of_the_checker_does_not_grow_with_the_size():
    calls = []
    check_grads(lambda x: calls.append(1) or ag.exp(x), [normal(1000)])
    assert len(calls) == 11


@pytest.mark.parametrize("inputs", [np.ones(3), Tensor(np.ones(3)), 1.0, None, (x for x in [np.ones(3)])])
def test_one_array_in_the_place_of_a_list_is_named(inputs):
    with pytest.raises(DtypeError, match=r"check_grads: inputs: expected a list.*Fix: pass \[x\]"):
        check_grads(ag.exp, inputs)


def test_arguments_in_the_other_order_are_named():
    with pytest.raises(DtypeError, match="check_grads: f: expected a function"):
        check_grads([np.ones(3)], ag.exp)
