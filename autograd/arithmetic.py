"""Arithmetic with broadcasting, matrix products and sums, each with its derivative.

Arrays, lists and numbers are taken wherever a tensor is; a single number takes the dtype of the other operand, so
that float32 stays float32.
"""

from __future__ import annotations

import numbers
from typing import Any

import numpy as np

from ..errors import DtypeError, ShapeError, message
from .modules import _is_float, _module_of
from .tape import Context, Function, Tensor, as_tensor


def _pair(a: Any, b: Any) -> tuple[Any, Any]:
    """Make both operands tensors or arrays, a single number in the dtype of the other operand."""
    return _operand(a, b), _operand(b, a)


def _operand(a: Any, other: Any) -> Any:
    if isinstance(a, Tensor):
        return a
    other = other.data if isinstance(other, Tensor) else other
    xp = _module_of(a, other)
    single = isinstance(a, numbers.Number | np.generic) or getattr(a, "shape", None) == ()
    return xp.asarray(a, dtype=other.dtype if single and _is_float(other) else None)


def _unbroadcast(gradient: Any, shape: tuple[int, ...]) -> Any:
    """Sum `gradient` over the axes along which an operand of `shape` was repeated."""
    extra = gradient.ndim - len(shape)
    repeated = tuple(i for i in range(gradient.ndim) if i < extra or (shape[i - extra] == 1 != gradient.shape[i]))
    return gradient.sum(axis=repeated).reshape(shape) if repeated else gradient


class _Add(Function):
    @staticmethod
    def forward(ctx: Context, a: Any, b: Any) -> Any:
        ctx.shapes = a.shape, b.shape
        return a + b

    @staticmethod
    def backward(ctx: Context, dy: Any) -> Any:
        return tuple(_unbroadcast(dy, s) if need else None for s, need in zip(ctx.shapes, ctx.needs, strict=True))


class _Mul(Function):
    @staticmethod
    def forward(ctx: Context, a: Any, b: Any) -> Any:
        ctx.save(a, b)
        return a * b

    @staticmethod
    def backward(ctx: Context, dy: Any) -> Any:
        a, b = ctx.saved
        da = _unbroadcast(dy * b, a.shape) if ctx.needs[0] else None
        return da, _unbroadcast(dy * a, b.shape) if ctx.needs[1] else None


class _Div(Function):
    @staticmethod
    def forward(ctx: Context, a: Any, b: Any) -> Any:
        y = a / b
        ctx.save(y, b)
        ctx.shape = a.shape
        return y

    @staticmethod
    def backward(ctx: Context, dy: Any) -> Any:
        y, b = ctx.saved
        da = dy / b
        return _unbroadcast(da, ctx.shape), _unbroadcast(-da * y, b.shape) if ctx.needs[1] else None


class _Neg(Function):
    @staticmethod
    def forward(ctx: Context, x: Any) -> Any:
        return -x

    @staticmethod
    def backward(ctx: Context, dy: Any) -> Any:
        return -dy


class _Power(Function):
    @staticmethod
    def forward(ctx: Context, x: Any, exponent: float) -> Any:
        ctx.save(x, exponent)
        return x**exponent

    @staticmethod
    def backward(ctx: Context, dy: Any) -> Any:
        x, exponent = ctx.saved
        if exponent == 0:  # 0 * x**-1 would be NaN at x = 0
            return dy * 0, None
        return dy * (exponent * x ** (exponent - 1)), None


class _Exp(Function):
    @staticmethod
    def forward(ctx: Context, x: Any) -> Any:
        y = _module_of(x).exp(x)
        ctx.save(y)
        return y

    @staticmethod
    def backward(ctx: Context, dy: Any) -> Any:
        return dy * ctx.saved[0]


class _Log(Function):
    @staticmethod
    def forward(ctx: Context, x: Any) -> Any:
        ctx.save(x)
        return _module_of(x).log(x)

    @staticmethod
    def backward(ctx: Context, dy: Any) -> Any:
        return dy / ctx.saved[0]


class _MatMul(Function):
    @staticmethod
    def forward(ctx: Context, a: Any, b: Any) -> Any:
        ctx.save(a, b)
        return a @ b

    @staticmethod
    def backward(ctx: Context, dy: Any) -> Any:
        a, b = ctx.saved
        # a vector is a row on the left and a column on the right, as in NumPy's matmul
        rows, columns = (a[None] if a.ndim == 1 else a), (b[:, None] if b.ndim == 1 else b)
        if b.ndim == 1:
            dy = dy[..., None]
        if a.ndim == 1:
            dy = dy[..., None, :]
        da = db = None
        if ctx.needs[0]:
            da = _unbroadcast(dy @ columns.swapaxes(-1, -2), rows.shape).reshape(a.shape)
        if ctx.needs[1] and b.ndim <= 2:  # one matrix for all of a's rows: one product instead of a sum of many
            db = (rows.reshape(-1, rows.shape[-1]).T @ dy.reshape(-1, dy.shape[-1])).reshape(b.shape)
        elif ctx.needs[1]:
            db = _unbroadcast(rows.swapaxes(-1, -2) @ dy, columns.shape)
        return da, db


