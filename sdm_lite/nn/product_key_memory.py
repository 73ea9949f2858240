"""Static Product Key Memory: a large table of learned values, of which each token reads a few, in place of an MLP."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import ValueRangeError, message
from ..ops import product_key_topk
from ..product_key_memory import embedding_bag
from ..validate import whole_number
from .checks import check_vectors
from .gates import choose, plain_precision, widen
from .usage import SlotUsage

_NAME = "ProductKeyMemory"


class ProductKeyMemory(nn.Module):
    """A trained table of `sub_keys` ** 2 rows of values, H * k of which a token reads (docs/memory-layers.md)::

        q      = norm(Wq x + bq), per head in two halves          s_m = K_m q_m,   m = 1, 2
        m      = sum over heads and slots of w V[slot],           the k slots (i, j) of highest s_1[i] + s_2[j] a head
        y      = Wo (m * silu(Wg x + bg)) + bo                    with `gated`; else m, through Wo where D is not dim

    It has no state and writes nothing at run time; all of it is trained. In a :class:`HybridLM` it takes the MLP's
    place: ``memory=("pkm@2",)``.

    Parameters
    ----------
    dim : int
    sub_keys : int
        Keys per half; the table has S = sub_keys ** 2 rows.
    num_heads, k : int
        Read heads, and the slots that each of them reads.
    key_dim : int
        Width of a head's query, both halves together: even.
    value_dim : int or None
        Width D of a row; None: dim.
    weights : {"softmax", "relu"}
        Of a head's k slots: competing, or each on its own.
    query_norm : {"rms", "layer", None}
        RMSNorm over all heads' features together; LayerNorm of each half, its gain shared; or none.
    gated : bool
        The "+" form.
    scalar_gate : bool
        Also multiply y by sigmoid(w x + b).
    sparse_gradients : bool
        Give `values` a sparse gradient, of the rows read: for torch.optim.SparseAdam (docs/memory-layers.md).

    Attributes
    ----------
    usage : SlotUsage or None
        Set one, and each call adds the slots that it reads.

    Raises
    ------
    ValueRangeError
        On sizes that do not fit each other or an unknown choice.

    Examples
    --------
    >>> layer = ProductKeyMemory(8, sub_keys=4, num_heads=2, k=3, key_dim=6)
    >>> layer(torch.ones(1, 5, 8)).shape, tuple(layer.values.shape)
    (torch.Size([1, 5, 8]), (16, 8))
    """

    value_tables = ("values",)

    def __init__(
        self,
        dim: int,
        *,
        sub_keys: int = 512,
        num_heads: int = 4,
        k: int = 32,
        key_dim: int = 512,
        value_dim: int | None = None,
        weights: str = "softmax",
        query_norm: str | None = "rms",
        gated: bool = True,
        scalar_gate: bool = False,
        sparse_gradients: bool = False,
    ) -> None:
        super().__init__()
        check_table(_NAME, sub_keys, num_heads, k, key_dim)
        choose(_NAME, "weights", weights, ("softmax", "relu"))
        choose(_NAME, "query_norm", query_norm, ("rms", "layer", None))
        D = dim if value_dim is None else value_dim
        for name, size in (("dim", dim), ("value_dim", D)):
            check_size(_NAME, name, size)
        self.dim, self.num_heads, self.k, self.num_slots = dim, num_heads, k, sub_keys**2
        self.weights, self.sparse_gradients = weights, sparse_gradients
        self.usage: SlotUsage | None = None
        self.Wq = nn.Linear(dim, num_heads * key_dim)
        self.query_norm: nn.Module = nn.Identity()
        if query_norm == "rms":
            self.query_norm = nn.RMSNorm(num_heads * key_dim, eps=1e-6)
        elif query_norm == "layer":
            self.query_norm = nn.LayerNorm(key_dim // 2, eps=1e-5)
        self.keys = nn.Parameter(torch.empty(num_heads, 2, sub_keys, key_dim // 2))
        self.values = nn.Parameter(torch.empty(self.num_slots, D))
        self.Wg = nn.Linear(dim, D) if gated else None
        self.Wo = nn.Linear(D, dim) if gated or D != dim else None
        self.scalar_gate = nn.Linear(dim, 1) if scalar_gate else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the parameters: keys U(+-1/sqrt(key_dim)), values N(0, 1/D), Wq Xavier, Wo and Wg N(0, 1/dim)."""
        bound = (2 * self.keys.shape[-1]) ** -0.5
        self.keys.uniform_(-bound, bound)
        self.values.normal_(std=self.values.shape[1] ** -0.5)
        nn.init.xavier_uniform_(self.Wq.weight)
        for linear in (self.Wg, self.Wo):
            if linear is not None:
                linear.weight.normal_(std=self.dim**-0.5)
        for linear in (self.Wq, self.Wg, self.Wo):
            if linear is not None:
                linear.bias.zero_()

    def value_parameters(self) -> list[nn.Parameter]:
        """Return the value table, which has an optimiser group of its own (:func:`parameter_groups`)."""
        return [self.values]

    def other_parameters(self) -> list[nn.Parameter]:
        """Return all parameters but the value table."""
        return [parameter for parameter in self.parameters() if parameter is not self.values]

    def forward(self, x: Tensor) -> Tensor:
        """Return y [..., dim] of x [..., dim]."""
        check_vectors(_NAME, x, self.dim, self.Wq.weight, rank=None)
        weights, slots = self.addresses(x)
        if self.usage is not None:
            self.usage.add(slots)
        with plain_precision(x):
            # one bag per token: all heads read the one table
            read = embedding_bag(
                widen(self.values), slots.flatten(-2), weights.flatten(-2), sparse_gradient=self.sparse_gradients
            )
        y = read.to(x.dtype)
        if self.Wg is not None:
            y = y * F.silu(self.Wg(x))
        if self.Wo is not None:
            y = self.Wo(y)
        return y if self.scalar_gate is None else self.scalar_gate(x).sigmoid() * y

    def addresses(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights and the slots, int32 ascending, of x [..., dim]: both [..., H, k]."""
        queries = self.Wq(x)
        with plain_precision(x):
            if isinstance(self.query_norm, nn.RMSNorm):
                queries = self.query_norm(widen(queries))
            halves = widen(queries).unflatten(-1, (self.num_heads, 2, -1))
            if isinstance(self.query_norm, nn.LayerNorm):
                halves = self.query_norm(halves)
            scores = torch.einsum("...hmd,hmnd->...hmn", halves, widen(self.keys)).flatten(-2)
            selected, slots = product_key_topk(scores, self.k)
            return (selected.softmax(-1) if self.weights == "softmax" else selected.relu()), slots

    def flops_per_token(self, context: int = 0) -> dict[str, int]:
        """Return multiply-adds times two per token, {"memory"}: projections, sub-key scores and the rows read."""
        linears = (self.Wq, self.Wg, self.Wo, self.scalar_gate)
        products = sum(linear.weight.numel() for linear in linears if linear is not None)
        return {"memory": 2 * (products + self.keys.numel() + self.num_heads * self.k * self.values.shape[1])}


def check_size(op: str, name: str, size: Any, low: int = 1) -> None:
    """Raise unless `size` is a whole number of at least `low`."""
    if whole_number(op, name, size) < low:
        raise ValueRangeError(message(op, name, f"at least {low}", str(size), f"raise {name}"))


def check_table(op: str, sub_keys: Any, num_heads: Any, k: Any, key_dim: Any) -> None:
    """Raise ValueRangeError unless the sizes of a product-key table fit each other, DtypeError where one is no int."""
    for name, size in (("sub_keys", sub_keys), ("num_heads", num_heads)):
        check_size(op, name, size)
    if sub_keys**2 >= 2**31:
        expected, got = "fewer than 2^31 slots", f"{sub_keys} ** 2"
        raise ValueRangeError(message(op, "sub_keys", expected, got, "lower sub_keys"))
    if not 1 <= whole_number(op, "k", k) <= sub_keys**2:
        fix = "lower k or raise sub_keys"
        raise ValueRangeError(message(op, "k", f"1 to sub_keys ** 2 = {sub_keys**2} slots", str(k), fix))
    if whole_number(op, "key_dim", key_dim) < 2 or key_dim % 2:
        fix = "pass the width of both halves together"
        raise ValueRangeError(message(op, "key_dim", "an even number from 2", str(key_dim), fix))
