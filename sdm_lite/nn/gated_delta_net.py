"""Gated DeltaNet, the dense baseline: the gated delta rule on a small state, in chunked form."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import ValueRangeError, message
from ..validate import check_shape
from .checks import check_like, check_tensor, check_vectors
from .gates import (
    DECAY_INITS,
    KEY_INITS,
    OUTPUT_GATES,
    choose,
    gate_readings,
    init_decay,
    log_decay_and_beta,
    plain_precision,
    widen,
)
from .ragged import tokens_of
from .short_conv import ShortConv, check_conv, convolve
from .state import MixerState, wants_state


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    values: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    *,
    chunk: int = 64,
) -> tuple[Tensor, Tensor]:
    """Apply the gated delta rule to dense keys, a chunk of tokens at a time (the WY form, spec section 7)::

        S_t = alpha_t S_{t-1} + beta_t k_t (v_t - alpha_t S_{t-1}^T k_t)^T          y_t = S_t^T q_t

    Decays are exponentials of sums that are <= 0, never quotients, so that extreme gates stay finite.

    Parameters
    ----------
    q, k : Tensor [B, T, H, d_k]
    values : Tensor [B, T, H, d_v]
    log_decay, beta : Tensor [B, T, H]
    initial_state : Tensor [B, H, d_k, d_v] or None
        None: zero.
    chunk : int
        Tokens per chunk; changes speed and rounding only. T need not be a multiple.

    Returns
    -------
    readings : Tensor [B, T, H, d_v]
    final_state : Tensor [B, H, d_k, d_v]
        Both in the dtype of `values`.

    Raises
    ------
    ShapeError, DtypeError, DeviceError, ValueRangeError
        Where the arguments do not fit each other.

    Examples
    --------
    >>> one = torch.ones(1, 2, 1, 1)
    >>> y, state = gated_delta_rule(one, one, one, torch.zeros(1, 2, 1), torch.full((1, 2, 1), 0.5))
    >>> y.flatten().tolist(), state.item()
    ([0.5, 0.75], 0.75)
    """
    _check_rule(q, k, values, log_decay, beta, initial_state, chunk)
    B, T, H, _ = k.shape
    state = values.new_zeros(B, H, k.shape[-1], values.shape[-1]) if initial_state is None else initial_state
    if T == 0:
        return values, state
    chunk = min(chunk, T)
    extra = -T % chunk

    def blocks(x: Tensor) -> Tensor:
        """[B, T, H, ...] -> [B, H, blocks, chunk, ...]; the padding has beta = 0, log_decay = 0: it changes nothing."""
        padding = (0, extra) if x.ndim == 3 else (0, 0, 0, extra)
        x = F.pad(x.transpose(1, 2), padding)
        return x.unflatten(2, (-1, chunk))

    q, k, v = blocks(q), blocks(k), blocks(values)
    beta = blocks(beta)[..., None]
    # exp of anything lower is 0 in this dtype; the clamp also gives -inf its right gradient, 0
    log_decay = blocks(log_decay.clamp(min=-104.0 if values.dtype == torch.float32 else -746.0))
    between = _sums_between(log_decay).exp()  # [i, j]: decay from after token j to token i; 0 for j > i
    since_entry = log_decay.cumsum(-1).exp()[..., None]
    unit = torch.eye(chunk, dtype=k.dtype, device=k.device)
    overlap = ((beta * k) @ k.transpose(-1, -2) * between).tril(-1) + unit
    both = torch.cat([beta * v, beta * k * since_entry], dim=-1)
    solved = torch.linalg.solve_triangular(overlap, both, upper=False, unitriangular=True)
    deltas, keys = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    attention = q @ k.transpose(-1, -2) * between
    decayed_q, decayed_k = q * since_entry, (k * between[..., -1, :, None]).transpose(-1, -2)
    readings = []
    # unbind, not indexing: the backward of an index fills a tensor of the whole sequence for each chunk
    parts = (x.unbind(2) for x in (deltas, keys, decayed_q, decayed_k, attention, since_entry[..., -1:, :]))
    for delta, key, query, written, inner, decay in zip(*parts):
        delta = delta - key @ state
        readings.append(query @ state + inner @ delta)
        state = decay * state + written @ delta
    return torch.cat(readings, dim=2)[:, :, :T].transpose(1, 2), state


def _check_rule(q: Any, k: Any, values: Any, log_decay: Any, beta: Any, initial_state: Any | None, chunk: int) -> None:
    op = "gated_delta_rule"
    named = {"values": values, "q": q, "k": k, "log_decay": log_decay, "beta": beta, "initial_state": initial_state}
    if initial_state is None:
        del named["initial_state"]
    for name, x in named.items():
        check_tensor(op, name, x)
    check_shape(op, "values", values, (None,) * 4, "[B, T, H, d_v]")
    token = tuple(values.shape[:3])
    check_shape(op, "k", k, (*token, None), "[B, T, H, d_k]")
    check_shape(op, "q", q, tuple(k.shape), "[B, T, H, d_k]")
    for name in ("log_decay", "beta"):
        check_shape(op, name, named[name], token, "[B, T, H]")
    if initial_state is not None:
        wanted = (token[0], token[2], k.shape[3], values.shape[3])
        check_shape(op, "initial_state", initial_state, wanted, "[B, H, d_k, d_v]")
    for name, x in named.items():
        check_like(op, name, x, values, "that of values")
    if chunk < 1:
        raise ValueRangeError(message(op, "chunk", "at least 1 token", str(chunk), "raise chunk"))


def _sums_between(log_decay: Tensor) -> Tensor:
    """Return [..., i, j] = sum of log_decay over tokens j+1 .. i, -inf for j > i.

    Summed as such, not as a difference of prefix sums, which would lose the small decays beside a large one.
    """
    chunk = log_decay.shape[-1]
    lower = torch.ones(chunk, chunk, dtype=torch.bool, device=log_decay.device).tril()
    rows = log_decay[..., :, None].expand(*log_decay.shape, chunk)
    sums = rows.masked_fill(~lower.tril(-1), 0).cumsum(dim=-2)
    return sums.masked_fill(~lower, -torch.inf)


class GatedDeltaNet(nn.Module):
    """A mixer with a dense state of d_k x d_v per head, the baseline of the sparse memory::

        q, k = l2-normalised Wq x, Wk x         S_t, y_t = gated delta rule (q, k, Wv x, log_decay(x), beta(x))
        out  = Wo ( gate(Wg x) * rms_norm(y) )

    It takes the options of :class:`SparseDeltaMemory` that small models need, so that comparisons are fair.

    Parameters
    ----------
    dim, num_heads : int
    head_k_dim, head_v_dim : int
        d_k and d_v.
    conv : int or None
        Taps of the causal convolutions on q, k and v (SiLU on v then).
    conv_init, key_init, decay_init, output_gate
        As in SparseDeltaMemory; key_init="shared": q and k projections start equal.
    chunk : int
        Tokens per chunk.

    Examples
    --------
    >>> y, state = GatedDeltaNet(8, num_heads=1, head_k_dim=4, head_v_dim=8).eval()(torch.ones(2, 5, 8))
    >>> tuple(y.shape), tuple(state.memory.shape)
    ((2, 5, 8), (2, 1, 4, 8))
    """

    no_weight_decay = ("A_log", "dt_bias")

    def __init__(
        self,
        dim: int,
        *,
        num_heads: int = 1,
        head_k_dim: int = 64,
        head_v_dim: int = 128,
        conv: int | None = None,
        conv_init: str = "mix",
        key_init: str = "independent",
        decay_init: str = "fla",
        output_gate: bool | str = "silu",
        chunk: int = 64,
    ) -> None:
        super().__init__()
        op = "GatedDeltaNet"
        for name, size in (
            ("num_heads", num_heads),
            ("head_k_dim", head_k_dim),
            ("head_v_dim", head_v_dim),
            ("chunk", chunk),
        ):
            if size < 1:
                raise ValueRangeError(message(op, name, "at least 1", str(size), f"raise {name}"))
        choose(op, "key_init", key_init, KEY_INITS)
        choose(op, "decay_init", decay_init, DECAY_INITS)
        choose(op, "output_gate", output_gate, OUTPUT_GATES)
        check_conv(op, conv, conv_init)
        self.dim, self.num_heads, self.chunk, self.output_gate = dim, num_heads, chunk, output_gate
        self.head_k_dim, self.head_v_dim = head_k_dim, head_v_dim
        keys, width = num_heads * head_k_dim, num_heads * head_v_dim
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(dim, keys), nn.Linear(dim, keys), nn.Linear(dim, width)
        self.a_proj, self.b_proj = nn.Linear(dim, num_heads), nn.Linear(dim, num_heads)
        self.A_log = nn.Parameter(torch.empty(num_heads))
        self.dt_bias = nn.Parameter(torch.empty(num_heads))
        if output_gate:
            self.g_proj = nn.Linear(dim, width)
        self.o_norm = nn.RMSNorm(head_v_dim, eps=1e-6)
        self.o_proj = nn.Linear(width, dim)
        self.convs = nn.ModuleDict()
        if conv is not None:
            for name, channels in (("query", keys), ("key", keys), ("value", width)):
                self.convs[name] = ShortConv(channels, conv, conv_init)
        for module in self.children():
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)
        if key_init == "shared":
            self.q_proj.weight.data.copy_(self.k_proj.weight.data)
        init_decay(self.a_proj, self.A_log, self.dt_bias, decay_init)

    def forward(
        self,
        x: Tensor,
        state: MixerState | None = None,
        *,
        return_state: bool | None = None,
        inplace: bool = False,
        lengths: Tensor | None = None,
    ) -> tuple[Tensor, MixerState | None]:
        """Return (y [B, T, dim], state); the arguments are those of SparseDeltaMemory (`inplace` changes nothing)."""
        check_vectors("GatedDeltaNet", x, self.dim, self.q_proj.weight)
        memory_shape = (self.num_heads, self.head_k_dim, self.head_v_dim)
        hand_back = wants_state(self, x, state, return_state, inplace, memory=memory_shape, taps=self.convs)
        state = MixerState() if state is None else state
        taps: dict[str, Tensor] = {}
        q = convolve(self.convs, "query", self.q_proj(x), state, taps, lengths)
        k = convolve(self.convs, "key", self.k_proj(x), state, taps, lengths)
        v = convolve(self.convs, "value", self.v_proj(x), state, taps, lengths)
        v = F.silu(v) if self.convs else v
        log_decay, beta = log_decay_and_beta(x, self.a_proj, self.b_proj, self.A_log, self.dt_bias)
        if lengths is not None:  # padding neither forgets nor writes
            padding = ~tokens_of(lengths, x.shape[1])[..., None]
            log_decay, beta = log_decay.masked_fill(padding, 0), beta.masked_fill(padding, 0)
        with plain_precision(x):
            q, k, v = (widen(part).unflatten(-1, (self.num_heads, -1)) for part in (q, k, v))
            q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
            readings, memory = gated_delta_rule(q, k, v, log_decay, beta, state.memory, chunk=self.chunk)
        readings = self.o_norm(readings.to(x.dtype)).flatten(2)
        if self.output_gate:
            readings = gate_readings(readings, self.g_proj(x), self.output_gate)
        return self.o_proj(readings), state.advanced(x.shape[1], memory, taps, lengths) if hand_back else None

    def flops_per_token(self, context: int = 0) -> dict[str, int]:
        """Return multiply-adds times two per token, of the recurrence token by token: {"projections", "state"}."""
        weights = sum(p.numel() for p in self.parameters() if p.ndim > 1)
        return {"projections": 2 * weights, "state": 2 * 3 * self.state_elements()}

    def state_access(self) -> int:
        """Return the state elements that a token addresses: all of them (spec section 8)."""
        return self.state_elements()

    def state_elements(self, context: int = 0) -> int:
        """Return the elements of one sequence's state, H d_k d_v."""
        return self.num_heads * self.head_k_dim * self.head_v_dim
