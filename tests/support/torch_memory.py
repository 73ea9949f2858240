"""A small model over the public ops, and cases as torch tensors, for the tests of the torch bridge."""

from __future__ import annotations

import functools

import torch

import sdm_lite

FLOATS = ("values", "write_weights", "log_decay", "beta", "read_weights", "state")


class Memory(torch.nn.Module):
    """Scores, slots, gates and values from one projection, then one sparse delta rule; a learned initial memory."""

    def __init__(self, dim: int = 6, heads: int = 2, columns: int = 4, k: int = 3, *, backend: str = "reference"):
        super().__init__()
        torch.manual_seed(0)
        width = dim // heads
        self.sizes = [2 * columns, 2 * columns, width, 1, 1]
        self.heads, self.k, self.backend = heads, k, backend
        self.project = torch.nn.Linear(dim, heads * sum(self.sizes))
        self.memory = torch.nn.Parameter(0.5 * torch.randn(heads, columns**2, width))

    def forward(self, x, *, final: bool = False):
        split = self.project(x).unflatten(-1, (self.heads, -1)).split(self.sizes, dim=-1)
        write_scores, read_scores, values, decay, beta = split
        write_weights, write_slots = self.select(write_scores)
        read_weights, read_slots = self.select(read_scores)
        readings, state = sdm_lite.sparse_delta_rule(
            values,
            write_slots,
            write_weights,
            -torch.nn.functional.softplus(decay.squeeze(-1)),
            beta.squeeze(-1).sigmoid(),
            read_slots,
            read_weights,
            self.memory,
            output_final_state=final,
            backend=self.backend,
        )
        return (readings.flatten(-2), state) if final else readings.flatten(-2)

    def select(self, scores):
        values, slots = sdm_lite.product_key_topk(scores, self.k, backend=self.backend)
        return values.softmax(-1), slots


def tensors(case, *, dtype=torch.float32, state_dtype=None, grad: bool = True) -> dict[str, torch.Tensor]:
    """Return a case's arrays as named leaf tensors, `state` in a dtype of its own; None entries are dropped."""
    named = {**case.inputs._asdict(), "state": case.state}
    found = {name: torch.tensor(x) for name, x in named.items() if x is not None}
    for name in FLOATS:
        wanted = state_dtype if name == "state" and state_dtype is not None else dtype
        found[name] = found[name].to(wanted).requires_grad_(grad)
    return found


def call(op, named: dict[str, torch.Tensor], **options):
    """Call a public sparse delta op with what :func:`tensors` returns; a decay per head is [B, T, H] there."""
    named = dict(named)
    if named["log_decay"].shape[-1] == 1 != named["write_slots"].shape[-1]:
        named["log_decay"] = named["log_decay"][..., 0]
    cu_seqlens = named.pop("cu_seqlens", None)
    return op(**_state_named(op, named), cu_seqlens=cu_seqlens, **options)


def _state_named(op, named):
    if getattr(op, "__name__", "") != "sparse_delta_rule_":
        named["initial_state"] = named.pop("state")
    return named


rule = functools.partial(call, sdm_lite.sparse_delta_rule)
rule_ = functools.partial(call, sdm_lite.sparse_delta_rule_)


def gradients(loss: torch.Tensor, leaves, **options) -> list[torch.Tensor]:
    """Return d loss / d leaf for each leaf."""
    return list(torch.autograd.grad(loss, list(leaves), **options))


def same_bits(got, want) -> bool:
    """Return whether two lists of tensors agree in dtype, shape and every bit."""
    pairs = list(zip(got, want, strict=True))
    return all(a.dtype == b.dtype and a.shape == b.shape and bytes(_raw(a)) == bytes(_raw(b)) for a, b in pairs)


def _raw(x: torch.Tensor):
    return x.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def upstream(case, dtype=torch.float32, state_dtype=None):
    """The case's gradients of readings and final state."""
    return torch.tensor(case.dreadings).to(dtype), torch.tensor(case.dfinal).to(state_dtype or dtype)


def leaves_of(named):
    return [named[name] for name in FLOATS]
