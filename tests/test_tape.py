"""The tape: values against torch, gradients against differences, and the rules of the walk back."""

from __future__ import annotations

import subprocess
import sys
import threading
import types

import numpy as np
import pytest
from primitives import PRIMITIVES, TARGETS, normal, positive

from sdm_lite import autograd as ag
from sdm_lite.autograd import Function, Tensor, check_grads, no_grad
from sdm_lite.errors import DtypeError, ShapeError, ValueRangeError


@pytest.mark.parametrize("name", PRIMITIVES)
def test_gradient_agrees_with_differences(name):
    f, arrays = PRIMITIVES[name]
    # noise of the differences is about 1e-12 here; a thousandth of the fault that the checker has to catch
    check_grads(f, arrays, tolerance=1e-8)


# ---- values ---------------------------------------------------------------------------------------------------


def test_values_are_those_of_torch():
    torch = pytest.importorskip("torch")
    functional = torch.nn.functional
    x, gain = normal(2, 3, 5), normal(5)
    t = torch.tensor(x)
    pairs = [
        (ag.sigmoid(x), torch.sigmoid(t)),
        (ag.softplus(x), functional.softplus(t)),
        (ag.silu(x), functional.silu(t)),
        (ag.softmax(x, axis=1), torch.softmax(t, 1)),
        (ag.rms_norm(x, gain, epsilon=1e-5), functional.rms_norm(t, (5,), torch.tensor(gain), 1e-5)),
        (ag.cross_entropy(x, TARGETS), functional.cross_entropy(t.reshape(-1, 5), torch.tensor(TARGETS).reshape(-1))),
    ]
    for mine, theirs in pairs:
        np.testing.assert_allclose(mine.data, theirs.numpy(), rtol=1e-13)  # a few roundings of 2e-16


def test_operators_are_numpys():
    a, b = normal(3, 3), positive(3)
    x, y = Tensor(a), Tensor(b)
    for mine, want in [
        (x + y, a + b), (b + x, a + b), (1 + x, 1 + a), (x - y, a - b), (2 - x, 2 - a), (x * y, a * b), (3 * x, 3 * a),
        (x / y, a / b), (1 / y, 1 / b), (-x, -a), (x @ y, a @ b), (a @ y, a @ b), (y**2, b**2), (x[1], a[1]),
        (x.T, a.T), (x.sum(0), a.sum(0)), (x.mean(), a.mean()), (x.reshape(9), a.reshape(9)),
        (x.transpose(1, 0), a.T), (x[[0, 0], 1:], a[[0, 0], 1:]), (x[Tensor([2, 0])], a[[2, 0]]),
    ]:  # fmt: skip
        assert isinstance(mine, Tensor)
        np.testing.assert_allclose(mine.data, want, rtol=1e-15)  # a product may sum in another order


def test_float32_stays_float32():
    x = Tensor(np.ones((2, 3), np.float32), requires_grad=True)
    gain = Tensor(np.ones(3, np.float32), requires_grad=True)
    y = ag.rms_norm(ag.softmax(ag.silu(2.0 * x + np.float64(1.0)) / 3 - np.array(0.5)), gain) ** 2
    z = ag.concatenate([ag.softplus(y), ag.sigmoid(y)], axis=-1).mean() * 1.5 + np.float64(1)
    loss = ag.cross_entropy(y, [0, 1]) + z
    assert {t.dtype for t in (y, z, loss)} == {np.dtype(np.float32)}
    loss.backward()
    assert x.grad.dtype == gain.grad.dtype == np.float32


def test_gradients_come_in_the_dtype_of_each_input():
    x = Tensor(np.ones(3, np.float32), requires_grad=True)
    w = Tensor(np.ones(3, np.float64), requires_grad=True)
    y = x * w
    assert y.dtype == np.float64
    y.sum().backward()
    assert (x.grad.dtype, w.grad.dtype) == (np.float32, np.float64)