class _Sum(Function):
    @staticmethod
    def forward(ctx: Context, x: Any, axis: Any, keepdims: bool, divisor: int) -> Any:
        xp = _module_of(x)
        ctx.shape, ctx.divisor = x.shape, divisor
        total = xp.sum(x, axis=axis, keepdims=True)
        ctx.kept = total.shape
        total = total if keepdims else total.reshape(_without(total.shape, axis))
        return total if divisor == 1 else total / total.dtype.type(divisor)

    @staticmethod
    def backward(ctx: Context, dy: Any) -> Any:
        dy = dy if ctx.divisor == 1 else dy / dy.dtype.type(ctx.divisor)
        return _module_of(dy).broadcast_to(dy.reshape(ctx.kept), ctx.shape), None, None, None


def _axes(ndim: int, axis: Any) -> tuple[int, ...]:
    """Return `axis` (None, one, or several) as non-negative numbers."""
    if axis is None:
        return tuple(range(ndim))
    return tuple(i % ndim for i in (axis if isinstance(axis, tuple) else (axis,)))


def _without(shape: tuple[int, ...], axis: Any) -> tuple[int, ...]:
    gone = _axes(len(shape), axis)
    return tuple(size for i, size in enumerate(shape) if i not in gone)


def add(a: Any, b: Any) -> Tensor:
    """Return a + b, with NumPy's broadcasting.

    >>> add(Tensor([[1.0], [2.0]]), [10.0, 20.0]).data
    array([[11., 21.],
           [12., 22.]])
    """
    return _Add.apply(*_pair(a, b))


def sub(a: Any, b: Any) -> Tensor:
    """Return a - b, with NumPy's broadcasting.

    >>> sub(1, Tensor([0.25])).data
    array([0.75])
    """
    a, b = _pair(a, b)
    return add(a, neg(b))


def mul(a: Any, b: Any) -> Tensor:
    """Return a * b elementwise, with NumPy's broadcasting.

    >>> x = Tensor([1.0, 2.0], requires_grad=True)
    >>> mul(x, 3).sum().backward()
    >>> x.grad
    array([3., 3.])
    """
    return _Mul.apply(*_pair(a, b))


def div(a: Any, b: Any) -> Tensor:
    """Return a / b elementwise, with NumPy's broadcasting.

    >>> div(1, Tensor([4.0])).data
    array([0.25])
    """
    return _Div.apply(*_pair(a, b))


def neg(x: Any) -> Tensor:
    """Return -x.

    >>> neg(Tensor([1.0])).data
    array([-1.])
    """
    return _Neg.apply(as_tensor(x))


def power(x: Any, exponent: float) -> Tensor:
    """Return x ** exponent for one real number `exponent`; its derivative is exponent * x ** (exponent - 1).

    Raises
    ------
    DtypeError
        `exponent` is not a number.

    >>> power(Tensor([3.0]), 2).data
    array([9.])
    """
    if not isinstance(exponent, numbers.Real):
        fix = "use exp(b * log(a)) for an exponent that is an array"
        raise DtypeError(message("power", "exponent", "a real number", type(exponent).__name__, fix))
    exponent = int(exponent) if float(exponent).is_integer() else float(exponent)
    return _Power.apply(as_tensor(x), exponent)


def exp(x: Any) -> Tensor:
    """Return e ** x.

    >>> exp(Tensor([0.0])).data
    array([1.])
    """
    return _Exp.apply(as_tensor(x))


def log(x: Any) -> Tensor:
    """Return the natural logarithm of x.

    >>> log(Tensor([1.0])).data
    array([0.])
    """
    return _Log.apply(as_tensor(x))


def matmul(a: Any, b: Any) -> Tensor:
    """Return the matrix product a @ b, with NumPy's rules for vectors and for leading axes.

    Parameters
    ----------
    a : Tensor or array [..., n, m] or [m]
    b : Tensor or array [..., m, p] or [m]

    Returns
    -------
    Tensor [..., n, p]

    Raises
    ------
    ShapeError
        An operand is a single number, or the inner sizes differ.

    >>> matmul(Tensor([[1.0, 2.0]]), [[3.0], [4.0]]).data
    array([[11.]])
    """
    a, b = _pair(a, b)
    if not a.ndim or not b.ndim or a.shape[-1] != b.shape[-2 if b.ndim > 1 else 0]:
        fix = "make the last axis of a as long as the last but one of b"
        raise ShapeError(message("matmul", "a, b", "[..., n, m] and [..., m, p]", f"{a.shape} and {b.shape}", fix))
    return _MatMul.apply(a, b)


def sum(x: Any, axis: int | tuple[int, ...] | None = None, keepdims: bool = False) -> Tensor:
    """Return the sum over `axis` (all axes if None).

    >>> sum(Tensor([[1.0, 2.0], [3.0, 4.0]]), axis=0).data
    array([4., 6.])
    """
    return _Sum.apply(as_tensor(x), axis, keepdims, 1)


def mean(x: Any, axis: int | tuple[int, ...] | None = None, keepdims: bool = False) -> Tensor:
    """Return the mean over `axis` (all axes if None).

    >>> mean(Tensor([[1.0, 2.0], [3.0, 4.0]]), axis=-1).data
    array([1.5, 3.5])
    """
    x = as_tensor(x)
    divisor = 1
    for i in _axes(x.ndim, axis):
        divisor *= x.shape[i]
    return _Sum.apply(x, axis, keepdims, divisor)
