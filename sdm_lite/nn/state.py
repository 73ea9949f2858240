"""What a layer hands to its next call, so that a sequence may come in pieces."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import DeviceError, DtypeError, ShapeError, ValueRangeError, message


@dataclass
class MixerState:
    """State of one layer after the tokens it has seen.

    Attributes
    ----------
    position : int or Tensor int64 [B]
        Tokens seen; a tensor where the sequences have seen different numbers.
    memory : Tensor, MemoryState or None
        SparseDeltaMemory: [B, H, N, D], or a MemoryState, which a call updates in place. GatedDeltaNet:
        [B, H, d_k, d_v] float32. None: the initial memory.
    taps : dict of str to Tensor [B, width - 1, channels]
        Last inputs of each short convolution.
    keys, values : Tensor [B, num_kv_heads, tokens, head_dim] or None
        An attention layer's cache: all tokens, or the last window - 1. Sequences end together, in the last column;
        one that has seen fewer tokens has none in the first columns.
    room : tuple of two Tensors [B, num_kv_heads, capacity, head_dim] or None
        The buffers that begin with `keys` and `values`, where calls in place append to them.
    fast : FwPKMState or None
        Of the fast-weight memory before the mixer, which no call modifies.
    """

    position: int | Tensor = 0
    memory: Any = None
    taps: dict[str, Tensor] = field(default_factory=dict)
    keys: Tensor | None = None
    values: Tensor | None = None
    room: tuple[Tensor, Tensor] | None = None
    fast: Any = None

    def advanced(self, tokens: int, memory: Any, taps: dict[str, Tensor], lengths: Tensor | None = None) -> MixerState:
        """Return the state of a recurrent layer `tokens` later; the taps are copied, as they are views of a batch."""
        after = {name: last.clone() for name, last in taps.items()}
        return MixerState(moved(self.position, tokens, lengths), memory, after)

    def parts(self) -> dict[str, Tensor]:
        """Return the tensors that are there, by name."""
        named = {"memory": self.memory, "keys": self.keys, "values": self.values}
        named |= {f"taps[{name!r}]": last for name, last in self.taps.items()}
        return {name: part for name, part in named.items() if part is not None}

    def map(self, f: Callable[[Tensor], Tensor]) -> MixerState:
        """Return a new state with `f` applied to every tensor, for instance ``torch.Tensor.detach`` or ``clone``.

        A MemoryState and `fast` are no tensors: the new state has the same ones.
        """

        def maybe(x: Any) -> Any:
            return f(x) if isinstance(x, Tensor) else x

        taps = {name: f(last) for name, last in self.taps.items()}
        return MixerState(self.position, maybe(self.memory), taps, maybe(self.keys), maybe(self.values), fast=self.fast)

    @property
    def batch(self) -> int | None:
        """Sequences, or None where nothing tells how many."""
        for part in (self.memory, self.keys, *self.taps.values()):
            if part is not None:
                return part.shape[0]
        return None

    def select(self, sources: Tensor) -> MixerState:
        """Return the state of the sequences `sources` (int64; -1: one before its first token), tensors copied.

        A MemoryState goes over as it is: it rearranges itself.
        """
        fresh = sources < 0

        def chosen(x: Tensor) -> Tensor:
            if not x.shape[0]:
                return x.new_zeros(len(sources), *x.shape[1:])
            taken = x.index_select(0, sources.clamp(min=0))
            return taken.masked_fill_(fresh.view(-1, *(1,) * (x.ndim - 1)), 0)

        after = self.map(chosen)
        if self.room is not None and self.keys is not None:  # with the room: the next token then needs no copy
            keys, values = (chosen(buffer) for buffer in self.room)
            tokens = self.keys.shape[2]
            after = replace(after, room=(keys, values), keys=keys[:, :, :tokens], values=values[:, :, :tokens])
        position = torch.full_like(sources, self.position) if isinstance(self.position, int) else self.position[sources]
        after.position = tidy(position.masked_fill(fresh, 0))
        after.fast = None if self.fast is None else _chosen_lanes(self.fast, sources)
        return after._trimmed()

    def _trimmed(self) -> MixerState:
        """Return the state without cached columns that lie before the first token of every sequence."""
        if self.keys is None or self.values is None:
            return self
        seen = int(self.position.max()) if isinstance(self.position, Tensor) else self.position
        first = self.keys.shape[2] - seen
        if first <= 0:
            return self
        keys, values = (part[:, :, first:].clone() for part in (self.keys, self.values))
        return replace(self, keys=keys, values=values, room=None)


def _chosen_lanes(fast: Any, sources: Tensor) -> Any:
    """Return the FwPKMState, one per sequence, of the sequences `sources`, as :meth:`MixerState.select`."""
    if fast.batch is None:  # nothing was written yet: all sequences stand at the start
        return fast.fork()
    old = (sources >= 0).nonzero()[:, 0]
    after = fast.fork(sources[old].tolist())
    after.append(len(sources) - len(old))
    places = torch.cat([old, (sources < 0).nonzero()[:, 0]])  # where each of `after` belongs
    after.reorder(places.argsort().tolist())
    return after


def tidy(position: Tensor) -> int | Tensor:
    """Return the positions [B] of sequences as one int where they are all the same."""
    first = int(position[0]) if position.numel() else 0
    return first if bool((position == first).all()) else position


def moved(position: int | Tensor, tokens: int, lengths: Tensor | None) -> int | Tensor:
    """Return the positions after a call of `tokens` columns, of which each sequence has `lengths` (None: all)."""
    return position + tokens if lengths is None else tidy(position + lengths)


def positions_of(position: int | Tensor, tokens: int, device: torch.device) -> Tensor:
    """Return the positions of the next `tokens` tokens: int64 [T], or [B, T] where sequences differ."""
    steps = torch.arange(tokens, device=device)
    return position[:, None].to(device) + steps if isinstance(position, Tensor) else steps + position


# so that torch.load(..., weights_only=True) takes a state that torch.save wrote
torch.serialization.add_safe_globals([MixerState])


def wants_state(
    module: nn.Module,
    x: Tensor,
    state: object | None,
    return_state: bool | None,
    inplace: bool,
    *,
    memory: tuple[int, ...] | None = None,
    cache: tuple[int, int] | None = None,
    taps: nn.ModuleDict | None = None,
) -> bool:
    """Return whether a call hands its state back: as asked; else if one was passed, or outside training.

    A state that is none of this layer's raises: `memory` is the shape of the layer's memory without the batch,
    `cache` its heads of keys and values and their width, `taps` its convolutions; None where it has no such part.
    """
    op, fix = type(module).__name__, "pass the state of these sequences in this layer, or None"
    if state is None:
        if inplace:
            expected = "a state to update in place"
            raise ValueRangeError(message(op, "inplace", expected, "state=None", "pass a MixerState, or inplace=False"))
        return not module.training if return_state is None else return_state
    if not isinstance(state, MixerState):
        kind, call = type(state).__name__, "pass what the previous call returned, or None"
        raise DtypeError(message(op, "state", "a MixerState", kind, call))
    shapes: dict[str, tuple[int | None, ...]] = {}
    if memory is not None:
        shapes["memory"] = memory
    if cache is not None:
        shapes["keys"] = shapes["values"] = (cache[0], None, cache[1])
    convs: dict[str, Any] = {} if taps is None else dict(taps.items())
    for name, conv in convs.items():
        channels, _, width = conv.weight.shape
        shapes[f"taps[{name!r}]"] = (width - 1, channels)
    for name, part in state.parts().items():
        if name not in shapes:
            expected = f"a state with {', '.join(shapes) or 'nothing'} only, as this layer makes"
            raise ShapeError(message(op, "state", expected, f"one with {name}", fix))
        got = tuple(part.shape)
        if got[0] != x.shape[0]:
            expected = f"a state of {x.shape[0]} sequences, as x has"
            raise ShapeError(message(op, "state", expected, f"one of {got[0]}", fix))
        want = (x.shape[0], *shapes[name])
        if len(got) != len(want) or any(size is not None and size != have for size, have in zip(want, got)):
            expected = f"{name} {['any' if size is None else size for size in want]}"
            raise ShapeError(message(op, "state", expected, str(list(got)), fix))
        if isinstance(part, Tensor) and part.device != x.device:
            got_on = f"{name} on {part.device}"
            raise DeviceError(
                message(op, "state", f"a state on the device of x, {x.device}", got_on, "move one of them")
            )
    return True if return_state is None else return_state


def refuse_gradients(op: str, argument: str, module: nn.Module) -> None:
    """Raise ValueRangeError where a call in place would have to record gradients."""
    if torch.is_grad_enabled() and any(parameter.requires_grad for parameter in module.parameters()):
        expected, got = "no gradients: a call in place has none", "parameters that require them"
        raise ValueRangeError(message(op, argument, expected, got, "call it under torch.no_grad()"))
