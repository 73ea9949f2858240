"""What the tape recorded, and the walk back through it.

Each recorded call is a `Node` with an `Edge` to the maker of each input. The walk visits the nodes so that each comes
after all its consumers, and asks each for the gradients of its inputs. Gradients are arrays, not tensors: there is no
second derivative.
"""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import ShapeError, message
from .modules import _module_of

if TYPE_CHECKING:
    from .tape import Function


class Context(types.SimpleNamespace):
    """What a `Function` keeps from forward to backward: ``save(...)``, ``saved``, and free attributes.

    ``needs`` says, for each positional argument of `apply`, whether its gradient is wanted.
    """

    def __init__(self, needs: tuple[bool, ...]):
        super().__init__(needs=needs, saved=())

    def save(self, *values: Any) -> None:
        """Keep `values` for the backward, which finds them in ``saved``; they are kept, not copied."""
        self.saved = values


class Edge(NamedTuple):
    """Where the gradient of one input goes: a leaf `Tensor`, or output `output` of an earlier `Node`."""

    target: Any
    output: int
    shape: tuple[int, ...]
    dtype: Any


class Node:
    """One recorded call."""

    __slots__ = ("function", "ctx", "edges", "outputs")

    def __init__(self, function: type[Function], ctx: Context, edges: list[Edge | None]):
        self.function, self.ctx, self.edges = function, ctx, edges
        self.outputs = 0


def walk(root: Edge, gradient: Any) -> None:
    """Carry `gradient` from `root` to the leaves; nothing is added to them before all went well."""
    arrived: dict[Any, dict[int, Any]] = {}
    leaves: list[Any] = []
    _arrive(arrived, leaves, root, gradient)
    for node in _consumers_first(root.target):
        if node not in arrived:
            continue
        mine = arrived.pop(node)
        # C order, so that sums over a gradient run in the same order however the gradient was made
        upstream = [None if mine.get(i) is None else _contiguous(mine[i]) for i in range(node.outputs)]
        results = node.function.backward(node.ctx, *upstream)
        results = results if isinstance(results, tuple) else (results,)
        _check_results(node, results)
        for edge, result in zip(node.edges, results, strict=True):
            if edge is not None and result is not None:
                _arrive(arrived, leaves, edge, result)
    for leaf in leaves:
        total = arrived[leaf][0]
        # an own array: `total` may be a view of, or the same array as, the gradient of another tensor
        xp = _module_of(total)
        leaf.grad = xp.array(total, order="C") if leaf.grad is None else xp.asarray(leaf.grad + total)


def _arrive(arrived: dict[Any, dict[int, Any]], leaves: list[Any], edge: Edge, gradient: Any) -> None:
    """Add one contribution to what has arrived at the target of `edge`, in the dtype of that tensor."""
    gradient = gradient.astype(edge.dtype, copy=False)
    if edge.target not in arrived and not isinstance(edge.target, Node):
        leaves.append(edge.target)
    slots = arrived.setdefault(edge.target, {})
    # never in place: both may be views of one array
    slots[edge.output] = slots[edge.output] + gradient if edge.output in slots else gradient


def _contiguous(array: Any) -> Any:
    return _module_of(array).asarray(array, order="C")


def _check_results(node: Node, results: tuple[Any, ...]) -> None:
    """Refuse gradients that do not fit the inputs; only a faulty `Function` gives such."""
    name = f"{node.function.__name__}.backward"
    if len(results) != len(node.edges):
        expected, got = f"{len(node.edges)} gradients, one an argument", str(len(results))
        raise ShapeError(message(name, "results", expected, got, "return None where there is no gradient"))
    for i, (edge, result) in enumerate(zip(node.edges, results, strict=True)):
        if edge is not None and result is not None and result.shape != edge.shape:
            expected, got = f"shape {edge.shape}", f"shape {result.shape}"
            raise ShapeError(message(name, f"gradient {i}", expected, got, "sum over the axes that were broadcast"))


def _consumers_first(root: Any) -> list[Node]:
    """Return the nodes below `root`, each after all that use its outputs (a loop: graphs may be deep)."""
    if not isinstance(root, Node):
        return []
    finished: list[Node] = []
    seen = {root}
    stack = [(root, iter(root.edges))]
    while stack:
        node, edges = stack[-1]
        for edge in edges:
            if edge is not None and isinstance(edge.target, Node) and edge.target not in seen:
                seen.add(edge.target)
                stack.append((edge.target, iter(edge.target.edges)))
                break
        else:
            finished.append(node)
            stack.pop()
    return finished[::-1]
