"""The tape: `Tensor` and `Function`.

A forward call of a :class:`Function` computes on plain arrays. If one of its tensors wants a gradient, the call is
kept as a node of a graph, through which ``backward`` walks (:mod:`sdm_lite.autograd.graph`).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from ..errors import DtypeError, ShapeError, ValueRangeError, message
from .graph import Context, Edge, Node, walk
from .modules import _is_float, _module_of

_recording = threading.local()


@contextlib.contextmanager
def no_grad() -> Iterator[None]:
    """Record nothing in this block (and this thread): its results want no gradient.

    Works as a decorator too.

    >>> x = Tensor([1.0, 2.0], requires_grad=True)
    >>> with no_grad():
    ...     y = x * 2
    >>> y.requires_grad
    False
    """
    before = getattr(_recording, "off", False)
    _recording.off = True
    try:
        yield
    finally:
        _recording.off = before


class Function:
    """An operation with its derivative: subclass it, give `forward` and `backward`, call `apply`.

    ``forward(ctx, *arguments, **options)`` gets arrays where `apply` got tensors, and returns an array or a tuple.
    Floating-point outputs come out of `apply` as tensors, anything else (integer arrays, None) as it is.
    ``backward(ctx, *gradients)`` gets one C-contiguous gradient an output, None for an output that nothing used, and
    returns one gradient (or None) a positional argument, each with the shape of its input. It must not write into
    what it is given, nor into what `forward` saved: a second backward then gives the same numbers.

    >>> class Double(Function):
    ...     @staticmethod
    ...     def forward(ctx, x):
    ...         return 2 * x
    ...     @staticmethod
    ...     def backward(ctx, dy):
    ...         return 2 * dy
    >>> x = Tensor([1.0, 3.0], requires_grad=True)
    >>> y = Double.apply(x)
    >>> y.backward([1.0, 10.0])
    >>> x.grad
    array([ 2., 20.])
    """

    @staticmethod
    def forward(ctx: Context, *arguments: Any, **options: Any) -> Any:
        """Compute the outputs from arrays."""
        raise NotImplementedError

    @staticmethod
    def backward(ctx: Context, *gradients: Any) -> Any:
        """Compute the inputs' gradients from the outputs'."""
        raise NotImplementedError

    @classmethod
    def apply(cls, *arguments: Any, **options: Any) -> Any:
        """Run `forward` on the arguments' arrays and record it when a gradient is wanted."""
        for name, option in options.items():
            if isinstance(option, Tensor):
                fix = "hand tensors over by position"
                raise DtypeError(message(cls.__name__, name, "an option that is no Tensor", "a Tensor", fix))
        on = not getattr(_recording, "off", False)
        needs = tuple(on and isinstance(a, Tensor) and a.requires_grad for a in arguments)
        ctx = Context(needs)
        results = cls.forward(ctx, *(a.data if isinstance(a, Tensor) else a for a in arguments), **options)
        node = Node(cls, ctx, [a._edge() if n else None for a, n in zip(arguments, needs, strict=True)])
        several = isinstance(results, tuple)
        outputs = tuple(_output(r, node if any(needs) else None) for r in (results if several else (results,)))
        return outputs if several else outputs[0]


def _output(result: Any, node: Node | None) -> Any:
    """Wrap one floating-point result of a forward as output number ``node.outputs``."""
    index = 0
    if node is not None:
        index, node.outputs = node.outputs, node.outputs + 1
    if not _is_float(result):
        return result
    tensor = Tensor(result)
    if node is not None:
        tensor.requires_grad, tensor._node, tensor._index = True, node, index
    return tensor


