"""`MemoryState`: the memories of several sequences in one layer, copy-on-write over a shared initial memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import validate
from ..alone import Alone
from ..errors import DtypeError, ValueRangeError, message
from ..rooms import DeltaOptions
from . import call as calls
from . import files
from .index import ROW, check_lanes, copied, empty_index, enough_memory, entries
from .initial import Initial
from .pool import RowPool, StateBytes
from .undo import Mark, UndoLog


class MemoryState:
    """Memories of B sequences that start from one initial memory and own only the rows they have written.

    The rule is that of :func:`sdm_lite.sparse_delta_rule` (spec section 4), and so are the bits: readings and memories
    do not depend on how a sequence is cut into calls, on the other sequences, or on the number of threads.

    Parameters
    ----------
    initial : array [H, N, D], or tuple (H, N, D) for zeros
        Kept by reference, C-contiguous, never written: it must not change while the state is used.
    batch : int
        Sequences, B.
    dtype : {None, "float32", "float64", "bfloat16", "float16"} or a dtype
        Of the memory. None: the initial memory's (float32 for zeros); another makes one converted copy of it.
    rule : {"shared", "per_slot"}
        As in the op.
    max_bytes : int or None
        Most bytes of rows that the state and its forks may own; the undo log counts.

    Raises
    ------
    ShapeError, DtypeError, ValueRangeError, DeviceError
        Naming the argument, what was expected, what came, and the fix. Here and in every method, an error leaves the
        state as it was.
    StateBusy
        Where a second thread uses the state during a call. Two states, forks too, may work in two threads.

    Examples
    --------
    >>> import numpy as np, sdm_lite
    >>> one = lambda *x: np.array(x, np.float32).reshape(1, 1, -1)
    >>> slot, state = np.array([[[3]]], np.int32), sdm_lite.MemoryState((1, 1000, 2), 1)
    >>> token = (one(1, 2), slot, one(1), one(0)[..., 0], one(0.5)[..., 0], slot, one(1))
    >>> state.step(*token).tolist()
    [[[0.5, 1.0]]]
    >>> before = state.mark()
    >>> state.step(*token).tolist(), state.tokens.tolist(), state.nbytes()
    ([[[0.75, 1.5]]], [2], StateBytes(shared=0, owned=16))
    >>> state.rollback(before)
    >>> state.dense()[0, 0, 3].tolist(), state.tokens.tolist()
    ([0.5, 1.0], [1])
    """

    def __init__(
        self,
        initial: Any = None,
        batch: Any = None,
        *,
        dtype: Any = None,
        rule: str = "shared",
        max_bytes: int | None = None,
    ):
        op = "MemoryState"
        if batch is None:
            raise DtypeError(message(op, "batch", "a number of sequences", "None", "pass MemoryState(initial, batch)"))
        batch = _count(op, "batch", batch)
        max_bytes = None if max_bytes is None else _count(op, "max_bytes", max_bytes)
        first = Initial(op, initial, dtype)
        check_lanes(op, "batch", batch, first.shape[0])
        options = DeltaOptions(rule, state_dtype=first.dtype)
        validate.check_options(op, options)
        index = empty_index(op, batch * first.shape[0])
        self._open(first, RowPool(first, max_bytes), options)
        self._index = index
        self._follow(np.zeros(batch, np.int64))

    def _follow(self, tokens: np.ndarray) -> None:
        """Set the token counts, and so the batch: a plain number, since torch.compile would trace an array."""
        self._tokens, self._batch = tokens, len(tokens)

    def _open(self, initial: Initial, pool: RowPool, options: DeltaOptions) -> None:
        self._initial, self._pool, self._options = initial, pool, options
        self._log = UndoLog()
        self._alone = Alone()
        self._plan: calls.Plan | None = None  # of the last call of one token
        self._handle: Any = None
        if initial.kind == "torch":
            from .. import torch_state

            self._handle = torch_state.open_handle(self)

    def __del__(self) -> None:
        if "_index" in self.__dict__:
            self._pool.drop(self._index.table, ROW)
            self._log.forget(self._pool)

    def __copy__(self) -> MemoryState:
        """Return a fork of all sequences: a copy of the fields would let go of the same rows twice."""
        return self.fork(range(self.batch))

    def __deepcopy__(self, memo: dict[int, Any]) -> MemoryState:
        return self.fork(range(self.batch))

    def __reduce__(self) -> Any:
        fix = "write it with save() and read it with MemoryState.load"
        raise DtypeError(message("MemoryState", "pickle", "an object without shared memory", "a state", fix))

    def __repr__(self) -> str:
        heads, slots, width = self._initial.shape
        return f"MemoryState({self.batch} x [{heads}, {slots}, {width}], {self.dtype}, {self._pool.used_bytes()} bytes)"

    @property
    def batch(self) -> int:
        """Sequences, B."""
        return self._batch

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, H, N, D)."""
        return (self.batch, *self._initial.shape)

    @property
    def dtype(self) -> str:
        """The memory's dtype by its name."""
        return self._initial.dtype

    @property
    def rule(self) -> str:
        """The rule, "shared" or "per_slot"."""
        return self._options.rule

    @property
    def tokens(self) -> np.ndarray:
        """Tokens that each sequence has seen, padding apart: int64 [B], a copy."""
        return self._tokens.copy()

    def step(
        self,
        values: Any,
        write_slots: Any,
        write_weights: Any,
        log_decay: Any,
        beta: Any,
        read_slots: Any,
        read_weights: Any,
    ) -> Any:
        """Write and read one token of every sequence: :meth:`extend` without the axis of tokens.

        Parameters
        ----------
        values : array [B, H, D]
        write_slots, read_slots : int32 or int64 array [B, H, W], [B, H, R]
        write_weights, read_weights : array [B, H, W], [B, H, R]
        log_decay : array [B, H] or [B, H, W]
        beta : array [B, H]

        Returns
        -------
        readings : array [B, H, D]
            In the kind and dtype of `values`. No gradients.
        """
        given = (values, write_slots, write_weights, log_decay, beta, read_slots, read_weights)
        return calls.run(self, "MemoryState.step", given, one_token=True)

    def extend(
        self,
        values: Any,
        write_slots: Any,
        write_weights: Any,
        log_decay: Any,
        beta: Any,
        read_slots: Any,
        read_weights: Any,
    ) -> Any:
        """Write and read T tokens of every sequence, as :func:`sdm_lite.sparse_delta_rule_` does.

        A token whose write and read slots are all -1, in all heads, is padding: its reading is zero, it writes nothing
        and is not counted; its other numbers are not looked at.

        Parameters
        ----------
        values : array [B, T, H, D]
        write_slots, read_slots : int32 or int64 array [B, T, H, W], [B, T, H, R]
        write_weights, read_weights : array [B, T, H, W], [B, T, H, R]
        log_decay : array [B, T, H] or [B, T, H, W]
        beta : array [B, T, H]

        Returns
        -------
        readings : array [B, T, H, D]
            In the kind and dtype of `values`. No gradients.

        Raises
        ------
        StateFull
            Where the call would own more than `max_bytes`.
        ShapeError, DtypeError, ValueRangeError, SlotError, DeviceError
            As :func:`sdm_lite.sparse_delta_rule_`.
        """
        given = (values, write_slots, write_weights, log_decay, beta, read_slots, read_weights)
        return calls.run(self, "MemoryState.extend", given, one_token=False)

    def dense(self) -> Any:
        """Return the memories as one array [B, H, N, D], a copy, of the initial memory's kind."""
        with self._alone("MemoryState.dense"):
            heads, slots, width = self._initial.shape
            dense = self._initial.dense(self.batch)
            lane, slot, row = entries(self._index)
            dense.reshape(self.batch * heads, slots, width)[lane, slot] = self._pool.read(row)
            return self._initial.give_back(dense)

    def nbytes(self) -> StateBytes:
        """Return the bytes of the initial memory and of the rows owned by the state, its undo log and its forks.

        The process holds pages of 256 KB for them, made several at once, and the index adds 16 to 32 bytes a row.
        """
        with self._alone("MemoryState.nbytes"), self._pool.lock:
            self._pool.settle()
            return StateBytes(self._initial.nbytes(), self._pool.used_bytes())

    def fork(self, indices: Any = None) -> MemoryState:
        """Return a new state of the sequences named (repeats allowed), which shares all rows until one is written.

        Costs a copy of the index of these sequences, 16 to 32 bytes a row owned, whatever N and D are. Marks stay
        behind; `max_bytes` bounds both together.
        """
        op = "MemoryState.fork"
        with self._alone(op), self._pool.lock:
            sources = self._sequences(op, indices)
            self._pool.settle()
            new = MemoryState.__new__(MemoryState)
            new._open(self._initial, self._pool, self._options)
            new._index = copied(self._index, sources, self._initial.shape[0], self._pool)
            new._follow(self._tokens[sources])
            return new

    def reorder(self, indices: Any = None) -> None:
        """Make the sequences those named, in that order; a repeated one shares its rows until one is written.

        As many indices as you like: the batch follows. Costs as :meth:`fork`.
        """
        op = "MemoryState.reorder"
        with self._alone(op), self._pool.lock:
            self._rearrange(op, self._sequences(op, indices))

    def reset(self, i: Any = None) -> None:
        """Put sequences (one index or several) back to the initial memory, without tokens."""
        op = "MemoryState.reset"
        with self._alone(op), self._pool.lock:
            sources = np.arange(self.batch)
            listed = i.tolist() if hasattr(i, "tolist") else i
            sources[self._sequences(op, listed if isinstance(listed, (list, tuple, range)) else [listed])] = -1
            self._rearrange(op, sources)

    def append(self, n: int = 1) -> None:
        """Add n sequences that hold the initial memory, after the others."""
        op = "MemoryState.append"
        n = _count(op, "n", n)
        with self._alone(op), self._pool.lock:
            check_lanes(op, "n", self.batch + n, self._initial.shape[0])
            with enough_memory(op):
                # refused at once where it is too large, before anything is filled
                np.empty((self.batch + n, self._initial.shape[0], *self._index.table.shape[1:]), np.int32)
                sources = np.concatenate([np.arange(self.batch), np.full(n, -1)])
            self._rearrange(op, sources)

    def evict(self, indices: Any = None) -> None:
        """Remove sequences; those after them move up."""
        op = "MemoryState.evict"
        with self._alone(op), self._pool.lock:
            gone = self._sequences(op, indices)
            self._rearrange(op, np.delete(np.arange(self.batch), gone))

    def mark(self) -> Mark:
        """Return a mark of this moment. It lives until it is released, or an earlier one is rolled back to.

        While a mark lives, the first write to a row copies it and keeps the old one: W rows a token at most.
        """
        with self._alone("MemoryState.mark"), self._pool.lock:
            return self._log.mark(self._pool, self._tokens)

    def rollback(self, mark: Mark) -> None:
        """Return to a mark, bit for bit, whatever was done since; the mark lives on, later ones do not.

        Costs O(k W) for k tokens a sequence: old rows are named again, not copied.

        Raises
        ------
        ValueRangeError
            (a ValueError) where the mark is not alive in this state.
        """
        op = "MemoryState.rollback"
        with self._alone(op), self._pool.lock:
            place = self._log.place(op, mark)
            self._index = self._log.rollback(place, self._pool, self._index)
            self._follow(mark._tokens)

    def release(self, mark: Mark) -> None:
        """Forget a mark, and the old rows that only it needs; other marks stay.

        Raises
        ------
        ValueRangeError
            (a ValueError) where the mark is not alive in this state.
        """
        op = "MemoryState.release"
        with self._alone(op), self._pool.lock:
            self._log.release(self._log.place(op, mark), self._pool)

    def mark_bytes(self, mark: Mark) -> int:
        """Return the bytes of the rows that only a mark needs, which :meth:`release` would free."""
        op = "MemoryState.mark_bytes"
        with self._alone(op), self._pool.lock:
            self._pool.settle()
            return self._log.needed(self._log.place(op, mark), self._pool) * self._pool.row_bytes

    def save(self, path: Any, *, base: Any = None, snapshot_dtype: str | None = None) -> None:
        """Write the rows owned, their slots and the token counts to a safetensors file, whole or not at all.

        Parameters
        ----------
        path : path
            Written under a temporary name beside it, synced, renamed.
        base : path or None
            A file of :meth:`save` in the same folder: only rows that differ from it are written, and it must be there
            when the new file is loaded.
        snapshot_dtype : {None, "bf16"}
            "bf16" stores rounded rows; the file says so, and loading it is no longer bit for bit.

        Raises
        ------
        FileError
            (an OSError) where the file cannot be written; one that was there before stays.
        FileFormatError, ValueRangeError
            (ValueErrors) where `base` is no such file or does not fit.
        BackendError
            Where safetensors is not installed.
        """
        with self._alone("MemoryState.save"):
            files.save(self, path, base, snapshot_dtype)

    @staticmethod
    def load(path: Any = None, *, initial: Any = None, dtype: Any = None, max_bytes: int | None = None) -> MemoryState:
        """Return the state that :meth:`save` wrote, over the same initial memory.

        Parameters
        ----------
        path : path
        initial : array [H, N, D], or tuple (H, N, D) for zeros
            What the saved state had; its hash is checked.
        dtype : dtype or None
            As for a new state (None: the file's); ``torch.float32`` makes a state of torch tensors over zeros.
        max_bytes : int or None
            As for a new state.

        Raises
        ------
        FileFormatError
            (a ValueError) where the file is damaged, or of another configuration or initial memory: both are named.
        FileError
            (an OSError) where it cannot be read.
        StateFull, BackendError
            Where `max_bytes` is too small; where safetensors is not installed.
        """
        limit = None if max_bytes is None else _count("MemoryState.load", "max_bytes", max_bytes)
        return files.load(path, initial, dtype, limit)

    def _sequences(self, op: str, indices: Any) -> np.ndarray:
        return np.array(validate.sequence_indices(op, "indices", indices, self.batch), np.int64)

    def _rearrange(self, op: str, sources: np.ndarray) -> None:
        self._pool.settle()
        old, tokens = self._index, self._tokens
        with enough_memory(op):
            if len(sources) and not len(tokens):
                index = empty_index(op, len(sources) * self._initial.shape[0])
                tokens = np.zeros(len(sources), np.int64)
            else:
                tokens = np.where(sources < 0, 0, tokens[sources])
                index = copied(self._index, sources, self._initial.shape[0], self._pool)
        self._index = index
        self._follow(tokens)
        self._log.replaced(self._pool, old)


def _count(op: str, name: str, value: Any) -> int:
    value = validate.whole_number(op, name, value)
    if value < 0:
        raise ValueRangeError(message(op, name, "a number >= 0", str(value), "pass a count"))
    return value