def test_extreme_numbers_neither_overflow_nor_lose_the_tail():
    for dtype, large in ((np.float32, 80), (np.float64, 700)):
        x = Tensor(np.array([-1e4, -large, -40, 0, 40, large, 1e4], dtype), requires_grad=True)
        exact = np.exp(-np.array([40, large], np.float64))
        with np.errstate(over="raise", invalid="raise", divide="raise"):
            for f in (ag.sigmoid, ag.softplus, ag.silu):
                x.grad = None
                y = f(x)
                y.sum().backward()
                assert np.isfinite(y.data).all() and np.isfinite(x.grad).all()
            rtol = 20 * np.finfo(dtype).eps * large  # exp() of a number that is rounded to large * eps
            np.testing.assert_allclose(ag.sigmoid(x).data[[2, 1]], exact, rtol=rtol)
            np.testing.assert_allclose(ag.softplus(x).data[[2, 1]], exact, rtol=rtol)
            x.grad = None
            ag.sigmoid(x).sum().backward()
            np.testing.assert_allclose(x.grad[[4, 5]], exact, rtol=rtol)
            rows = Tensor(np.array([[1e4, -1e4, 1e4], [-1e4, -2e4, -np.inf]], dtype), requires_grad=True)
            np.testing.assert_array_equal(ag.softmax(rows).data, [[0.5, 0, 0.5], [1, 0, 0]])
            loss = ag.cross_entropy(rows, [1, 0])
            loss.backward()
        assert loss.item() == pytest.approx((2e4 + np.log(2)) / 2, rel=1e-6)
        np.testing.assert_allclose(rows.grad, [[0.25, -0.5, 0.25], [0, 0, 0]], rtol=1e-6)


def test_cross_entropy_ignores_rows_even_if_they_hold_nan():
    logits = Tensor(np.array([[0.0, 0.0], [np.nan, np.nan], [1.0, 3.0]]), requires_grad=True)
    loss = ag.cross_entropy(logits, [0, -1, 1], ignore_index=-1)
    loss.backward()
    rest = Tensor(logits.data[[0, 2]], requires_grad=True)
    want = ag.cross_entropy(rest, [0, 1])
    want.backward()
    assert loss.item() == want.item()
    np.testing.assert_array_equal(logits.grad[[0, 2]], rest.grad)
    np.testing.assert_array_equal(logits.grad[1], 0)


# ---- the walk back --------------------------------------------------------------------------------------------


def test_deep_graphs_do_not_recurse():
    x = y = Tensor(np.ones(2), requires_grad=True)
    for _ in range(10_000):
        y = y + 1.0
    y.sum().backward()
    np.testing.assert_array_equal(x.grad, 1)
    del y  # freeing the chain must not recurse either


def test_shared_nodes_are_visited_once():
    x = y = Tensor(np.ones(1), requires_grad=True)
    for _ in range(60):  # 2 ** 60 paths
        y = y + y
    y.backward()
    assert x.grad[0] == 2.0**60


def test_a_second_backward_adds_the_same_numbers():
    x, w = Tensor(normal(3, 4), requires_grad=True), Tensor(normal(4, 2), requires_grad=True)
    y = ag.rms_norm(ag.silu(x @ w)).sum()
    y.backward()
    first = x.grad.copy(), w.grad.copy()
    y.backward()
    np.testing.assert_array_equal(x.grad, 2 * first[0])
    np.testing.assert_array_equal(w.grad, 2 * first[1])
    x.grad = w.grad = None
    y.backward()
    np.testing.assert_array_equal(x.grad, first[0])
    np.testing.assert_array_equal(w.grad, first[1])