class Tensor:
    """An array that remembers how it was made, so that `backward` can differentiate through it.

    Parameters
    ----------
    array : array_like
        NumPy or CuPy array (kept, not copied), nested list or number.
    requires_grad : bool
        Whether ``grad`` is wanted; floating-point arrays only.

    Attributes
    ----------
    data : array
        The numbers. Changing them in place between a forward and its backward makes that backward wrong.
    grad : array or None
        Of a leaf (a tensor made by the caller), the sum of the gradients of all backward calls so far, in ``data``'s
        shape and dtype; set it to None to start anew.

    Raises
    ------
    DtypeError
        `requires_grad` with an array that holds no floating-point numbers.

    >>> x = Tensor([1.0, 2.0], requires_grad=True)
    >>> (x * x + 3).sum().backward()
    >>> x.grad
    array([2., 4.])
    """

    __array_ufunc__ = None  # so that `array + tensor` comes to our __radd__, and np.exp(tensor) is an error

    def __init__(self, array: Any, requires_grad: bool = False):
        array = array.data if isinstance(array, Tensor) else array
        self.data: Any = _module_of(array).asarray(array)
        if requires_grad and not _is_float(self.data):
            fix = "give float32 or float64 numbers"
            raise DtypeError(message("Tensor", "array", "floating-point numbers", str(self.data.dtype), fix))
        self.grad: Any = None
        self.requires_grad = requires_grad
        self._node: Node | None = None
        self._index = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """The array's shape."""
        return self.data.shape

    @property
    def dtype(self) -> Any:
        """The array's dtype."""
        return self.data.dtype

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return self.data.ndim

    @property
    def T(self) -> Tensor:
        """The tensor with its axes in reverse order."""
        return shaping.transpose(self)

    def detach(self) -> Tensor:
        """Return a tensor with the same array (not a copy) and no history."""
        return Tensor(self.data)

    def item(self) -> float:
        """Return the one number of a tensor of size 1 as a Python number."""
        return self.data.item()

    def backward(self, gradient: Any = None) -> None:
        """Add the gradient of ``(self * gradient).sum()`` to ``grad`` of every leaf below.

        The graph is kept: another call adds the same numbers again.

        Parameters
        ----------
        gradient : array_like or Tensor, optional
            The upstream gradient, in this tensor's shape (any strides); 1 for a tensor of size 1.

        Raises
        ------
        ValueRangeError
            Nothing below this tensor wants a gradient.
        ShapeError
            `gradient` has another shape, or is missing for a tensor that is not of size 1.
        """
        if not self.requires_grad:
            fix = "make the inputs with Tensor(array, requires_grad=True), outside no_grad()"
            raise ValueRangeError(message("backward", "self", "a tensor that wants a gradient", "a constant", fix))
        if gradient is None and self.data.size != 1:
            fix = "reduce it with sum or mean, or hand over a gradient"
            raise ShapeError(message("backward", "self", "a tensor of size 1", f"shape {self.shape}", fix))
        xp = _module_of(self.data)
        gradient = gradient.data if isinstance(gradient, Tensor) else gradient
        gradient = xp.ones_like(self.data) if gradient is None else xp.asarray(gradient, dtype=self.dtype)
        if gradient.shape != self.shape:
            fix = "give it the shape of the tensor"
            raise ShapeError(message("backward", "gradient", f"shape {self.shape}", f"shape {gradient.shape}", fix))
        walk(self._edge(), gradient)

    def _edge(self) -> Edge:
        return Edge(self._node or self, self._index, self.shape, self.dtype)

    def reshape(self, *shape: Any) -> Tensor:
        """Return :func:`reshape` of this tensor; sizes one by one or as a tuple."""
        return shaping.reshape(self, shape[0] if len(shape) == 1 and isinstance(shape[0], tuple) else shape)

    def transpose(self, *axes: int) -> Tensor:
        """Return :func:`transpose` of this tensor."""
        return shaping.transpose(self, axes or None)

    def sum(self, axis: Any = None, keepdims: bool = False) -> Tensor:
        """Return :func:`sum` of this tensor."""
        return arithmetic.sum(self, axis, keepdims)

    def mean(self, axis: Any = None, keepdims: bool = False) -> Tensor:
        """Return :func:`mean` of this tensor."""
        return arithmetic.mean(self, axis, keepdims)

    def __add__(self, other: Any) -> Tensor:
        return arithmetic.add(self, other)

    def __radd__(self, other: Any) -> Tensor:
        return arithmetic.add(other, self)

    def __sub__(self, other: Any) -> Tensor:
        return arithmetic.sub(self, other)

    def __rsub__(self, other: Any) -> Tensor:
        return arithmetic.sub(other, self)

    def __mul__(self, other: Any) -> Tensor:
        return arithmetic.mul(self, other)

    def __rmul__(self, other: Any) -> Tensor:
        return arithmetic.mul(other, self)

    def __truediv__(self, other: Any) -> Tensor:
        return arithmetic.div(self, other)

    def __rtruediv__(self, other: Any) -> Tensor:
        return arithmetic.div(other, self)

    def __matmul__(self, other: Any) -> Tensor:
        return arithmetic.matmul(self, other)

    def __rmatmul__(self, other: Any) -> Tensor:
        return arithmetic.matmul(other, self)

    def __neg__(self) -> Tensor:
        return arithmetic.neg(self)

    def __pow__(self, exponent: float) -> Tensor:
        return arithmetic.power(self, exponent)

    def __getitem__(self, key: Any) -> Tensor:
        return shaping.index(self, key)

    def __len__(self) -> int:
        return len(self.data)

    def __bool__(self) -> bool:
        return bool(self.data)

    def __float__(self) -> float:
        return float(self.data)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        if self.requires_grad:
            fix = "use tensor.detach() or tensor.data"
            raise DtypeError(message("numpy.asarray", "tensor", "a constant", "a tensor that wants a gradient", fix))
        xp = _module_of(self.data)
        return xp.array(self.data, dtype=dtype) if copy else xp.asarray(self.data, dtype=dtype)

    def __format__(self, spec: str) -> str:
        if not spec:
            return str(self)
        if self.data.size != 1:
            fix = "format tensor.data, or its entries"
            raise ShapeError(message("format", "tensor", f"one number for {spec!r}", f"shape {self.shape}", fix))
        return format(self.item(), spec)

    def __repr__(self) -> str:
        return f"Tensor({self.data!r}, requires_grad={self.requires_grad})"


def as_tensor(x: Any) -> Tensor:
    """Return `x` itself if it is a tensor, else a constant tensor of it."""
    return x if isinstance(x, Tensor) else Tensor(x)


from . import arithmetic, shaping  # noqa: E402  (they build on this module; the operators above are theirs)
