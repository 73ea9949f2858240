"""One call of a state, from the caller's arrays to readings: check, find rows, run the kernel, settle.

Nothing is changed before everything has been checked and the pages for the new rows are there. What shapes and dtypes
settle is settled once, in a `Plan`: decoding repeats itself, and a token's kernel takes less time than its checks.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .. import arrays, placement, validate
from ..cpu import overlay
from ..cpu.compile import same_types
from ..cpu.forward import Tokens
from ..cpu.sparse_delta import PagedCall, paged_call, sparse_delta_paged
from ..errors import DtypeError, ShapeError, SlotError, message
from ..rooms import DeltaInputs
from .index import Index

if TYPE_CHECKING:
    from .state import MemoryState

NAMES = DeltaInputs._fields[:7]
_SLOTS = np.dtype(np.int32)


class _Dtype(NamedTuple):
    """A dtype by its name alone: the cached look-up of NumPy's would draw a warning of torch.compile."""

    name: str


class Plan(NamedTuple):
    """What the metadata of a call settle: they have passed the checks, and need none when they come again."""

    shape: tuple[int, ...]  # of values and readings, [B, H, D] or [B, T, H, D]
    sizes: tuple[int, int, int]  # B, T, H
    flat: Sequence[tuple[int, ...]]  # shapes of the arrays with all tokens in one axis
    places: overlay.Places  # room that the calls use again
    resolve: Callable
    paged: PagedCall
    kind: type = type(None)  # of all seven arrays
    seen: tuple = ()  # their metadata, as `_seen` gives them
    canonical: Callable[[Sequence], Sequence[np.ndarray] | None] = list  # arrays for the kernels; None: check again
    give_back: Callable[[np.ndarray], Any] = np.asarray  # readings in the caller's kind and dtype


def run(state: MemoryState, op: str, given: tuple, *, one_token: bool) -> Any:
    """Return the readings of `step` or `extend` in the caller's kind."""
    if not _traced():
        plan: Plan | None = state._plan
        if plan is not None and plan.seen == _seen(plan.kind, given, one_token):
            inputs = plan.canonical(given)
            if inputs is not None:
                return plan.give_back(advance(state, op, plan, inputs))
    kind = arrays.common_kind(op, dict(zip(NAMES, given)))
    placement.host_backend(op, kind, None)  # refuses a device that no room serves
    if kind == "tape":
        raise DtypeError(message(op, "arrays", "NumPy arrays or tensors", "a tape Tensor", "pass .data"))
    if kind == "torch":
        from .. import torch_state

        return torch_state.run(state, op, given, one_token)
    views = [arrays.to_numpy(op, name, x) for name, x in zip(NAMES, given)]
    check(state, op, views, one_token)
    canonical = functools.partial(_canonical, state._initial.compute)
    inputs, dtype = canonical(views), views[0].dtype
    like = None if kind == "numpy" else given[0]  # a plan that is kept holds none of the caller's arrays

    def give_back(readings: np.ndarray) -> Any:
        return arrays.like(like, kind, arrays.from_float(readings, dtype))

    plan = plan_of(state, inputs)._replace(canonical=canonical, give_back=give_back)
    if kind == "numpy":
        keep(state, plan, np.ndarray, given, one_token)
    return give_back(advance(state, op, plan, inputs))


def keep(state: MemoryState, plan: Plan, kind: type, given: Sequence, one_token: bool) -> None:
    """Keep the plan of a call that has passed the checks, where it is one token: longer ones are worth their checks."""
    if plan.sizes[1] == 1 and all([type(x) is kind for x in given]):
        state._plan = plan._replace(kind=kind, seen=_seen(kind, given, one_token))


