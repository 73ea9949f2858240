"""The sparse delta memory as a torch layer (spec sections 2 to 4)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import ShapeError, ValueRangeError, message
from ..memory_state import MemoryState
from ..ops import hash_slots, product_key_topk, sparse_delta_rule, sparse_delta_rule_
from .checks import check_tensor, check_vectors, slot_factors
from .gates import (
    DECAY_INITS,
    KEY_INITS,
    OUTPUT_GATES,
    check_divides,
    choose,
    gate_readings,
    init_decay,
    log_decay_and_beta,
    plain_precision,
    widen,
)
from .ragged import tokens_of
from .short_conv import ShortConv, check_conv, convolve
from .state import MixerState, positions_of, refuse_gradients, tidy, wants_state

_NAME = "SparseDeltaMemory"


def _padded(call: tuple[Tensor, ...], there: Tensor) -> tuple[Tensor, ...]:
    """Return the seven arrays of a call with slot -1, which a MemoryState passes over, where no token is."""
    absent = ~there[..., None, None]
    return tuple(part.masked_fill(absent, -1) if index in (1, 5) else part for index, part in enumerate(call))


class SparseDeltaMemory(nn.Module):
    """A mixer with a large table per head, of which each token writes W slots and reads R::

        k, I_w = softmax over the W best slots of Wk_write x          q, I_r = likewise, from Wq_read x
        M_t    = sparse delta rule (M_{t-1}, I_w, k, Wv_write x, log_decay(x), beta(x))
        y_t    = Wo ( gate(Wog x) * norm( sum_r q_r M_t[r] ) )

    By default the parameters have the names and shapes of the published checkpoints. Small models hardly learn
    with these defaults: see docs/layers.md for what each option was measured to do.

    Parameters
    ----------
    dim : int
        Width d of the model; D = dim / num_heads.
    num_heads, slots_per_head, num_writes, num_reads : int
        H, N, W, R.
    factors : tuple of int or None
        Widths of the product-key factors; None: two of sqrt(N).
    addressing : {"product_key", "hash"}
        "hash": slots from a hash of the position (or of `ids`), weights 1/W: the control without content.
    rule : {"shared", "per_slot"}
    readings_norm : {"rms", "layer", None}
        Per head, with one gain [D] for all heads.
    output_gate : False, True or "silu"
        True: sigmoid(Wog x).
    key_weighted_decay : bool
        The log decay of a written slot is multiplied by its weight.
    learn_memory : bool
        The initial memory is the parameter `memory` [H, N, D]; otherwise it is zero.
    memory_init_std : float
        Standard deviation of the learned memory at the start.
    write : bool
        False: the memory is only read (an attribute, may be changed later). The write parameters stay in the
        state dict, unused.
    conv : int or None
        Taps of the causal convolutions on write scores, read scores and values (SiLU on the values then).
    conv_init : {"mix", "current"}
    key_init : {"independent", "shared"}
        "shared": read and write scores have equal weights at the start, untied after.
    score_norm : {None, "rms"}
        RMS norm, without gain, over each factor's columns.
    score_scale : float or None
        Start of a learned factor on the selected scores, one per side and head.
    decay_init : {"fla", "slow", "stratified"}
        See :func:`sdm_lite.nn.gates.init_decay`.
    restore, snapshot_dtype
        As in :func:`sdm_lite.sparse_delta_rule`.

    Raises
    ------
    ValueRangeError
        On sizes that do not fit each other or an unknown choice.

    Examples
    --------
    >>> layer = SparseDeltaMemory(8, slots_per_head=16, num_writes=4, num_reads=4)
    >>> sorted({name.split(".")[0] for name, _ in layer.named_parameters()})
    ['A_log', 'Wk_write', 'Wo', 'Wq_read', 'Wv_write', 'a_proj', 'b_proj', 'dt_bias', 'memory', 'readings_norm']
    """

    no_weight_decay = ("A_log", "dt_bias", "memory")
    zero_memory: Tensor
    write_scale: Tensor | None
    read_scale: Tensor | None

    def __init__(
        self,
        dim: int,
        *,
        num_heads: int = 1,
        slots_per_head: int,
        num_writes: int = 64,
        num_reads: int = 64,
        factors: tuple[int, ...] | None = None,
        addressing: str = "product_key",
        rule: str = "shared",
        readings_norm: str | None = "rms",
        output_gate: bool | str = False,
        key_weighted_decay: bool = False,
        learn_memory: bool = True,
        memory_init_std: float = 0.0,
        write: bool = True,
        conv: int | None = None,
        conv_init: str = "mix",
        key_init: str = "independent",
        score_norm: str | None = None,
        score_scale: float | None = None,
        decay_init: str = "fla",
        restore: str = "hybrid",
        snapshot_dtype: str | None = None,
    ) -> None:
        super().__init__()
        check_divides(_NAME, "num_heads", num_heads, dim, "dim")
        for name, count in (("num_writes", num_writes), ("num_reads", num_reads)):
            if not 1 <= count <= slots_per_head:
                fix = f"lower {name} or raise slots_per_head"
                raise ValueRangeError(message(_NAME, name, f"1 to {slots_per_head} slots", str(count), fix))
        for name, value, allowed in (
            ("addressing", addressing, ("product_key", "hash")),
            ("rule", rule, ("shared", "per_slot")),
            ("readings_norm", readings_norm, ("rms", "layer", None)),
            ("output_gate", output_gate, OUTPUT_GATES),
            ("key_init", key_init, KEY_INITS),
            ("score_norm", score_norm, (None, "rms")),
            ("decay_init", decay_init, DECAY_INITS),
            ("restore", restore, ("hybrid", "snapshot", "invert")),
            ("snapshot_dtype", snapshot_dtype, (None, "bf16", "fp8", "int4")),
        ):
            choose(_NAME, name, value, allowed)
        check_conv(_NAME, conv, conv_init)
        if memory_init_std and not learn_memory:
            got = f"{memory_init_std} with learn_memory=False"
            raise ValueRangeError(message(_NAME, "memory_init_std", "0", got, "set learn_memory=True"))
        self.dim, self.num_heads, self.slots_per_head = dim, num_heads, slots_per_head
        self.num_writes, self.num_reads = num_writes, num_reads
        self.factors = slot_factors(_NAME, slots_per_head, factors)
        self.addressing, self.rule, self.write = addressing, rule, write
        self.output_gate, self.key_weighted_decay, self.score_norm = output_gate, key_weighted_decay, score_norm
        self.restore, self.snapshot_dtype = restore, snapshot_dtype
        self._make_parameters(readings_norm, learn_memory, conv, conv_init, score_scale)
        self._init_parameters(memory_init_std, key_init, decay_init)

    def _make_parameters(
        self, readings_norm: str | None, learn_memory: bool, conv: int | None, conv_init: str, scale: float | None
    ) -> None:
        dim, H, D = self.dim, self.num_heads, self.dim // self.num_heads
        columns = H * sum(self.factors)
        self.Wq_read = nn.Linear(dim, columns)
        self.Wk_write = nn.Linear(dim, columns)
        self.Wv_write = nn.Linear(dim, dim)
        self.a_proj = nn.Linear(dim, H)
        self.b_proj = nn.Linear(dim, H)
        self.A_log = nn.Parameter(torch.empty(H))
        self.dt_bias = nn.Parameter(torch.empty(H))
        self.Wo = nn.Linear(dim, dim)
        if self.output_gate:
            self.Wog = nn.Linear(dim, dim)
        if learn_memory:
            self.memory = nn.Parameter(torch.zeros(H, self.slots_per_head, D))
        else:  # made once, since zeroing a large table at each call costs more than the call
            self.register_buffer("zero_memory", torch.zeros(H, self.slots_per_head, D), persistent=False)
        if readings_norm == "rms":
            self.readings_norm: nn.Module = nn.RMSNorm(D, eps=1e-6)
        elif readings_norm == "layer":
            self.readings_norm = nn.LayerNorm(D, eps=1e-6, bias=False)
        else:
            self.readings_norm = nn.Identity()
        self.convs = nn.ModuleDict()
        if conv is not None:
            for name, channels in (("write", columns), ("read", columns), ("value", dim)):
                self.convs[name] = ShortConv(channels, conv, conv_init)
        for name in ("write_scale", "read_scale"):
            setattr(self, name, None if scale is None else nn.Parameter(torch.full((H,), float(scale))))

    @torch.no_grad()
    def _init_parameters(self, memory_init_std: float, key_init: str, decay_init: str) -> None:
        for module in self.children():
            if isinstance(module, nn.Linear):
                module.bias.zero_()
        if key_init == "shared":
            self.Wq_read.weight.copy_(self.Wk_write.weight)
        if memory_init_std:
            self.memory.normal_(std=memory_init_std)
        init_decay(self.a_proj, self.A_log, self.dt_bias, decay_init)

    def forward(
        self,
        x: Tensor,
        state: MixerState | MemoryState | None = None,
        ids: Tensor | tuple[Tensor, Tensor] | None = None,
        *,
        return_state: bool | None = None,
        inplace: bool = False,
        lengths: Tensor | None = None,
    ) -> tuple[Tensor, MixerState | None]:
        """Return (y [B, T, dim], state).

        Parameters
        ----------
        x : Tensor [B, T, dim]
        state : MixerState, MemoryState or None
            What the previous call on this sequence returned; None starts from the initial memory. A MemoryState,
            alone or as the state's `memory`, is updated in place; no gradients.
        ids : Tensor int [B, T], a pair of these, or None
            What "hash" addressing hashes, for writes and reads; None: the positions.
        return_state : bool or None
            Whether to hand the state back, which costs a copy of the table [B, H, N, D]. None: if a state was
            passed or the module is in eval mode; so a training step makes no copy.
        inplace : bool
            Update the passed state's memory in place instead of copying it; no gradients. For decoding. Where a new
            ``MixerState()`` has no memory yet, it becomes a MemoryState over the initial memory.
        lengths : Tensor int64 [B] or None
            Tokens of each sequence, where padding stands behind them: it neither reads nor writes, and the state is
            that after the last token. What `y` holds at the padding means nothing.

        Raises
        ------
        ShapeError, DtypeError, DeviceError
            Where `x`, `ids` or the parts of `state` do not fit the layer.
        ValueRangeError
            `inplace` without a state; in place, where a gradient would be needed: call under torch.no_grad().
        """
        check_vectors(_NAME, x, self.dim, self.Wq_read.weight)
        memory_shape = tuple(self.initial_memory().shape)
        if isinstance(state, MemoryState):
            state = self._around(state)
        hand_back = wants_state(self, x, state, return_state, inplace, memory=memory_shape, taps=self.convs)
        state = MixerState() if state is None else state
        taps: dict[str, Tensor] = {}
        write_ids, read_ids = self._ids(x, ids, state.position)
        read = self._address("read", self.Wq_read, x, self.num_reads, read_ids, state, taps, lengths)
        if self.write:
            write = self._address("write", self.Wk_write, x, self.num_writes, write_ids, state, taps, lengths)
            values = convolve(self.convs, "value", self.Wv_write(x), state, taps, lengths)
            values = F.silu(values) if self.convs else values
            readings, memory = self._update(x, values, write, read, state, hand_back, inplace, lengths)
        else:
            readings, memory = self._read_only(*read, state, hand_back, inplace)
        # the norm's gain is float32: without this, autocast gives it readings of another dtype
        readings = self.readings_norm(readings.to(x.dtype)).flatten(2)
        if self.output_gate:
            readings = gate_readings(readings, self.Wog(x), self.output_gate)
        return self.Wo(readings), state.advanced(x.shape[1], memory, taps, lengths) if hand_back else None

    def initial_memory(self) -> Tensor:
        """Return the memory [H, N, D] that a sequence starts from."""
        return self.memory if "memory" in self._parameters else self.zero_memory

    def memory_origin(self) -> Any:
        """Return what a MemoryState of this layer starts from: the learned memory, or the shape of a zero one."""
        first = self.initial_memory()
        return first.detach() if "memory" in self._parameters else tuple(first.shape)

    def new_memory(self, batch: int) -> MemoryState:
        """Return a MemoryState of `batch` sequences over the initial memory, which must not be trained meanwhile."""
        return MemoryState(self.memory_origin(), batch, dtype=self.initial_memory().dtype, rule=self.rule)

    def _around(self, memory: MemoryState) -> MixerState:
        """Return the state whose memory is `memory`: the rest is that of sequences before their first token."""
        position = tidy(torch.from_numpy(memory.tokens))
        if self.convs and (isinstance(position, Tensor) or position):
            fix = "pass the state that the previous call returned"
            expected = "a state with the last inputs of the convolutions"
            got = f"a MemoryState after {max(memory.tokens)} tokens"
            raise ValueRangeError(message(_NAME, "state", expected, got, fix))
        return MixerState(position, memory)

    def _ids(self, x: Tensor, ids: Any, position: int | Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return what to hash for writes and for reads."""
        if self.addressing != "hash":
            return None, None
        if ids is None:
            ids = positions_of(position, x.shape[1], x.device).expand(x.shape[:2])
        pair = ids if isinstance(ids, tuple) else (ids, ids)
        if len(pair) != 2:
            got = f"a tuple of {len(pair)}"
            raise ShapeError(message(_NAME, "ids", "ids [B, T], or (write ids, read ids)", got, "pass one or two"))
        write_ids, read_ids = pair
        for one in pair:
            check_tensor(_NAME, "ids", one)
            if one.shape != x.shape[:2]:
                expected = f"[B, T] = {list(x.shape[:2])}"
                raise ShapeError(message(_NAME, "ids", expected, str(list(one.shape)), "pass an id per token"))
        return write_ids, read_ids

    def _address(
        self,
        side: str,
        project: nn.Linear,
        x: Tensor,
        k: int,
        ids: Tensor | None,
        state: MixerState,
        taps: dict[str, Tensor],
        lengths: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Return the slots, int32, and the weights [B, T, H, k] of one side, "read" or "write"."""
        if ids is not None:
            draws = [hash_slots(ids, self.slots_per_head, k, seed=head) for head in range(self.num_heads)]
            slots = torch.stack(draws, dim=2)
            return slots, widen(x).new_full(slots.shape, 1 / k)
        scores = convolve(self.convs, side, project(x), state, taps, lengths)
        scale = self.read_scale if side == "read" else self.write_scale
        with plain_precision(x):
            scores = widen(scores).unflatten(-1, (self.num_heads, sum(self.factors)))
            if self.score_norm == "rms":
                parts = [F.rms_norm(part, part.shape[-1:], eps=1e-6) for part in scores.split(self.factors, -1)]
                scores = torch.cat(parts, dim=-1)
            selected, slots = product_key_topk(scores, k, factors=self.factors)
            return slots, (selected if scale is None else selected * widen(scale)[:, None]).softmax(-1)

    def _update(
        self,
        x: Tensor,
        values: Tensor,
        write: tuple[Tensor, Tensor],
        read: tuple[Tensor, Tensor],
        state: MixerState,
        hand_back: bool,
        inplace: bool,
        lengths: Tensor | None,
    ) -> tuple[Tensor, Any]:
        log_decay, beta = log_decay_and_beta(x, self.a_proj, self.b_proj, self.A_log, self.dt_bias)
        if self.key_weighted_decay:
            log_decay = log_decay[..., None] * write[1]
        call: tuple[Tensor, ...] = (values.unflatten(-1, (self.num_heads, -1)), *write, log_decay, beta, *read)
        memory = state.memory
        if inplace and memory is None:
            memory = self.new_memory(x.shape[0])
        # the slots are distinct and in range by construction: no need to check them
        there = None if lengths is None else tokens_of(lengths, x.shape[1])
        if isinstance(memory, MemoryState):
            refuse_gradients(_NAME, "state", self)
            return memory.extend(*(call if there is None else _padded(call, there))), memory
        offsets = None
        if lengths is not None and there is not None:  # the tokens alone, end to end
            call = tuple(part[there][None] for part in call)
            offsets = F.pad(lengths.cumsum(0), (1, 0))
        if inplace:
            readings = sparse_delta_rule_(*call, memory, rule=self.rule, cu_seqlens=offsets, check=False)
        else:
            readings, memory = sparse_delta_rule(
                *call,
                self.initial_memory() if memory is None else memory,
                rule=self.rule,
                restore=self.restore,
                snapshot_dtype=self.snapshot_dtype,
                cu_seqlens=offsets,
                output_final_state=hand_back,
                check=False,
            )
        if there is None:
            return readings, memory
        spread = readings.new_zeros(*there.shape, *readings.shape[2:])
        return spread.index_put((there,), readings[0]), memory

    def _read_only(
        self, slots: Tensor, weights: Tensor, state: MixerState, hand_back: bool, inplace: bool
    ) -> tuple[Tensor, Any]:
        """Return the weighted rows of a memory that no token changes, and, to hand back, that memory."""
        (B, T, H, R), N = slots.shape, self.slots_per_head
        memory = self.initial_memory() if state.memory is None else state.memory
        if isinstance(memory, MemoryState):
            memory = memory.dense()
        lanes = torch.arange(B * H if memory.ndim == 4 else H, device=slots.device)
        rows = slots.long() + lanes.view(-1, 1, H, 1) * N
        with plain_precision(memory):
            table = widen(memory).reshape(lanes.numel() * N, -1)
            flat = F.embedding_bag(
                rows.reshape(-1, R), table, per_sample_weights=weights.to(table.dtype).reshape(-1, R), mode="sum"
            )
        if inplace or isinstance(state.memory, MemoryState):
            memory = state.memory
        elif hand_back and memory.ndim == 3:  # a copy: the layer's own memory must not be written through a state
            memory = memory.expand(B, -1, -1, -1).clone()
        return flat.view(B, T, H, table.shape[-1]), memory if hand_back else None

    def flops_per_token(self, context: int = 0) -> dict[str, int]:
        """Return multiply-adds times two per token: {"projections", "state"}; selecting slots is not counted."""
        unused = [] if self.write else ["Wk_write", "Wv_write", "a_proj", "b_proj", "convs.write", "convs.value"]
        weights = sum(
            p.numel()
            for name, p in self.named_parameters()
            if p.ndim > 1 and name != "memory" and not name.startswith(tuple(unused))
        )
        rows = self.num_reads + (2 * self.num_writes if self.write else 0)
        return {"projections": 2 * weights, "state": 2 * rows * self.dim}

    def state_access(self) -> int:
        """Return the state elements that a token addresses, (W + R) D per head (spec section 8)."""
        return ((self.num_writes if self.write else 0) + self.num_reads) * self.dim

    def state_elements(self, context: int = 0) -> int:
        """Return the elements of one sequence's memory, H N D."""
        return self.slots_per_head * self.dim
