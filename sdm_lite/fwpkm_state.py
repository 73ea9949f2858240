"""`FwPKMState`: the fast weights of a stream and its open chunk, to be forked, rolled back and saved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from . import arrays, fwpkm_files, rooms, validate
from .alone import Alone
from .errors import DtypeError, ShapeError, ValueRangeError, message
from .fwpkm_chunks import StreamCall, StreamOptions
from .fwpkm_lane import Lane
from .fwpkm_op import after_call, check_flag, check_options
from .product_key_memory import check_keys
from .row_table import RowTable


class StateBytes(NamedTuple):
    """Bytes of a state: those of the start, shared with forks, and those that are its own."""

    shared: int
    owned: int


class Mark:
    """A moment of a state to which :meth:`FwPKMState.rollback` can return; nothing in it is of use elsewhere."""


class FwPKMState:
    """Fast weights, float32 at rest, and the open chunk of a stream (docs/fwpkm.md).

    The start is copied once; after that rows are copied when they are written, so forks and sequences share the rest.
    One thread at a time: a second one gets a StateBusy. `copy.copy` and `copy.deepcopy` are `fork`.

    Parameters
    ----------
    keys : array [H, 2, n, h], float32 or float64
    values : array [n * n, D], dtype of `keys`
        Arrays that require a gradient get one from the first call after.
    per_sequence : bool
        False: one memory for all sequences of a batch, which all its writes sum over. True: one per sequence, started
        when the first call says how many there are; results do not depend on batch mates.

    Raises
    ------
    ShapeError, DtypeError, ValueRangeError, DeviceError
        Naming the argument, what was expected, what came, and the fix.

    Examples
    --------
    >>> state = FwPKMState(np.zeros((1, 2, 4, 3), np.float32), np.ones((16, 5), np.float32))
    >>> mark = state.mark()
    >>> x = np.ones((2, 3, 1, 6), np.float32), np.ones((2, 3, 5), np.float32), np.ones((2, 3), np.float32)
    >>> state.extend(*x, chunk=4).shape, state.position
    ((2, 3, 5), 3)
    >>> state.rollback(mark)
    >>> state.position
    0
    """

    def __init__(self, keys: Any, values: Any, *, per_sequence: bool = False):
        op = "FwPKMState"
        kind = arrays.common_kind(op, {"keys": keys, "values": values})
        check_keys(op, keys)
        slots = keys.shape[2] ** 2
        validate.check_shape(op, "values", values, (slots, None), "[n * n, D]", "n follows the keys")
        validate.check_dtype(op, "keys", keys, ("float32", "float64"))
        validate.check_dtype(op, "values", values, (arrays.dtype_name(keys),))
        self.per_sequence, self._kind = check_flag(op, "per_sequence", per_sequence), kind
        self.leaves: Any = None  # the arrays of the start, where the next call may send gradients to them
        if kind == "torch":
            from . import torch_product_keys

            own_keys, own_values, self.leaves = torch_product_keys.own_arrays(keys, values)
        else:
            own_keys, own_values = (
                np.array(arrays.to_numpy(op, n, x)) for n, x in (("keys", keys), ("values", values))
            )
            if kind == "tape" and any(getattr(x, "requires_grad", False) for x in (keys, values)):
                self.leaves = keys, values
        self._start = Lane(np.ascontiguousarray(own_keys), RowTable(np.ascontiguousarray(own_values)))
        self._lanes: list[Lane] | None = None if per_sequence else [self._start.fork()]
        self._options: StreamOptions | None = None  # of the last call that entered the stream
        self._open()

    def _open(self) -> None:
        """Begin without marks, and with a lock of its own."""
        self._marks: dict[Mark, FwPKMState] = {}  # by identity, in the order they were taken
        self._alone = Alone()

    # ---- what it holds ----------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        keys, (slots, width) = self.lane_shapes()
        whose = f"{len(self._known())} memories" if self.per_sequence else "one memory"
        return f"FwPKMState({whose} of {slots} x {width}, keys {list(keys)}, {self.dtype}, position {self.position})"

    @property
    def dtype(self) -> np.dtype:
        """The dtype of keys and values, and of all arithmetic."""
        return self._start.keys.dtype

    @property
    def keys(self) -> Any:
        """A copy of the keys, [H, 2, n, h], or [B, H, 2, n, h] per sequence; in the kind of array it was made from."""
        return self._shown([lane.keys for lane in self._known()], self._start.keys.shape)

    @property
    def start_keys(self) -> Any:
        """A copy of the keys [H, 2, n, h] that every sequence starts from."""
        return self._as_given(self._start.keys.copy())

    @property
    def values(self) -> Any:
        """A copy of the values, [n * n, D], or [B, n * n, D] per sequence."""
        return self._shown([lane.table.dense() for lane in self._known()], self._start.table.shape)

    @property
    def position(self) -> Any:
        """The tokens that entered the stream, an int; a tuple of them per sequence."""
        found = tuple(lane.position for lane in self._known())
        return found if self.per_sequence else found[0]

    @property
    def batch(self) -> int | None:
        """The sequences that the next call is to have, None where any number will do."""
        if self.per_sequence:
            return None if self._lanes is None else len(self._lanes)
        return self._known()[0].batch()

    def nbytes(self) -> StateBytes:
        """Return the bytes of the start, and those that this state owns beside it."""
        start = self._start
        shared = start.keys.nbytes + start.table.base.nbytes
        owned = 0
        for lane in self._known():
            owned += lane.table.nbytes() + (0 if lane.keys is start.keys else lane.keys.nbytes)
            owned += sum(x.nbytes for piece in lane.pieces for x in piece[:4])
        return StateBytes(shared, owned)

    def lane_shapes(self) -> tuple[tuple[int, ...], tuple[int, int]]:
        """Return the shapes of one memory's keys and values."""
        return self._start.keys.shape, self._start.table.shape

    def _known(self) -> list[Lane]:
        return [] if self._lanes is None else self._lanes

    def _shown(self, found: list[np.ndarray], shape: tuple[int, ...]) -> Any:
        array = np.array(found, self.dtype).reshape(-1, *shape) if self.per_sequence else found[0].copy()
        return self._as_given(array)

    def _as_given(self, array: np.ndarray) -> Any:
        if self._kind == "torch":
            from . import torch_product_keys

            return torch_product_keys.to_tensor(array)
        return array

    # ---- going on ---------------------------------------------------------------------------------------------------

    def extend(
        self,
        queries: Any,
        values: Any,
        gates: Any,
        *,
        update: bool = True,
        mask: Any = None,
        backend: str | None = None,
        **options: Any,
    ) -> Any:
        """Return the retrieved values [B, T, D] of :func:`sdm_lite.fwpkm` and bring this state to the stream's end.

        `options` are the others of that function, from k to `detach_every`; one left out is that of the last call that
        entered the stream, here, before a fork or in a file, and the function's default before the first. Gradients
        work as there: the backward needs nothing that a later call writes.
        """
        op = "FwPKMState.extend"
        with self._alone(op):
            known = {name: x for name, x in vars(self._options or StreamOptions()).items() if name != "update"}
            for name in [name for name in options if name not in known]:
                raise DtypeError(message(op, name, f"an option: {', '.join(known)}", "another", "leave it out"))
            whole = check_options(op, **{**known, **options})
            return after_call(op, (queries, values, gates), self, whole, update, mask, backend)

    def step(self, queries: Any, values: Any, gates: Any, **options: Any) -> Any:
        """Return the retrieved values [B, D] of one token, as `extend`; queries [B, H, 2h], gates [B]."""
        op, mask = "FwPKMState.step", options.get("mask")
        given = [("queries", queries, 3), ("values", values, 2), ("gates", gates, 1)]
        for name, x, rank in given if mask is None else [*given, ("mask", mask, 1)]:
            arrays.kind_of(op, name, x)
            if len(x.shape) != rank:
                got = str(list(x.shape))
                raise ShapeError(message(op, name, f"{rank} axes, without T", got, "drop the token axis"))
        if mask is not None:
            options["mask"] = mask[:, None]
        return self.extend(queries[:, None], values[:, None], gates[:, None], **options)[:, 0]

    def lanes_for(self, op: str, batch: int, options: StreamOptions, update: bool) -> list[Lane]:
        """Return the memories that a call of `batch` sequences runs on, or raise where it does not go on the stream."""
        lanes = self._lanes
        if lanes is None:
            lanes = [self._start.fork() for _ in range(batch)]
        if not update:
            return lanes
        held = len(lanes) if self.per_sequence else lanes[0].batch()
        if held is not None and held != batch:
            fix = "call with the same batch, reorder() the state, or flush() and reset() it"
            raise ShapeError(message(op, "values", f"B = {held}, the sequences of this state", str(batch), fix))
        fixed = ("chunk", "lookahead", "pairs") if any(lane.filled for lane in lanes) else ()
        if any(lane.carried for lane in lanes) and options.pairs == "carry":
            fixed = (*fixed, "lookahead")
        for name in fixed:
            before, now = getattr(self._options, name), getattr(options, name)
            if before != now:
                expected = f"{before!r} until the open chunk is written"
                raise ValueRangeError(message(op, name, expected, repr(now), "keep it, or flush() first"))
        return lanes

    def commit(self, lanes: list[Lane], ends: Sequence[tuple], options: StreamOptions) -> None:
        """Bring the memories to the end of a call whose every part went well."""
        for lane, end in zip(lanes, ends, strict=True):
            lane.commit(options, *end)
        self._lanes, self._options, self.leaves = lanes, options, None

    def flush(self, *, backend: str = "cpu") -> None:
        """Write the open chunk as it is, with the options of the last call, and begin a new one at the next token.

        Without a valid pair of tokens in it nothing is written.
        """
        op = "FwPKMState.flush"
        room = rooms.room(backend, op)
        with self._alone(op):
            for lane in self._known():
                lane.flush(self._options or StreamOptions(), room)

    # ---- copies, order, marks ---------------------------------------------------------------------------------------

    def fork(self, indices: Sequence[int] | None = None) -> FwPKMState:
        """Return a state that goes on from here by itself, with the sequences `indices` (any of them, in any order).

        Rows are shared until one of the two writes them. The fork has no marks.
        """
        with self._alone("FwPKMState.fork"):
            return self._forked(indices)

    def _forked(self, indices: Sequence[int] | None = None) -> FwPKMState:
        lanes = self._known() if indices is None else self._picked(indices, "fork")
        other = object.__new__(FwPKMState)
        other.__dict__.update(self.__dict__)
        other._open()
        begun = self._lanes is not None or indices is not None
        other._lanes = [lane.fork() for lane in lanes] if begun else None
        return other

    def __copy__(self) -> FwPKMState:
        return self.fork()

    def __deepcopy__(self, memo: dict) -> FwPKMState:
        return self.fork()

    def __reduce__(self) -> Any:
        fix = "write it with save(path)"
        raise DtypeError(
            message("FwPKMState", "pickle", "a state that stays in its process", "a request for bytes", fix)
        )

    def reorder(self, indices: Sequence[int]) -> None:
        """Replace the sequences by those at `indices`, in place, as beam search does."""
        with self._alone("FwPKMState.reorder"):
            self._lanes = [lane.fork() for lane in self._picked(indices, "reorder")]

    def reset(self, index: int | None = None) -> None:
        """Bring one sequence's memory, or all of them, back to the start, with an empty chunk."""
        with self._alone("FwPKMState.reset"):
            if index is None:
                self._lanes = None if self.per_sequence else [self._start.fork()]
                return
            self._per_sequence("reset", "a sequence by its index")
            (place,) = self._indices("reset", [index], "index")
            self._known()[place] = self._start.fork()

    def append(self, n: int = 1) -> None:
        """Add n sequences at the start (per sequence only)."""
        op = "FwPKMState.append"
        with self._alone(op):
            self._per_sequence("append", "sequences")
            if validate.whole_number(op, "n", n) < 0:
                raise ValueRangeError(message(op, "n", "a number >= 0", str(n), "evict(indices) drops sequences"))
            if n:
                self._lanes = [*self._known(), *(self._start.fork() for _ in range(n))]

    def evict(self, indices: Sequence[int]) -> None:
        """Drop the sequences at `indices` (per sequence only)."""
        with self._alone("FwPKMState.evict"):
            self._per_sequence("evict", "sequences")
            gone = set(self._indices("evict", indices))
            if gone:
                self._lanes = [lane for i, lane in enumerate(self._known()) if i not in gone]

    def mark(self) -> Mark:
        """Return a mark of this moment, for `rollback`; it costs the rows written from here on."""
        with self._alone("FwPKMState.mark"):
            mark = Mark()
            self._marks[mark] = self._forked()
            return mark

    def rollback(self, mark: Mark) -> None:
        """Go back to a mark, which stays; later marks become stale. Raises ValueRangeError for a stale one."""
        with self._alone("FwPKMState.rollback"):
            again = self._marked("rollback", mark)._forked()
            taken = list(self._marks)
            for later in taken[taken.index(mark) + 1 :]:
                del self._marks[later]
            self._lanes, self._options, self.leaves = again._lanes, again._options, again.leaves

    def release(self, mark: Mark) -> None:
        """Forget a mark. Raises ValueRangeError for a stale one."""
        with self._alone("FwPKMState.release"):
            self._marked("release", mark)
            del self._marks[mark]

    def _marked(self, verb: str, mark: Mark) -> FwPKMState:
        if not isinstance(mark, Mark) or mark not in self._marks:
            stale = "a stale mark: rolled back over, released, or of another state"
            got = stale if isinstance(mark, Mark) else f"{mark!r:.40}"
            raise ValueRangeError(message(f"FwPKMState.{verb}", "mark", "one of mark()", got, "mark() again"))
        return self._marks[mark]

    def _per_sequence(self, verb: str, what: str) -> None:
        if not self.per_sequence:
            fix = "make the state with per_sequence=True"
            raise ValueRangeError(message(f"FwPKMState.{verb}", what, "one memory a sequence", "a shared one", fix))

    def _indices(self, verb: str, indices: Any, name: str = "indices") -> list[int]:
        return validate.sequence_indices(f"FwPKMState.{verb}", name, indices, self.batch or 0)

    def _picked(self, indices: Sequence[int], verb: str) -> list[Lane]:
        if not self.per_sequence and self._known()[0].batch() is None:
            fix = "leave indices out, or make the state with per_sequence=True"
            got = "one memory for all, and no open chunk to pick sequences of"
            raise ValueRangeError(message(f"FwPKMState.{verb}", "indices", "sequences", got, fix))
        places = self._indices(verb, indices)
        if self.per_sequence:
            return [self._known()[i] for i in places]
        lane = self._known()[0].fork()
        lane.pieces = [StreamCall._make((*(x[places] for x in piece[:4]), 0, 0)) for piece in lane.pieces]
        return [lane]

    # ---- files ------------------------------------------------------------------------------------------------------

    def save(self, path: Any) -> None:
        """Write the state, start included, marks not; to a temporary name first, then renamed. Raises FileError."""
        with self._alone("FwPKMState.save"):
            fwpkm_files.save(path, self._start, self._lanes, self.per_sequence, self._options)

    @classmethod
    def load(cls, path: Any, *, kind: str = "numpy") -> FwPKMState:
        """Return a state that `save` wrote; its `keys` and `values` are shown as "numpy" arrays or "torch" tensors.

        Raises FileFormatError (a ValueError) where the file is no whole state, FileError where it cannot be read.
        """
        if kind not in ("numpy", "torch"):
            fix = "name one of these"
            raise ValueRangeError(message("FwPKMState.load", "kind", "'numpy' or 'torch'", f"{kind!r:.40}", fix))
        start, lanes, per_sequence, options = fwpkm_files.load(path, Lane)
        state = cls(start.keys, start.table.base, per_sequence=per_sequence)
        state._start, state._lanes, state._options, state._kind = start, lanes, options, kind
        return state