@pytest.mark.parametrize("name", PRIMITIVES)
def test_a_repeated_upstream_gradient_gives_the_bits_of_an_explicit_one(name):
    f, arrays = PRIMITIVES[name]

    def run(make):
        inputs = [Tensor(a, requires_grad=True) for a in arrays]
        y = f(*inputs)
        y = y[0] if isinstance(y, tuple) else y
        y.backward(make(y.shape))
        return [x.grad for x in inputs]

    third = 1 / 3  # not a power of two: the order of a sum shows in its last bit
    explicit = run(lambda shape: np.full(shape, third))
    for make in (
        lambda shape: np.broadcast_to(np.float64(third), shape),
        lambda shape: np.full((*shape, 2), third)[..., 0],
        lambda shape: np.full(shape[::-1], third).T,
    ):
        for got, want in zip(run(make), explicit, strict=True):
            assert got.tobytes() == want.tobytes() and got.flags.c_contiguous


def test_sum_is_a_gradient_of_ones_bit_for_bit():
    data, weights = normal(30, 20), normal(20)

    def run(backward):
        x, w = Tensor(data, requires_grad=True), Tensor(weights, requires_grad=True)
        backward(ag.sigmoid(x * w))
        return x.grad.tobytes(), w.grad.tobytes()

    assert run(lambda y: y.sum().backward()) == run(lambda y: y.backward(np.ones((30, 20))))


def test_gradients_are_own_arrays():
    x, y = Tensor(np.zeros(3), requires_grad=True), Tensor(np.zeros(3), requires_grad=True)
    upstream = np.ones(3)
    (x + y).backward(upstream)
    x.grad += 5
    np.testing.assert_array_equal(y.grad, 1)
    np.testing.assert_array_equal(upstream, 1)
    z = Tensor(np.zeros(3), requires_grad=True)
    z.backward(upstream)
    z.grad += 1
    np.testing.assert_array_equal(upstream, 1)
    b = Tensor(np.zeros(3), requires_grad=True)
    b.sum().backward()
    b.grad += 1  # not a read-only, repeated view
    np.testing.assert_array_equal(b.grad, 2)


def test_only_leaves_that_want_it_get_a_gradient():
    x, c = Tensor(normal(3), requires_grad=True), Tensor(normal(3))
    y = x * c
    z = y.detach() * c
    (y * 2).sum().backward()
    assert c.grad is None and y.grad is None and not z.requires_grad and y.requires_grad
    np.testing.assert_array_equal(x.grad, 2 * c.data)
    assert np.shares_memory(y.detach().data, y.data)


def test_no_grad_holds_for_its_block_and_thread_only():
    x = Tensor(normal(2), requires_grad=True)
    elsewhere = []
    with no_grad():
        thread = threading.Thread(target=lambda: elsewhere.append((x * 2).requires_grad))
        thread.start()
        thread.join()
        with no_grad():
            pass
        assert not (x * 2).requires_grad
    assert elsewhere == [True] and (x * 2).requires_grad
    with pytest.raises(RuntimeError), no_grad():
        raise RuntimeError
    assert (x * 2).requires_grad


# ---- functions of one's own -----------------------------------------------------------------------------------


class Split(Function):
    """(x, 3 x, the integers of x): three outputs, one of them without a gradient."""

    @staticmethod
    def forward(ctx, x, scale=3.0):
        ctx.save(scale)
        return x + 0, scale * x, x.astype(int)

    @staticmethod
    def backward(ctx, d_same, d_scaled, d_integers):
        assert d_integers is None
        (scale,) = ctx.saved
        parts = [d for d in (d_same, None if d_scaled is None else scale * d_scaled) if d is not None]
        return sum(parts), *([None] * (len(ctx.needs) - 1))


def test_outputs_that_nothing_used_arrive_as_none():
    x = Tensor(np.array([1.5, 2.5]), requires_grad=True)
    for pick, want in ((0, 1), (1, 3)):
        x.grad = None
        Split.apply(x)[pick].sum().backward()
        np.testing.assert_array_equal(x.grad, want)
    same, scaled, integers = Split.apply(x, 5.0)
    assert isinstance(integers, np.ndarray) and integers.tolist() == [1, 2]
    x.grad = None
    (same + scaled).sum().backward()
    np.testing.assert_array_equal(x.grad, 6)
    assert not Split.apply(x.data)[0].requires_grad


