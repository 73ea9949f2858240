"""What a layer hands to its next call, so that a sequence may come in pieces."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from ..errors import DtypeError, ShapeError, message


@dataclass
class MixerState:
    """State of one layer after the tokens it has seen.

    Attributes
    ----------
    position : int
        Tokens seen.
    memory : Tensor or None
        SparseDeltaMemory: [B, H, N, D]. GatedDeltaNet: [B, H, d_k, d_v] float32. None: the initial memory.
    taps : dict of str to Tensor [B, width - 1, channels]
        Last inputs of each short convolution.
    keys, values : Tensor [B, num_kv_heads, tokens, head_dim] or None
        An attention layer's cache: all tokens, or the last window - 1.
    fast : FwPKMState or None
        Of the fast-weight memory before the mixer, which no call modifies.
    """

    position: int = 0
    memory: Tensor | None = None
    taps: dict[str, Tensor] = field(default_factory=dict)
    keys: Tensor | None = None
    values: Tensor | None = None
    fast: Any = None

    def advanced(self, tokens: int, memory: Tensor | None, taps: dict[str, Tensor]) -> MixerState:
        """Return the state of a recurrent layer `tokens` later; the taps are copied, as they are views of a batch."""
        return MixerState(self.position + tokens, memory, {name: last.clone() for name, last in taps.items()})

    def map(self, f: Callable[[Tensor], Tensor]) -> MixerState:
        """Return a new state with `f` applied to every tensor, for instance ``torch.Tensor.detach`` or ``clone``.

        `fast`, which has no graph and is never modified, stays as it is.
        """

        def maybe(x: Tensor | None) -> Tensor | None:
            return None if x is None else f(x)

        taps = {name: f(last) for name, last in self.taps.items()}
        return MixerState(self.position, maybe(self.memory), taps, maybe(self.keys), maybe(self.values), self.fast)


def wants_state(
    module: nn.Module, x: Tensor, state: object | None, return_state: bool | None, memory: tuple[int, ...] = ()
) -> bool:
    """Return whether a call hands its state back: as asked; else if one was passed, or outside training.

    A state of another kind, batch or memory (`memory`: its shape without the batch) raises.
    """
    if state is not None and not isinstance(state, MixerState):
        name, fix = type(module).__name__, "pass what the previous call returned, or None"
        raise DtypeError(message(name, "state", "a MixerState", type(state).__name__, fix))
    if isinstance(state, MixerState):
        name, fix = type(module).__name__, "pass the state of these sequences in this layer, or None"
        for part in (state.memory, state.keys, *state.taps.values()):
            if part is not None and part.shape[0] != x.shape[0]:
                got = f"one of {part.shape[0]}"
                raise ShapeError(message(name, "state", f"a state of {x.shape[0]} sequences, as x has", got, fix))
        if memory and state.memory is not None and tuple(state.memory.shape[1:]) != memory:
            got = str(list(state.memory.shape))
            raise ShapeError(message(name, "state", f"a memory [B, {', '.join(map(str, memory))}]", got, fix))
    return (state is not None or not module.training) if return_state is None else return_state
