"""What a small network needs beyond arithmetic: activations, normalisation, embedding, cross-entropy.

All are stable for large numbers of either sign: only numbers <= 0 are exponentiated.
"""

from __future__ import annotations

from typing import Any

from ..errors import DtypeError, ShapeError, ValueRangeError, message
from .arithmetic import mul
from .modules import _module_of
from .tape import Context, Function, Tensor, as_tensor


def _sigmoid(x: Any) -> tuple[Any, Any]:
    """Return sigmoid(x) and sigmoid(-x), both to full relative precision (1 - sigmoid(x) would round to 0)."""
    xp = _module_of(x)
    small = xp.exp(-xp.abs(x))
    low, high = small / (1 + small), 1 / (1 + small)
    return xp.where(x >= 0, high, low), xp.where(x >= 0, low, high)


class _Sigmoid(Function):
    @staticmethod
    def forward(ctx: Context, x: Any) -> Any:
        y, rest = _sigmoid(x)
        ctx.save(y, rest)
        return y

    @staticmethod
    def backward(ctx: Context, dy: Any) -> Any:
        y, rest = ctx.saved
        return dy * (y * rest)


class _Softplus(Function):
    @staticmethod
    def forward(ctx: Context, x: Any) -> Any:
        ctx.save(x)
        xp = _module_of(x)
        return xp.maximum(x, 0) + xp.log1p(xp.exp(-xp.abs(x)))

    @staticmethod
    def backward(ctx: Context, dy: Any) -> Any:
        return dy * _sigmoid(ctx.saved[0])[0]


class _Silu(Function):
    @staticmethod
    def forward(ctx: Context, x: Any) -> Any:
        ctx.save(x)
        return x * _sigmoid(x)[0]

    @staticmethod
    def backward(ctx: Context, dy: Any) -> Any:
        (x,) = ctx.saved
        y, rest = _sigmoid(x)
        return dy * (y * (1 + x * rest))


class _Softmax(Function):
    @staticmethod
    def forward(ctx: Context, x: Any, axis: int) -> Any:
        y = _module_of(x).exp(x - x.max(axis=axis, keepdims=True))
        y /= y.sum(axis=axis, keepdims=True)
        ctx.save(y)
        ctx.axis = axis
        return y

    @staticmethod
    def backward(ctx: Context, dy: Any) -> Any:
        (y,) = ctx.saved
        weighted = dy * y
        return weighted - y * weighted.sum(axis=ctx.axis, keepdims=True), None


class _RmsNorm(Function):
    @staticmethod
    def forward(ctx: Context, x: Any, epsilon: float) -> Any:
        xp = _module_of(x)
        inverse = 1 / xp.sqrt(xp.mean(x * x, axis=-1, keepdims=True) + x.dtype.type(epsilon))
        y = x * inverse
        ctx.save(y, inverse)
        return y

    @staticmethod
    def backward(ctx: Context, dy: Any) -> Any:
        y, inverse = ctx.saved
        return inverse * (dy - y * (dy * y).mean(axis=-1, keepdims=True)), None


class _Embedding(Function):
    @staticmethod
    def forward(ctx: Context, table: Any, ids: Any) -> Any:
        ctx.save(ids)
        ctx.shape = table.shape
        return table[ids]

    @staticmethod
    def backward(ctx: Context, dy: Any) -> Any:
        xp, (ids,) = _module_of(dy), ctx.saved
        dtable = xp.zeros(ctx.shape, dy.dtype)
        xp.add.at(dtable, ids.reshape(-1), dy.reshape(-1, *ctx.shape[1:]))  # one after the other, in the ids' order
        return dtable, None


class _CrossEntropy(Function):
    @staticmethod
    def forward(ctx: Context, logits: Any, targets: Any, counts: Any) -> Any:
        xp = _module_of(logits)
        shifted = logits - logits.max(axis=-1, keepdims=True)
        log_sum = xp.log(xp.exp(shifted).sum(axis=-1, keepdims=True))
        ctx.save(shifted - log_sum, targets, counts)
        ctx.number = logits.dtype.type(counts.sum())
        picked = xp.take_along_axis(ctx.saved[0], targets[..., None], axis=-1)[..., 0]
        return -xp.where(counts, picked, 0).sum() / ctx.number

    @staticmethod
    def backward(ctx: Context, dy: Any) -> Any:
        log_shares, targets, counts = ctx.saved
        xp = _module_of(log_shares)
        dlogits = xp.exp(log_shares)
        at = targets[..., None]
        xp.put_along_axis(dlogits, at, xp.take_along_axis(dlogits, at, axis=-1) - 1, axis=-1)
        # where, not a product: a row that is ignored may hold NaN
        return xp.where(counts[..., None], dlogits * (dy / ctx.number), dlogits.dtype.type(0)), None, None


