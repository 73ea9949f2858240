"""Softmax attention: over a sliding window, and over everything."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import ValueRangeError, message
from .checks import check_vectors
from .gates import check_divides
from .ragged import last_columns
from .state import MixerState, moved, positions_of, refuse_gradients, wants_state


def rotate(q: Tensor, k: Tensor, position: int | Tensor, base: float = 10_000.0) -> tuple[Tensor, Tensor]:
    """Return q and k [B, H, T, head_dim] with rotary positions `position` (an int, or int64 [B]), + 1, ... applied.

    The pair (x_i, x_{i + half}) turns by the angle position * base ** (-i / half).
    """
    half = q.shape[-1] // 2
    steps = positions_of(position, q.shape[-2], q.device).to(torch.float32)
    rates = base ** (-torch.arange(half, device=q.device, dtype=torch.float32) / half)
    angles = steps[..., None] * rates
    cos, sin = angles.cos().to(q.dtype), angles.sin().to(q.dtype)
    if cos.ndim == 3:  # positions of each sequence, the same for its heads
        cos, sin = cos[:, None], sin[:, None]
    return _turned(q, cos, sin), _turned(k, cos, sin)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def _band(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """Return bool [queries, keys]: which keys a query sees when the last query stands at the last key."""
    distance = torch.arange(queries, device=device)[:, None] + (keys - queries) - torch.arange(keys, device=device)
    return (distance >= 0) if window is None else (distance >= 0) & (distance < window)


def _empty_columns(position: int | Tensor, cached: int) -> Tensor | None:
    """Return how many cached columns lie before each sequence's first token, [B], or None where none does."""
    if not isinstance(position, Tensor) or bool((position >= cached).all()):
        return None
    return (cached - position).clamp(min=0)


