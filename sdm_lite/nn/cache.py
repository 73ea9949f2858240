"""`HybridState`: what a HybridLM remembers of the sequences that it decodes, in all layers, as one object."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .. import validate
from ..errors import ShapeError, StateFull, ValueRangeError, message
from ..memory_state import MemoryState
from .state import MixerState

if TYPE_CHECKING:
    from .hybrid_lm import HybridLM

_NAME = "HybridState"
_MOST = 2**31  # sequences, as in MemoryState


class CacheBytes(NamedTuple):
    """Bytes of the initial memories, of the rows that the MemoryStates own (forks included), and of all tensors."""

    shared: int
    owned: int
    dense: int


class LayerMark(NamedTuple):
    """A layer's state at some moment: tensors by reference, since calls make new ones; and its MemoryState's mark."""

    state: MixerState
    memory: Any

    @classmethod
    def of(cls, state: MixerState) -> LayerMark:
        """Return a mark of `state`; a dense memory, which a call may update in place, is copied."""
        if isinstance(state.memory, MemoryState):
            return cls(replace(state), state.memory.mark())
        memory = None if state.memory is None else state.memory.clone()
        return cls(replace(state, memory=memory), None)

    def restore(self) -> MixerState:
        """Return the state as it was; the mark lives on."""
        if self.memory is not None:
            self.state.memory.rollback(self.memory)
            return replace(self.state)
        memory = None if self.state.memory is None else self.state.memory.clone()
        return replace(self.state, memory=memory)

    def release(self) -> None:
        """Forget the mark."""
        if self.memory is not None:
            self.state.memory.release(self.memory)


def _dense_bytes(layers: Sequence[MixerState]) -> int:
    """Return the bytes of all tensors, and of the fast weights that were written."""
    total = 0
    for layer in layers:
        parts = [layer.memory, layer.keys, layer.values, *layer.taps.values()]
        total += 0 if layer.fast is None else layer.fast.nbytes().owned
        total += sum(part.nbytes for part in parts if isinstance(part, Tensor))
    return total


@dataclass(frozen=True, eq=False)
class CacheMark:
    """A moment of a HybridState, made by :meth:`HybridState.mark`."""

    layers: tuple[LayerMark, ...]
    recent: Tensor | None


@dataclass
class HybridState:
    """State of a HybridLM after the tokens that its sequences have seen; a new one stands before the first token.

    It takes its batch from the first call. Passed with ``inplace=True``, or as the `cache` of ``generate``, it is
    updated: sparse memories are then MemoryStates, which own the rows they have written only, windows keep the last
    window - 1 keys and values, and full attention appends to buffers. Every method keeps all layers in step.
    Sequences of one call get the same number of tokens, but may stand at different positions.

    Attributes
    ----------
    layers : list of MixerState
        One per layer; empty before the first token.
    recent : Tensor int64 [B, 3] or None
        The last three tokens, for n-grams; -1 where no token was.
    config : dict or None
        That of the model, from the first call on.
    max_bytes : int or None
        Most bytes that the cache may take, `owned` and `dense` of :meth:`nbytes` together; forks have the same limit.
        What would pass it raises StateFull and changes nothing. A call then works under a mark, which costs a copy
        of each row at its first write in the call, so that until its end it may hold more.

    Examples
    --------
    >>> from sdm_lite.nn import HybridLM
    >>> model = HybridLM(256, 16, 2, layers=["swa", "sdm"], num_heads=2, slots_per_head=16, num_writes=4, num_reads=4)
    >>> cache = HybridState()
    >>> _ = model.generate(torch.tensor([[104, 105]]), 3, cache=cache)
    >>> both = cache.fork([0, 0])
    >>> before = both.mark()
    >>> _ = model.generate(torch.tensor([[33], [63]]), 2, cache=both)
    >>> cache.positions, both.positions
    ([5], [8, 8])
    >>> both.rollback(before)
    >>> both.append()
    >>> both.positions
    [5, 5, 0]
    """

    layers: list[MixerState] = field(default_factory=list)
    recent: Tensor | None = None
    config: dict[str, Any] | None = None
    max_bytes: int | None = None
    interrupted: bool = field(default=False, repr=False)
    _marks: list[CacheMark] = field(default_factory=list, repr=False, compare=False)
    _model: weakref.ref[HybridLM] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.max_bytes is not None and validate.whole_number(_NAME, "max_bytes", self.max_bytes) < 0:
            raise ValueRangeError(message(_NAME, "max_bytes", "None or >= 0", str(self.max_bytes), "pass a count"))

    def __copy__(self) -> HybridState:
        """Return a fork of all sequences; of an empty cache, an empty one."""
        if self.layers:
            return self.fork(range(self.batch))
        return HybridState(config=self.config, max_bytes=self.max_bytes, _model=self._model)

    def __deepcopy__(self, memo: dict[int, Any]) -> HybridState:
        return self.__copy__()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_model": None}  # weights are no part of a cache

    def __repr__(self) -> str:
        return f"HybridState({len(self.layers)} layers, positions {self.positions}, {self.nbytes()})"

    @property
    def position(self) -> int:
        """Tokens seen, by the longest sequence."""
        return max(self.positions, default=0)

    @property
    def positions(self) -> list[int]:
        """Tokens that each sequence has seen."""
        if not self.layers:
            return []
        position = self.layers[0].position
        return position.tolist() if isinstance(position, Tensor) else [position] * self.batch

    @property
    def batch(self) -> int:
        """Sequences; 0 before the first token."""
        return 0 if self.recent is None else self.recent.shape[0]

    def memories(self) -> Iterator[tuple[int, MemoryState]]:
        """Yield (layer, MemoryState) of the layers that have one."""
        for index, layer in enumerate(self.layers):
            if isinstance(layer.memory, MemoryState):
                yield index, layer.memory

    def nbytes(self) -> CacheBytes:
        """Return what the cache takes, spare room of buffers apart."""
        sizes = [memory.nbytes() for _, memory in self.memories()]
        return CacheBytes(sum(one.shared for one in sizes), sum(one.owned for one in sizes), _dense_bytes(self.layers))

    def check_room(self, op: str, layers: Sequence[MixerState] | None = None, before: CacheMark | None = None) -> None:
        """Raise StateFull where the cache takes more than `max_bytes`.

        That is with `layers` in the place of its own, and without what only the mark `before` needs.
        """
        if self.max_bytes is None:
            return
        owned = sum(memory.nbytes().owned for _, memory in self.memories())
        if before is not None:
            owned -= sum(one.state.memory.mark_bytes(one.memory) for one in before.layers if one.memory is not None)
        total = owned + _dense_bytes(self.layers if layers is None else layers)
        if total > self.max_bytes:
            fix = "evict or reset sequences, release marks, or raise max_bytes"
            expected = f"at most max_bytes = {self.max_bytes}"
            raise StateFull(message(op, "cache", expected, f"{total} bytes", fix))

    @contextmanager
    def whole_calls(self, op: str) -> Iterator[None]:
        """Take back what a call has done where an error ends it, or `max_bytes`, if there is such a limit."""
        if self.max_bytes is None:
            yield
            return
        before = self.mark()
        try:
            yield
            self.check_room(op, before=before)
        except BaseException:
            self.rollback(before)
            raise
        finally:
            if any(known is before for known in self._marks):
                self.release(before)

    # ------------------------------------------------------------ sequences

    def fork(self, indices: Any = None) -> HybridState:
        """Return a new cache of the sequences named, repeats allowed; marks stay behind.

        Memories share their rows until one is written; everything else is copied.
        """
        chosen = self._sequences("fork", indices)
        layers = [layer.select(chosen) for layer in self.layers]
        self.check_room(f"{_NAME}.fork", layers)
        for index, memory in self.memories():
            layers[index].memory = memory.fork(chosen.tolist())
        recent = None if self.recent is None else self.recent[chosen]
        return HybridState(layers, recent, self.config, self.max_bytes, _model=self._model)

    def reorder(self, indices: Any = None) -> None:
        """Make the sequences those named, in that order; repeats allowed, and the batch follows."""
        chosen = self._sequences("reorder", indices)
        after = self._arranged(chosen)
        if len(chosen) > self.batch:
            self.check_room(f"{_NAME}.reorder", after[0])
        for _, memory in self.memories():
            memory.reorder(chosen.tolist())
        self.layers, self.recent = after

    def reset(self, i: Any = None) -> None:
        """Put sequences (one index or several) back before their first token."""
        listed = i.tolist() if hasattr(i, "tolist") else i
        chosen = self._sequences("reset", listed if isinstance(listed, (list, tuple, range)) else [listed])
        self._refuse_dense("reset")
        for _, memory in self.memories():
            memory.reset(chosen.tolist())
        sources = torch.arange(self.batch)
        sources[chosen] = -1
        self.layers, self.recent = self._arranged(sources)

    def append(self, n: int = 1) -> None:
        """Add n sequences before their first token, after the others."""
        self._sequences("append", [])
        op = f"{_NAME}.append"
        n = validate.whole_number(op, "n", n)
        if not 0 <= n < _MOST - self.batch:
            expected = f"at least 0, at most {_MOST - 1 - self.batch}"
            raise ValueRangeError(message(op, "n", expected, str(n), "pass how many to add"))
        self._refuse_dense("append")
        old = self.batch
        try:
            after = self._arranged(torch.cat([torch.arange(old), torch.full((n,), -1)]))
        except (RuntimeError, MemoryError) as error:  # torch's form of no memory, and NumPy's
            expected, got = f"memory for {old + n} sequences", str(error).splitlines()[0]
            raise StateFull(message(op, "n", expected, got, "add fewer")) from error
        self.check_room(op, after[0])
        moved: list[MemoryState] = []
        try:
            for _, memory in self.memories():
                memory.append(n)
                moved.append(memory)
        except BaseException:
            for memory in moved:
                memory.evict(range(old, old + n))
            raise
        self.layers, self.recent = after

    def evict(self, indices: Any = None) -> None:
        """Remove sequences; those after them move up."""
        gone = self._sequences("evict", indices)
        for _, memory in self.memories():
            memory.evict(gone.tolist())
        kept = torch.ones(self.batch, dtype=torch.bool)
        kept[gone] = False
        self.layers, self.recent = self._arranged(kept.nonzero()[:, 0])

    def _sequences(self, verb: str, indices: Any) -> Tensor:
        """Return indices as int64 [n], or raise where one is no sequence of this cache."""
        op = f"{_NAME}.{verb}"
        if not self.layers:
            got, fix = "none yet", "pass the cache to the model first"
            raise ValueRangeError(message(op, "cache", "sequences", got, fix))
        self.check_whole(op)
        if any(layer.fast is not None and not layer.fast.per_sequence for layer in self.layers):
            got, fix = "one set for the batch", "begin the cache in eval mode, or with per_sequence=True"
            raise ValueRangeError(message(op, "cache", "fast weights per sequence", got, fix))
        return torch.tensor(validate.sequence_indices(op, "indices", indices, self.batch), dtype=torch.int64)

    def _refuse_dense(self, verb: str) -> None:
        """Raise where a new sequence's memory is unknown: a dense sparse-memory table does not say what it began as."""
        kinds = (self.config or {}).get("layers", [])
        if any(kind == "sdm" and isinstance(layer.memory, Tensor) for kind, layer in zip(kinds, self.layers)):
            expected, got = "memories that know their initial rows", "dense tables"
            fix = "start from HybridState() with inplace=True"
            raise ValueRangeError(message(f"{_NAME}.{verb}", "cache", expected, got, fix))

    def _arranged(self, sources: Tensor) -> tuple[list[MixerState], Tensor]:
        """Return layers and recent tokens, MemoryStates as they are, in the order `sources`, -1 for a new sequence."""
        layers = [layer.select(sources) for layer in self.layers]
        old = torch.cat([self.recent, self.recent.new_full((1, 3), -1)])  # type: ignore[list-item, union-attr]
        return layers, old[sources]  # -1 is the row without tokens

    # ------------------------------------------------------------ marks

    def mark(self) -> CacheMark:
        """Return a mark of this moment. It lives until it is released, or an earlier one is rolled back to.

        Costs a copy of dense sparse-memory and GatedDeltaNet states; the rest is kept by reference.
        """
        self.check_whole(f"{_NAME}.mark")
        return self.add_mark([LayerMark.of(layer) for layer in self.layers], self.recent)

    def add_mark(self, layers: Sequence[LayerMark], recent: Tensor | None) -> CacheMark:
        """Return the mark made of the layers' marks, which were taken in the order of this cache's marks."""
        mark = CacheMark(tuple(layers), recent)
        self._marks.append(mark)
        return mark

    def rollback(self, mark: CacheMark) -> None:
        """Return to a mark, bit for bit, whatever was done since; the mark lives on, later ones do not.

        Raises
        ------
        ValueRangeError
            (a ValueError) where the mark is not alive in this cache.
        """
        del self._marks[self._place("rollback", mark) + 1 :]
        self.layers = [layer.restore() for layer in mark.layers]
        self.recent, self.interrupted = mark.recent, False

    def release(self, mark: CacheMark) -> None:
        """Forget a mark; other marks stay.

        Raises
        ------
        ValueRangeError
            (a ValueError) where the mark is not alive in this cache.
        """
        del self._marks[self._place("release", mark)]
        for layer in mark.layers:
            layer.release()

    def _place(self, verb: str, mark: CacheMark) -> int:
        for place, known in enumerate(self._marks):
            if known is mark:
                return place
        fix = "roll back to a mark that was not released, and to none older since"
        raise ValueRangeError(message(f"{_NAME}.{verb}", "mark", "a live mark of this cache", "a stale one", fix))

    # ------------------------------------------------------------ calls and files

    def bind(self, model: HybridLM, batch: int) -> None:
        """Take the model's configuration, or raise for a cache of another model or batch, or one that was cut off.

        The layers look at their own parts.
        """
        self.check_whole("HybridLM")
        config = model.config
        fix = "pass the state of these sequences in this model, or None"
        if len(self.layers) not in (0, len(model.blocks)):
            expected, got = f"a state of {len(model.blocks)} layers", f"one of {len(self.layers)}"
            raise ShapeError(message("HybridLM", "state", expected, got, fix))
        if self.config is not None and self.config is not config and self.config != config:
            name = next(key for key in {**self.config, **config} if self.config.get(key) != config.get(key))
            expected, got = (f"{name} = {one.get(name)!r}" for one in (config, self.config))
            raise ValueRangeError(message("HybridLM", "state", expected, got, fix))
        if self.recent is not None and tuple(self.recent.shape) != (batch, 3):
            expected, got = f"a state of {batch} sequences, as ids has", f"recent {list(self.recent.shape)}"
            raise ShapeError(message("HybridLM", "state", expected, got, fix))
        self.config = config
        if not torch.compiler.is_compiling():  # a graph has no weak references
            self._model = weakref.ref(model)

    def check_whole(self, op: str) -> None:
        """Raise ValueRangeError where a call was cut off and left the layers at different tokens."""
        if self.interrupted:
            fix = "roll back to a mark, or start anew"
            raise ValueRangeError(message(op, "state", "one whose layers are in step", "one cut off in a call", fix))

    def save(self, path: Any, *, of: str | None = None) -> None:
        """Write the cache to a safetensors file, whole or not at all: see :func:`sdm_lite.nn.cache_files.save`."""
        from . import cache_files

        cache_files.save(self, path, of)

    @staticmethod
    def load(path: Any, model: HybridLM, *, of: str | None = None, max_bytes: int | None = None) -> HybridState:
        """Return the cache that :meth:`save` wrote, for `model`: see :func:`sdm_lite.nn.cache_files.load`."""
        from . import cache_files

        empty = HybridState(max_bytes=max_bytes)  # checks the number before the file is read
        cache = cache_files.load(path, model, of)
        cache.max_bytes = empty.max_bytes
        cache.check_room(f"{_NAME}.load")
        return cache