def sigmoid(x: Any) -> Tensor:
    """Return 1 / (1 + exp(-x)).

    >>> sigmoid(Tensor([0.0, -1000.0])).data
    array([0.5, 0. ])
    """
    return _Sigmoid.apply(as_tensor(x))


def softplus(x: Any) -> Tensor:
    """Return log(1 + exp(x)).

    >>> softplus(Tensor([1000.0, -1000.0])).data
    array([1000.,    0.])
    """
    return _Softplus.apply(as_tensor(x))


def silu(x: Any) -> Tensor:
    """Return x * sigmoid(x).

    >>> silu(Tensor([0.0, 100.0])).data
    array([  0., 100.])
    """
    return _Silu.apply(as_tensor(x))


def softmax(x: Any, axis: int = -1) -> Tensor:
    """Return exp(x) / sum(exp(x)) along `axis`; an entry of -inf gets 0 (all of them -inf: NaN).

    >>> softmax(Tensor([1000.0, 1000.0])).data
    array([0.5, 0.5])
    """
    return _Softmax.apply(as_tensor(x), axis)


def rms_norm(x: Any, gain: Any = None, *, epsilon: float = 1e-6) -> Tensor:
    """Return x / sqrt(mean(x^2) + epsilon) * gain, the mean over the last axis.

    Parameters
    ----------
    x : Tensor or array [..., D]
    gain : Tensor or array [D], optional
    epsilon : float

    Returns
    -------
    Tensor [..., D]

    >>> rms_norm(Tensor([3.0, 3.0]), [1.0, 2.0], epsilon=0.0).data
    array([1., 2.])
    """
    y = _RmsNorm.apply(as_tensor(x), epsilon)
    return y if gain is None else mul(y, gain)


def embedding(table: Any, ids: Any) -> Tensor:
    """Return the rows ``table[ids]``; the gradients of a row that is taken several times are summed in a fixed order.

    Parameters
    ----------
    table : Tensor or array [V, ...]
    ids : array of integers [...], each in [0, V)

    Returns
    -------
    Tensor [..., *table.shape[1:]]

    Raises
    ------
    DtypeError
        `ids` are not integers.
    ValueRangeError
        An id is outside [0, V).

    >>> embedding(Tensor([[1.0], [2.0]]), [1, 1, 0]).data.ravel()
    array([2., 2., 1.])
    """
    table = as_tensor(table)
    ids = _integers("embedding", "ids", ids, table)
    if ids.size and (ids.min() < 0 or ids.max() >= len(table)):
        got, fix = f"ids from {ids.min()} to {ids.max()}", "check the vocabulary size"
        raise ValueRangeError(message("embedding", "ids", f"ids in [0, {len(table)})", got, fix))
    return _Embedding.apply(table, ids)


def cross_entropy(logits: Any, targets: Any, *, ignore_index: int = -100) -> Tensor:
    """Return the mean of -log softmax(logits)[target] over the targets that are not `ignore_index`.

    Parameters
    ----------
    logits : Tensor or array [..., V]
    targets : array of integers [...], each in [0, V) or equal to `ignore_index`

    Returns
    -------
    Tensor []

    Raises
    ------
    ShapeError
        `targets` does not have the shape of `logits` less the last axis.
    DtypeError
        `targets` are not integers.
    ValueRangeError
        A target is out of range, or all are ignored (a mean over nothing).

    >>> round(cross_entropy(Tensor([[0.0, 0.0], [5.0, 9.0]]), [1, -100]).item(), 4)
    0.6931
    """
    logits = as_tensor(logits)
    targets = _integers("cross_entropy", "targets", targets, logits)
    if targets.shape != logits.shape[:-1]:
        expected, fix = f"shape {logits.shape[:-1]}", "give one target for each row of logits"
        raise ShapeError(message("cross_entropy", "targets", expected, f"shape {targets.shape}", fix))
    counts = targets != ignore_index
    kept = targets[counts]
    if not kept.size:
        fix = "leave out a batch without targets"
        raise ValueRangeError(message("cross_entropy", "targets", "at least one that counts", "none", fix))
    if kept.min() < 0 or kept.max() >= logits.shape[-1]:
        expected, got = f"targets in [0, {logits.shape[-1]})", f"targets from {kept.min()} to {kept.max()}"
        raise ValueRangeError(message("cross_entropy", "targets", expected, got, "check the vocabulary size"))
    return _CrossEntropy.apply(logits, _module_of(targets).where(counts, targets, 0), counts)


def _integers(op: str, argument: str, ids: Any, like: Tensor) -> Any:
    """Return `ids` as an array beside `like`, or raise if they are not integers."""
    ids = ids.data if isinstance(ids, Tensor) else ids
    ids = _module_of(ids, like.data).asarray(ids)
    if ids.dtype.kind not in "iu":
        raise DtypeError(message(op, argument, "integers", str(ids.dtype), "convert them with .astype(int)"))
    return ids