def _room(state: MixerState, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return buffers that begin with the state's keys and values and have room for `k` and `v` behind them.

    Capacity doubles, so that a token is copied once on the average. Columns once filled are never written again
    while a mark may refer to them: going back to it only makes `keys` and `values` shorter.
    """
    cached = 0 if state.keys is None else state.keys.shape[2]
    needed = cached + k.shape[2]
    if state.room is not None and state.room[0].shape[2] >= needed and state.room[0].dtype == k.dtype:
        return state.room
    buffers = []
    for past, new in ((state.keys, k), (state.values, v)):
        buffer = new.new_empty(*new.shape[:2], max(2 * cached, needed, 64), new.shape[3])
        if past is not None:
            buffer[:, :, :cached] = past
        buffers.append(buffer)
    return buffers[0], buffers[1]


def _append(buffer: Tensor, cached: int, new: Tensor) -> Tensor:
    """Write `new` behind the first `cached` columns and return the columns filled so far, a view."""
    end = cached + new.shape[2]
    buffer[:, :, cached:end] = new
    return buffer[:, :, :end]


class _Attention(nn.Module):
    """Projections, rotary positions and the key-value cache; a subclass says who sees whom."""

    window: int | None = None  # None: everything

    def __init__(self, dim: int, num_heads: int, num_kv_heads: int | None, rope: bool) -> None:
        super().__init__()
        op = type(self).__name__
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        check_divides(op, "num_heads", num_heads, dim, "dim")
        check_divides(op, "num_kv_heads", num_kv_heads, num_heads, "num_heads")
        head_dim = dim // num_heads
        if rope and head_dim % 2:
            fix = "change either, or set rope=False"
            raise ValueRangeError(message(op, "dim / num_heads", "an even number", str(head_dim), fix))
        self.dim, self.num_heads, self.num_kv_heads = dim, num_heads, num_kv_heads
        self.head_dim, self.rope = head_dim, rope
        self.q_proj = nn.Linear(dim, dim, bias=False)
        self.k_proj = nn.Linear(dim, num_kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(dim, num_kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(dim, dim, bias=False)

    def forward(
        self,
        x: Tensor,
        state: MixerState | None = None,
        *,
        return_state: bool | None = None,
        inplace: bool = False,
        lengths: Tensor | None = None,
    ) -> tuple[Tensor, MixerState | None]:
        """Return (y [B, T, dim], state); the arguments are those of SparseDeltaMemory.

        With `inplace` and no window, the cache grows in buffers with room instead of being copied at each call.
        """
        check_vectors(type(self).__name__, x, self.dim, self.q_proj.weight)
        hand_back = wants_state(self, x, state, return_state, inplace, cache=(self.num_kv_heads, self.head_dim))
        state = MixerState() if state is None else state
        q, k, v = (
            project(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.rope:
            q, k = rotate(q, k, state.position)
        cached = 0 if state.keys is None else state.keys.shape[2]
        grows = inplace and hand_back and self.window is None and x.shape[1] > 0 and lengths is None
        if grows:
            refuse_gradients(type(self).__name__, "state", self)
        room = _room(state, k, v) if grows else None
        if room is not None:
            k, v = (_append(buffer, cached, new) for buffer, new in zip(room, (k, v)))
        elif state.keys is not None and state.values is not None:
            k = torch.cat([state.keys.to(k.dtype), k], dim=2)
            v = torch.cat([state.values.to(v.dtype), v], dim=2)
        empty = _empty_columns(state.position, cached)
        y = self._attend(q, k, v, empty).transpose(1, 2).flatten(2) if x.shape[1] else x
        after = None
        if hand_back:
            position = moved(state.position, x.shape[1], lengths)
            kept = k.shape[2] if self.window is None else min(k.shape[2], self.window - 1)
            if lengths is None:
                keys, values = (part[:, :, part.shape[2] - kept :] for part in (k, v))
            else:  # sequences end together in the cache
                kept = min(kept, int(torch.as_tensor(position).max()))
                ends = x.shape[1] - lengths
                keys, values = (last_columns(part.transpose(1, 2), kept, ends).transpose(1, 2) for part in (k, v))
            if room is None:
                keys, values = keys.clone(), values.clone()
            after = MixerState(position, keys=keys, values=values, room=room)
        return self.o_proj(y), after

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, empty: Tensor | None) -> Tensor:
        """Return [B, H, T, head_dim]; `empty` [B]: how many of the first columns hold no token of a sequence."""
        raise NotImplementedError

    def _ragged(self, q: Tensor, k: Tensor, v: Tensor, empty: Tensor) -> Tensor:
        """Attend where sequences have seen different numbers of tokens: one mask over all columns."""
        there = torch.arange(k.shape[2], device=q.device) >= empty[:, None]
        mask = _band(q.shape[2], k.shape[2], self.window, q.device) & there[:, None]
        return self._sdpa(q, k, v, mask[:, None])

    def _sdpa(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        grouped = self.num_kv_heads != self.num_heads
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=grouped)

    def _seen(self, context: int) -> int:
        """Return how many keys a query sees on the average over `context` tokens."""
        reach = context if self.window is None else min(self.window, context)
        return reach - reach * (reach - 1) // (2 * max(context, 1))

    def flops_per_token(self, context: int = 0) -> dict[str, int]:
        """Return multiply-adds times two per token: {"projections", "state"}, the average over `context` tokens."""
        weights = sum(p.numel() for p in self.parameters())
        return {"projections": 2 * weights, "state": 4 * self._seen(context) * self.dim}

    def state_elements(self, context: int = 0) -> int:
        """Return the elements of one sequence's cache after `context` tokens."""
        kept = context if self.window is None else min(context, self.window - 1)
        return 2 * kept * self.num_kv_heads * self.head_dim


class SlidingWindowAttention(_Attention):
    """Causal attention over the last `window` tokens, the token itself included; rotary positions, grouped heads.

    Computed in blocks of `window` queries against the 2 * window keys that they may see: O(T * window).

    Parameters
    ----------
    dim, num_heads : int
    num_kv_heads : int or None
        Heads of keys and values, shared by num_heads / num_kv_heads query heads; None: num_heads.
    window : int

    Examples
    --------
    >>> y, state = SlidingWindowAttention(8, 2, 1, window=4).eval()(torch.ones(1, 9, 8))
    >>> tuple(y.shape), tuple(state.keys.shape)
    ((1, 9, 8), (1, 1, 3, 4))
    """

    def __init__(self, dim: int, num_heads: int, num_kv_heads: int | None = None, window: int = 128) -> None:
        super().__init__(dim, num_heads, num_kv_heads, rope=True)
        if window < 1:
            expected, fix = "at least 1 token", "raise window"
            raise ValueRangeError(message("SlidingWindowAttention", "window", expected, str(window), fix))
        self.window = window

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, empty: Tensor | None) -> Tensor:
        if empty is not None:
            return self._ragged(q, k, v, empty)
        T, w, cached = q.shape[2], int(self.window or 0), k.shape[2] - q.shape[2]
        if T <= w:  # one block, without padding it: decoding, short sequences
            return self._sdpa(q, k, v, None if T == 1 else _band(T, k.shape[2], w, q.device))
        blocks = -(-T // w)
        q = F.pad(q, (0, 0, 0, blocks * w - T)).unflatten(2, (blocks, w)).transpose(1, 2).flatten(0, 1)

        def pairs(x: Tensor) -> Tensor:
            """[B, H, cached + T, d] -> [B * blocks, H, 2 w, d]: each block behind the one before it."""
            x = F.pad(x, (0, 0, w - cached, blocks * w - T)).unflatten(2, (blocks + 1, w))
            return torch.cat([x[:, :, :-1], x[:, :, 1:]], dim=3).transpose(1, 2).flatten(0, 1)

        mask = _band(w, 2 * w, w, q.device).repeat(blocks, 1, 1)
        mask[0, :, : w - cached] = False  # nothing is there before the first token
        batch = q.shape[0] // blocks
        # scaled_dot_product_attention is about twice as slow on five axes: blocks go into the batch
        mask = mask.expand(batch, blocks, w, 2 * w).reshape(batch * blocks, 1, w, 2 * w)
        y = self._sdpa(q, pairs(k), pairs(v), mask)
        return y.unflatten(0, (batch, blocks)).transpose(1, 2).flatten(2, 3)[:, :, :T]


class FullAttention(_Attention):
    """Causal attention over the whole sequence; rotary positions unless rope=False, grouped heads.

    Parameters
    ----------
    dim, num_heads : int
    num_kv_heads : int or None
        As in SlidingWindowAttention.
    rope : bool

    Examples
    --------
    >>> y, state = FullAttention(8, 2).eval()(torch.ones(1, 9, 8))
    >>> tuple(y.shape), tuple(state.keys.shape)
    ((1, 9, 8), (1, 2, 9, 4))
    """

    def __init__(self, dim: int, num_heads: int, num_kv_heads: int | None = None, rope: bool = True) -> None:
        super().__init__(dim, num_heads, num_kv_heads, rope)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, empty: Tensor | None) -> Tensor:
        if empty is not None:
            return self._ragged(q, k, v, empty)
        if q.shape[2] == k.shape[2]:
            return self._sdpa(q, k, v, causal=True)
        return self._sdpa(q, k, v, None if q.shape[2] == 1 else _band(q.shape[2], k.shape[2], None, q.device))
