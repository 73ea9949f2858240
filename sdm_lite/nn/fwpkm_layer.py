"""Fast-weight Product Key Memory as a torch layer: slow projections around a table that the forward pass rewrites."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import DtypeError, ShapeError, ValueRangeError, message
from ..fwpkm_op import check_options, fwpkm
from ..fwpkm_state import FwPKMState
from ..product_key_memory import idw_product_key_topk
from ..torch_product_keys import stream_without_state
from .checks import check_vectors
from .gates import choose, plain_precision, widen
from .product_key_memory import check_size, check_table

_NAME = "FwPKM"


class FwPKM(nn.Module):
    """A memory of `sub_keys` ** 2 rows that learns, while it reads, to answer a token with the one after it::

        q = Wq rms(x) + bq     v = zscore(Wv rms(x) + bv)     g = sigmoid(wg rms(x) + bg)     three separate norms
        r = fwpkm(q, v, g, state)                              reads; a write at the end of each chunk (docs/fwpkm.md)
        y = Wo rms(g r + (1 - g) v) + bo

    x is the raw residual stream: the layer has its own norms, and y is to be added to x. In a :class:`HybridLM` it
    stands before the token mixer: ``memory=("fwpkm@1",)``.

    The fast weights, the buffers `keys` and `values`, are no parameters: a call without a state starts from them, and
    only :meth:`adopt` changes them. The forward pass itself writes nothing that outlives it, but returns a new state;
    so activation checkpointing, which runs it twice, writes once.

    Parameters
    ----------
    dim : int
    sub_keys : int
        Keys per half; the table has S = sub_keys ** 2 rows.
    num_heads, k : int
        Read heads, and the slots that each of them reads.
    key_dim : int
        Width of a head's query, both halves together: even.
    value_dim : int
        Width D of a row; all heads read one table.
    chunk, lookahead, pairs, scale, value_rate, key_rate, epsilon, detach_every, mse_to_keys
        As in :func:`sdm_lite.fwpkm`.
    gated_writes : bool
        Weight each write by the token's gate; False (an ablation): by 1.
    per_sequence : bool or None
        Whether a state that the layer starts has fast weights per sequence, or one set for the batch. None: one set
        in training mode, as published; per sequence in eval mode, so that no result depends on the batch.

    Raises
    ------
    ValueRangeError
        On sizes that do not fit each other or an unknown choice.

    Examples
    --------
    >>> layer = FwPKM(8, sub_keys=4, k=2, key_dim=4, value_dim=8, chunk=4)
    >>> y, state = layer(torch.ones(1, 6, 8))
    >>> y, state = layer(torch.ones(1, 2, 8), state, update=False)
    >>> y.shape
    torch.Size([1, 2, 8])
    """

    def __init__(
        self,
        dim: int,
        *,
        sub_keys: int = 512,
        num_heads: int = 1,
        k: int = 8,
        key_dim: int = 512,
        value_dim: int = 512,
        chunk: int = 512,
        lookahead: int = 1,
        pairs: str = "drop",
        scale: str = "norm",
        value_rate: float = 1.0,
        key_rate: float = 1.0,
        epsilon: float = 1e-3,
        detach_every: int | None = None,
        mse_to_keys: bool = False,
        gated_writes: bool = True,
        per_sequence: bool | None = None,
    ) -> None:
        super().__init__()
        check_table(_NAME, sub_keys, num_heads, k, key_dim)
        choose(_NAME, "pairs", pairs, ("drop", "carry", "wrap"))
        choose(_NAME, "scale", scale, ("norm", "paper", "code"))
        choose(_NAME, "per_sequence", per_sequence, (None, False, True))
        # the z-score needs two features; a lookahead must leave pairs in a chunk
        for name, value, low in (
            ("dim", dim, 1),
            ("value_dim", value_dim, 2),
            ("lookahead", lookahead, 0),
            ("chunk", chunk, lookahead + 1),
        ):
            check_size(_NAME, name, value, low)
        rates = value_rate, key_rate, epsilon
        options = check_options(_NAME, k, chunk, lookahead, pairs, scale, *rates, detach_every, mse_to_keys)
        self.dim, self.num_heads, self.k, self.num_slots = dim, num_heads, k, sub_keys**2
        self.gated_writes, self.per_sequence = gated_writes, per_sequence
        self.options: dict[str, Any] = {name: x for name, x in vars(options).items() if name != "update"}
        self.query_norm, self.value_norm, self.gate_norm = (nn.RMSNorm(dim, eps=1e-5) for _ in range(3))
        self.Wq = nn.Linear(dim, num_heads * key_dim)
        self.Wv = nn.Linear(dim, value_dim)
        self.Wgate = nn.Linear(dim, 1)
        self.output_norm = nn.RMSNorm(value_dim, eps=1e-5)
        self.Wo = nn.Linear(value_dim, dim)
        self.keys: Tensor
        self.values: Tensor
        self.register_buffer("keys", torch.empty(num_heads, 2, sub_keys, key_dim // 2))
        self.register_buffer("values", torch.empty(self.num_slots, value_dim))
        # what the last training call reached: a state, or keys, written slots and their rows
        self._reached: FwPKMState | tuple[Tensor, Tensor, Tensor] | None = None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw keys U(+-1/sqrt(key_dim)), values N(0, 1/D) and the linears' weights N(0, 0.02^2); biases are 0."""
        bound = (2 * self.keys.shape[-1]) ** -0.5
        self.keys.uniform_(-bound, bound)
        self.values.normal_(std=self.values.shape[1] ** -0.5)
        for linear in (self.Wq, self.Wv, self.Wgate, self.Wo):
            linear.weight.normal_(std=0.02)
            linear.bias.zero_()

    def new_state(self) -> FwPKMState:
        """Return a state before the first token, over the layer's fast weights."""
        return FwPKMState(self.keys, self.values, per_sequence=self._starts_apart())

    def _starts_apart(self) -> bool:
        return not self.training if self.per_sequence is None else self.per_sequence

    def forward(
        self,
        x: Tensor,
        state: FwPKMState | None = None,
        *,
        update: bool = True,
        mask: Tensor | None = None,
        return_state: bool = True,
    ) -> tuple[Tensor, FwPKMState | None]:
        """Return (y [B, T, dim], the state after it).

        Parameters
        ----------
        x : Tensor [B, T, dim]
        state : FwPKMState or None
            What the previous call returned, left as it is; None: a new one over the layer's fast weights.
        update : bool
            Whether complete chunks write. False reads only.
        mask : Tensor bool [B, T] or None
            False for tokens that neither write nor count.
        return_state : bool
            False: None in the state's place. A call without a state then makes none: it copies no table, and is a
            single op of a graph under torch.compile.

        Raises
        ------
        ShapeError, DtypeError
            For an x or a state of another layer or batch.
        """
        check_vectors(_NAME, x, self.dim, self.Wq.weight)
        _check_state(state)
        queries, values = self.queries(x), self.targets(x)
        with plain_precision(x):
            gates = widen(self.Wgate(self.gate_norm(x)))[..., 0].sigmoid()
            writes = gates if self.gated_writes else torch.ones_like(gates)
            if state is None and not return_state:
                read, after = self._stream_without_state(queries, values, writes, update, mask), None
            else:
                read, after = self._stream(queries, values, writes, state, update, mask)
            mixed = gates[..., None] * read + (1 - gates[..., None]) * values
            mixed = F.rms_norm(mixed, mixed.shape[-1:], widen(self.output_norm.weight), 1e-5)
        return self.Wo(mixed.to(x.dtype)), after if return_state else None

    @torch.compiler.disable  # a state is a Python object: a compiled graph breaks here, and only here
    def _stream(
        self,
        queries: Tensor,
        values: Tensor,
        gates: Tensor,
        state: FwPKMState | None,
        update: bool,
        mask: Tensor | None,
    ) -> tuple[Tensor, FwPKMState]:
        """Return what the tokens retrieve and the state after them, which `adopt` will find after training calls."""
        start = self.new_state() if state is None else state
        read, after = fwpkm(queries, values, gates, start, update=update, mask=mask, **self.options)
        if state is None and self.training and update and not after.per_sequence:
            self._reached = after
        return read, after

    def _stream_without_state(
        self, queries: Tensor, values: Tensor, gates: Tensor, update: bool, mask: Tensor | None
    ) -> Tensor:
        """Return what `_stream` retrieves from the layer's fast weights; tensors alone, so that a graph can hold it."""
        apart = self._starts_apart()
        read, end = stream_without_state(
            _NAME, (queries, values, gates), (self.keys, self.values), mask, {**self.options, "update": update}, apart
        )
        if self.training and update and end is not None:
            self._reached = end
        return read

    def queries(self, x: Tensor) -> Tensor:
        """Return the queries [B, T, H, key_dim], float32 (float64 for float64)."""
        return widen(self.Wq(self.query_norm(x))).unflatten(-1, (self.num_heads, -1))

    def targets(self, x: Tensor) -> Tensor:
        """Return v [B, T, D]: what a token writes, and what its residual value is; normalised over its features."""
        values = widen(self.Wv(self.value_norm(x)))
        with plain_precision(x):
            centred = values - values.mean(-1, keepdim=True)
            # the deviation's divisor is D - 1; Tensor.std warns where there is no token
            variance = centred.square().sum(-1, keepdim=True) / (values.shape[-1] - 1)
            return centred / (variance.sqrt() + 1e-6)

    def addresses(self, x: Tensor, state: FwPKMState | None = None) -> tuple[Tensor, Tensor]:
        """Return the weights and slots [B, T, H, k] that x reads with the keys of `state`, for usage statistics."""
        check_vectors(_NAME, x, self.dim, self.Wq.weight)
        _check_state(state)
        queries, epsilon = self.queries(x), self.options["epsilon"]
        keys: Any = self.keys
        if state is not None:
            self._check_fits(state)
            # before a first call there are no sequences: all will begin with the same keys
            keys = state.start_keys if state.per_sequence and state.batch is None else state.keys
            keys = torch.as_tensor(keys, device=queries.device)
        if keys.ndim == 4:
            return idw_product_key_topk(queries, keys, self.k, epsilon=epsilon)
        if len(keys) != len(queries):
            fix = "pass the state of these sequences"
            raise ShapeError(
                message(_NAME, "x", f"B = {len(keys)}, the sequences of the state", str(len(queries)), fix)
            )
        found = [idw_product_key_topk(queries[:0], self.keys, self.k, epsilon=epsilon)]  # gives B = 0 its shape
        found += [idw_product_key_topk(q[None], own, self.k, epsilon=epsilon) for q, own in zip(queries, keys)]
        weights, slots = zip(*found)
        return torch.cat(weights), torch.cat(slots)

    def adopt(self, state: FwPKMState | None = None) -> None:
        """Make the fast weights of `state` those that later calls start from; without one, of the last training call.

        That is the last call in training mode that began without a state, and had one set of fast weights for its
        batch; without such a call nothing changes. To be called after the backward pass: until then checkpointing
        may run the forward again, from the fast weights it began with.
        """
        _check_state(state)
        reached = self._reached if state is None else state
        if reached is None:
            return
        # new tensors, not copies into the old ones: a graph may still need those
        if isinstance(reached, tuple):
            keys, slots, rows = reached
            self.keys, self.values = keys.to(self.keys), self.values.index_copy(0, slots.long(), rows.to(self.values))
            self._reached = None
            return
        state = reached
        self._check_fits(state)
        if state.per_sequence:
            fix = "pass a state with per_sequence=False"
            raise ValueRangeError(message(_NAME, "state", "one set of fast weights", "one per sequence", fix))
        self.keys, self.values = (
            torch.as_tensor(state.keys).to(self.keys),
            torch.as_tensor(state.values).to(self.values),
        )
        self._reached = None

    def _check_fits(self, state: FwPKMState) -> None:
        wanted = (tuple(self.keys.shape), tuple(self.values.shape))
        if state.lane_shapes() != wanted:
            expected = f"keys and values {wanted[0]} and {wanted[1]}"
            got = "{} and {}".format(*state.lane_shapes())
            raise ShapeError(message(_NAME, "state", expected, got, "pass a state of this layer"))

    def __getstate__(self) -> dict[str, Any]:
        # a state stays in its process; what the last call reached is of use to this layer alone
        return {**self.__dict__, "_reached": None}

    def _apply(self, fn: Any, recurse: bool = True) -> nn.Module:
        """Keep the fast weights wide where the module becomes bfloat16 or float16: many small writes add up in them."""
        before = self.keys, self.values
        super()._apply(fn, recurse)
        if self.keys.dtype in (torch.bfloat16, torch.float16):
            device = self.keys.device
            self.keys, self.values = (x.to(device, torch.promote_types(x.dtype, torch.float32)) for x in before)
        return self

    def flops_per_token(self, context: int = 0) -> dict[str, int]:
        """Return multiply-adds times two per token, {"memory"}.

        Projections, sub-key distances, the rows read, and the write's share: those rows read again and changed, and
        the chosen sub-keys moved.
        """
        products = sum(linear.weight.numel() for linear in (self.Wq, self.Wv, self.Wgate, self.Wo))
        rows = self.num_heads * self.k * self.values.shape[1]
        moved = 2 * self.num_heads * min(self.k, self.keys.shape[2]) * self.keys.shape[3]
        return {"memory": 2 * (products + self.keys.numel() + 3 * rows + moved)}

    def state_access(self) -> int:
        """Return the elements of the table that a token reads, H k D."""
        return self.num_heads * self.k * self.values.shape[1]

    def state_elements(self, context: int = 0) -> int:
        """Return the elements of one set of fast weights and of a full open chunk."""
        open_tokens = (self.options["chunk"] - 1) * (self.Wq.out_features + self.values.shape[1] + 1)
        return self.keys.numel() + self.values.numel() + open_tokens


def _check_state(state: Any) -> None:
    if state is not None and not isinstance(state, FwPKMState):
        fix = "pass what the previous call returned, or None"
        raise DtypeError(message(_NAME, "state", "an FwPKMState", type(state).__name__, fix))


def carry_fast_weights(model: nn.Module) -> None:
    """Let each FwPKM of a model go on, in its next call, from the fast weights that its last training call reached.

    For after the optimiser's step. Training then runs through one long stream, as published; the state is cut from
    the graph between steps, and is part of the state dict.
    """
    for module in model.modules():
        if isinstance(module, FwPKM):
            module.adopt()