def _traced() -> bool:
    """Tell whether torch.compile traces this: it would make a graph for every plan."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.compiler.is_compiling()


def _seen(kind: type, given: Sequence[Any], one_token: bool) -> tuple:
    """Return what the checks of metadata look at, of arrays of one type; shorter where there are others."""
    arrays_of_kind: list[Any] = [x for x in given if type(x) is kind and not getattr(x, "is_nested", False)]
    return one_token, [(x.shape, x.dtype) for x in arrays_of_kind]  # a nested tensor has no shape


def check(state: MemoryState, op: str, call: Sequence[Any], one_token: bool) -> None:
    """Check the metadata of a call, whatever its framework: the shapes as the caller has them, then as the op does."""
    _check_shapes(state, op, call, one_token)
    v, ws, ww, g, b, rs, rw = [x[:, None] for x in call] if one_token else call
    like = arrays.Metadata(state.shape, _Dtype(state.dtype))
    validate.check_delta(op, v, ws, ww, g, b, rs, rw, like, None, in_place=True)


def _check_shapes(state: MemoryState, op: str, call: Sequence[Any], one_token: bool) -> None:
    """Raise ShapeError, in the letters of `step` or of `extend`, unless the arrays fit the state and each other."""
    axes = "B, H" if one_token else "B, T, H"
    rank = 2 if one_token else 3
    _, heads, _, width = state.shape
    token: tuple[int | None, ...] = (None,) * (rank - 1) + (heads,)
    widths: dict[str, int | None] = {"D": width, "W": None, "R": None}
    for name, x, letter in zip(NAMES, call, ("D", "W", "W", "", "", "R", "R")):
        if name == "log_decay" and len(x.shape) == rank + 1:
            letter = "W"
        if len(x.shape) != rank + bool(letter):
            fix = "pass one token, or call extend with [B, T, H, ...]" if one_token else "pass it in this layout"
        elif name == "values":
            fix = f"H and D are those of the state, [B, H, N, D] = {list(state.shape)}"
        else:
            fix = f"B to H follow values {list(call[0].shape)}, W and R the slots: change one of the two"
        expected = (*token, widths[letter]) if letter else token
        validate.check_shape(op, name, x, expected, f"[{axes}, {letter}]" if letter else f"[{axes}]", fix)
        if name == "values":
            _check_batch(state, op, x.shape)
            token = tuple(x.shape[:-1])
        elif letter:
            widths[letter] = x.shape[-1]


def _check_batch(state: MemoryState, op: str, shape: Sequence[int]) -> None:
    if shape[0] != state.batch:
        got, fix = f"{shape[0]} in shape {list(shape)}", "pass a token of every sequence"
        raise ShapeError(message(op, "values", f"a batch of {state.batch}, as the state has", got, fix))


def _canonical(compute: np.dtype, call: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return a call's arrays in the compute dtype and int32, C-contiguous, aligned and writable."""

    def converted(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
        return arrays.to_slots(x) if dtype is _SLOTS else arrays.to_float(x, dtype)

    dtypes = (compute, _SLOTS, compute, compute, compute, _SLOTS, compute)
    return [x if x.dtype == dtype and x.flags.carray else converted(x, dtype) for x, dtype in zip(call, dtypes)]


def plan_of(state: MemoryState, inputs: Sequence[np.ndarray]) -> Plan:
    """Return the plan of a call whose metadata have been checked, from its canonical arrays."""
    shape = inputs[0].shape
    batch, tokens, heads = (shape[0], 1, shape[1]) if len(shape) == 3 else shape[:3]
    count, writes, reads = batch * tokens * heads, inputs[1].shape[-1], inputs[5].shape[-1]
    decays = inputs[3].shape[-1] if inputs[3].ndim == len(shape) else 1  # by written slot, or by head
    places = overlay.Places(
        np.empty(count, np.bool_),
        np.empty((count, writes), np.int32),
        np.empty((count, reads), np.int32),
        np.empty((count * writes, 4), np.int32),
        np.empty(batch * heads + 1, np.int64),
        np.empty(batch, np.int64),
    )
    widths = (shape[-1], writes, writes, decays, None, reads, reads)
    flat = [(count,) if width is None else (count, width) for width in widths]
    sizes, x = (batch, tokens, heads), _flat(flat, inputs)
    resolve = same_types(overlay.resolve, x.log_decay.dtype)
    return Plan(shape, sizes, flat, places, resolve, paged_call(x, sizes, state._pool.paged(), state._options))


def _flat(shapes: Sequence[tuple[int, ...]], inputs: Sequence[np.ndarray]) -> Tokens:
    return Tokens(*[a.reshape(shape) for a, shape in zip(inputs, shapes)])


def advance(state: MemoryState, op: str, plan: Plan, inputs: Sequence[np.ndarray]) -> np.ndarray:
    """Run the tokens of canonical arrays, whose values are not checked yet, and return the readings."""
    x = _flat(plan.flat, inputs)
    pool, places = state._pool, plan.places
    with state._alone(op):
        if plan.sizes[0] != state._batch:  # another thread may have changed it since the checks
            _check_batch(state, op, plan.shape)
        with pool.lock:
            pool.settle()
            changed = _resolve(state, op, plan, x)
            # marks keep what was changed, and the plan's room is used again
            changes = places.changes[:changed].copy() if changed else None
            if changes is not None:
                try:
                    pool.cover(op)
                except BaseException:
                    overlay.undo(state._index.table, changes, pool.numbers)
                    raise
            pages = pool.paged()
        try:
            readings = sparse_delta_paged(plan.paged, x, places, pages, state._initial.shape[1])
        finally:
            if changes is not None:
                with pool.lock:
                    state._log.replaced(pool, changes)
            state._tokens = state._tokens + places.seen
    return readings.reshape(plan.shape)


def _resolve(state: MemoryState, op: str, plan: Plan, x: Tokens) -> int:
    """Check the values, find the tokens' rows, give out those for first writes and return how many those are."""
    (_, tokens, heads), num_slots, pool = plan.sizes, state._initial.shape[1], state._pool
    check = True
    while True:
        changed = plan.resolve(
            heads, tokens, x.write_slots, x.read_slots, x.log_decay, num_slots, *state._index, pool.numbers,
            pool.clock, state._log.epoch, check, plan.places,
        )  # fmt: skip
        if changed >= 0:
            return changed
        if changed == overlay.SUSPECT:
            _check_values(op, plan, x, num_slots)
            check = False
        else:
            most = min(tokens * x.write_slots.shape[1], num_slots)  # first writes of a lane
            pool.reserve(len(state._index.table) * most)
            _make_room(state, most)


def _make_room(state: MemoryState, most: int) -> None:
    """Make the index large enough for so many more slots a lane, at most half full."""
    table, filled = state._index
    wanted = 2 * (int(filled.max(initial=0)) + most)
    if wanted > table.shape[1]:
        larger = np.full((len(table), 1 << (wanted - 1).bit_length(), 2), -1, np.int32)
        overlay.rehash(table, larger, filled)
        state._index = Index(larger, filled)


def _check_values(op: str, plan: Plan, x: Tokens, num_slots: int) -> None:
    """Set `padded`, and raise as the op does where the other tokens have wrong slots or decays."""
    inputs = DeltaInputs(*[a.reshape(*plan.shape[:-1], *a.shape[1:]) for a in x])
    absent = [(x == -1).all(-1) if x.shape[-1] else None for x in (inputs.write_slots, inputs.read_slots)]
    known = [x for x in absent if x is not None]
    lanes = np.logical_and.reduce(known) if known else np.zeros(inputs.beta.shape, np.bool_)
    if (lanes.any(-1) != lanes.all(-1)).any():
        where = [int(i) for i in np.argwhere(lanes.any(-1) != lanes.all(-1))[0]]
        fix = "pad a token with -1 in all slots of all heads"
        got = f"a mixture at {'[B, T]' if len(where) == 2 else '[B]'} = {where}"
        raise SlotError(message(op, "slots", "-1 in all heads or in none", got, fix))
    plan.places.padded[:] = lanes.reshape(-1)
    call = inputs
    if lanes.any():
        keep = ~lanes[..., None]
        call = inputs._replace(
            write_slots=np.where(keep, inputs.write_slots, np.arange(inputs.write_slots.shape[-1], dtype=np.int32)),
            read_slots=np.where(keep, inputs.read_slots, np.arange(inputs.read_slots.shape[-1], dtype=np.int32)),
            log_decay=np.where(keep, inputs.log_decay, inputs.log_decay.dtype.type(0)),
        )
    validate.look_closer(op, call, num_slots)
