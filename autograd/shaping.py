"""Operations that move numbers without changing them: reshape, transpose, index, concatenate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .modules import _module_of
from .tape import Context, Function, Tensor, as_tensor


class _Reshape(Function):
    @staticmethod
    def forward(ctx: Context, x: Any, shape: Any) -> Any:
        ctx.shape = x.shape
        return x.reshape(shape)

    @staticmethod
    def backward(ctx: Context, dy: Any) -> Any:
        return dy.reshape(ctx.shape), None


class _Transpose(Function):
    @staticmethod
    def forward(ctx: Context, x: Any, axes: tuple[int, ...]) -> Any:
        ctx.inverse = tuple(sorted(range(x.ndim), key=lambda i: axes[i] % x.ndim))
        return x.transpose(axes)

    @staticmethod
    def backward(ctx: Context, dy: Any) -> Any:
        return dy.transpose(ctx.inverse), None


class _Index(Function):
    @staticmethod
    def forward(ctx: Context, x: Any, key: Any) -> Any:
        ctx.save(key)
        ctx.shape = x.shape
        return _module_of(x).asarray(x[key])

    @staticmethod
    def backward(ctx: Context, dy: Any) -> Any:
        xp, (key,) = _module_of(dy), ctx.saved
        dx = xp.zeros(ctx.shape, dy.dtype)
        if all(k is None or k is Ellipsis or isinstance(k, int | slice) for k in key):
            dx[key] = dy
        else:  # an entry may have been taken several times: add, one after the other
            xp.add.at(dx, key, dy)
        return dx, None


class _Concatenate(Function):
    @staticmethod
    def forward(ctx: Context, *parts: Any, axis: int) -> Any:
        ctx.axis, ctx.sizes = axis, [part.shape[axis] for part in parts]
        return _module_of(*parts).concatenate(parts, axis=axis)

    @staticmethod
    def backward(ctx: Context, dy: Any) -> Any:
        ends, end = [], 0
        for size in ctx.sizes[:-1]:
            end += size
            ends.append(end)
        return tuple(_module_of(dy).split(dy, ends, axis=ctx.axis))


def reshape(x: Any, shape: int | tuple[int, ...]) -> Tensor:
    """Return `x` with another shape (one size may be -1), in C order.

    >>> reshape(Tensor([[1.0, 2.0], [3.0, 4.0]]), (-1,)).data
    array([1., 2., 3., 4.])
    """
    return _Reshape.apply(as_tensor(x), shape)


def transpose(x: Any, axes: Sequence[int] | None = None) -> Tensor:
    """Return `x` with its axes permuted: axis i of the result is axis ``axes[i]`` of `x`; reversed if None.

    >>> transpose(Tensor([[1.0, 2.0, 3.0]]), (1, 0)).shape
    (3, 1)
    """
    x = as_tensor(x)
    return _Transpose.apply(x, tuple(range(x.ndim))[::-1] if axes is None else tuple(axes))


def index(x: Any, key: Any) -> Tensor:
    """Return ``x[key]``: slices, integers, None, Ellipsis, arrays of integers or booleans, or a tuple of these.

    >>> x = Tensor([1.0, 2.0, 3.0], requires_grad=True)
    >>> index(x, [0, 0, 2]).sum().backward()
    >>> x.grad
    array([2., 0., 1.])
    """
    keys = tuple(k.data if isinstance(k, Tensor) else k for k in (key if isinstance(key, tuple) else (key,)))
    return _Index.apply(as_tensor(x), keys)


def concatenate(parts: Sequence[Any], axis: int = 0) -> Tensor:
    """Return the `parts` (tensors or arrays) joined along an axis that they have.

    >>> concatenate([Tensor([1.0]), [2.0, 3.0]]).data
    array([1., 2., 3.])
    """
    return _Concatenate.apply(*(as_tensor(part) for part in parts), axis=axis)