def test_a_faulty_function_is_named_and_leaves_no_half_gradients():
    class Bad(Function):
        @staticmethod
        def forward(ctx, a, b):
            return a + b

        @staticmethod
        def backward(ctx, dy):
            return ctx.wrong(dy)

    for wrong, text in ((lambda dy: dy, "2 gradients"), (lambda dy: (dy, dy), r"gradient 1: expected shape \(1,\)")):
        x, b = Tensor(np.ones(3), requires_grad=True), Tensor(np.ones(1), requires_grad=True)
        y = Bad.apply(x, b)
        y._node.ctx.wrong = wrong
        with pytest.raises(ShapeError, match=text):
            (y + x).sum().backward()
        assert x.grad is None and b.grad is None
    with pytest.raises(DtypeError, match="scale"):
        Split.apply(x, scale=x)


# ---- mistakes, packaging --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mistake", "error"),
    [
        (lambda: Tensor([1, 2], requires_grad=True), DtypeError),
        (lambda: Tensor([1.0]).backward(), ValueRangeError),
        (lambda: Tensor([1.0, 2.0], requires_grad=True).backward(), ShapeError),
        (lambda: Tensor([1.0, 2.0], requires_grad=True).backward([[1.0, 1.0]]), ShapeError),
        (lambda: np.asarray(Tensor([1.0], requires_grad=True)), DtypeError),
        (lambda: np.exp(Tensor([1.0])), TypeError),
        (lambda: Tensor([1.0]) ** Tensor([2.0]), DtypeError),
        (lambda: ag.matmul(normal(2, 3), normal(2, 3)), ShapeError),
        (lambda: ag.matmul(normal(2), 1.0), ShapeError),
        (lambda: ag.embedding(normal(3, 2), [3]), ValueRangeError),
        (lambda: ag.embedding(normal(3, 2), [-1]), ValueRangeError),
        (lambda: ag.embedding(normal(3, 2), [0.0]), DtypeError),
        (lambda: ag.cross_entropy(normal(2, 3), [0]), ShapeError),
        (lambda: ag.cross_entropy(normal(2, 3), [0, 3]), ValueRangeError),
        (lambda: ag.cross_entropy(normal(2, 3), [0, -1]), ValueRangeError),
        (lambda: ag.cross_entropy(normal(2, 3), [-100, -100]), ValueRangeError),
        (lambda: ag.cross_entropy(normal(2, 3), [0.0, 1.0]), DtypeError),
    ],
)
def test_mistakes_raise(mistake, error):
    with pytest.raises(error):
        mistake()


def test_tensors_in_format_strings():
    one = Tensor([[1.25]], requires_grad=True)
    assert f"{one:.1f} {one.sum():>8.3f}" == "1.2    1.250" and f"{one}" == str(one)
    with pytest.raises(ShapeError, match=r"format: tensor: .*shape \(2,\)"):
        f"{Tensor([1.0, 2.0]):.1f}"


def test_constants_convert_to_numpy():
    assert np.asarray(Tensor([1.0, 2.0])).tolist() == [1.0, 2.0]
    assert float(Tensor(2.0)) == 2.0 and bool(Tensor([1])) and len(Tensor([1, 2])) == 2
    assert [t.item() for t in Tensor([1.0, 2.0])] == [1.0, 2.0]


def test_neither_torch_nor_cupy_is_imported():
    code = "import sys, sdm_lite.autograd; sys.exit(bool({'torch', 'cupy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_cupy_is_used_where_the_caller_has_it(monkeypatch):
    from sdm_lite.autograd.modules import _module_of

    cupy = types.ModuleType("cupy")
    cupy.ndarray = type("ndarray", (), {})
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    assert _module_of(np.ones(1), cupy.ndarray()) is cupy
    assert _module_of(np.ones(1), 3.0) is np
