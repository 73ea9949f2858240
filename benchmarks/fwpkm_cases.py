"""Fast-weight product keys against torch: inputs, parity, and the candidates of each comparison."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

import sdm_lite

from .parity import BACKWARD, FORWARD, check
from .peers import torch_fwpkm

#: ratios to reach: ours against torch's
TARGETS = {"retrieval": 5, "chunk": 10, "bag": 1, "bag dense": 1, "bag coalesced": 3}


@dataclass(frozen=True)
class Sizes:
    """One head: n = m * m slots of width D, queries of two halves of h, C tokens."""

    m: int = 512
    half: int = 256
    D: int = 512
    C: int = 512
    k: int = 8


def make_inputs(sizes: Sizes, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return queries, values, gates and a memory as it starts out, and bags of slots."""
    rng = np.random.default_rng(seed)
    width = 2 * sizes.half
    found = {
        "queries": 0.55 * rng.standard_normal((sizes.C, width)),
        "values": rng.standard_normal((sizes.C, sizes.D)),
        "gates": rng.uniform(0.2, 0.9, sizes.C),
        "keys": rng.uniform(-1, 1, (2, sizes.m, sizes.half)) / np.sqrt(width),
        "table": rng.standard_normal((sizes.m**2, sizes.D), dtype=np.float32) / np.sqrt(sizes.D),
        "weights": rng.dirichlet(np.ones(sizes.k), sizes.C),
        "upstream": rng.standard_normal((sizes.C, sizes.D)),
    }
    tensors = {name: torch.from_numpy(np.asarray(x, np.float32)) for name, x in found.items()}
    return tensors | {"slots": torch.from_numpy(rng.integers(0, sizes.m**2, (sizes.C, sizes.k)))}


def retrieval(x: dict[str, torch.Tensor], k: int) -> dict[str, Callable[[], object]]:
    """Return the candidates of the retrieval."""
    queries, keys = x["queries"][None, :, None], x["keys"][None]
    return {
        "ours": lambda: sdm_lite.idw_product_key_topk(queries, keys, k),
        "torch": lambda: torch_fwpkm.retrieve(x["queries"], x["keys"], k)[:2],
    }


def chunk(x: dict[str, torch.Tensor], sizes: Sizes) -> dict[str, Callable[[], object]]:
    """Return the candidates of one chunk's read and write; both go on from call to call."""
    state = sdm_lite.FwPKMState(x["keys"][None], x["table"])
    keys, table = x["keys"].clone(), x["table"].clone()
    call = x["queries"][None, :, None], x["values"][None], x["gates"][None]
    return {
        "ours": lambda: state.extend(*call, k=sizes.k, chunk=sizes.C)[0],
        "torch": lambda: torch_fwpkm.chunk(x["queries"], x["values"], x["gates"], keys, table, sizes.k),
    }


def bag(x: dict[str, torch.Tensor], *, gradient: str | None = None) -> dict[str, Callable[[], object]]:
    """Return the candidates of the weighted sums: forward, or forward + backward ("dense", "coalesced")."""
    table, weights = x["table"].clone(), x["weights"].clone()

    def ours() -> object:
        return sdm_lite.embedding_bag(table, x["slots"], weights, sparse_gradient=gradient == "coalesced")

    def torchs() -> object:
        return torch_fwpkm.bag(table, x["slots"], weights)

    if gradient is None:
        return {"ours": ours, "torch": torchs}
    leaves = [table.requires_grad_(), weights.requires_grad_()]

    def with_backward(forward: Callable) -> Callable[[], object]:
        return lambda: torch.autograd.grad(forward(), leaves, x["upstream"])

    return {"ours": with_backward(ours), "torch": with_backward(torchs)}


def check_all(sizes: Sizes) -> None:
    """Hold every candidate to torch's; raise AssertionError where they differ."""
    x = make_inputs(sizes, seed=1)
    both = retrieval(x, sizes.k)
    (weights, slots), (peer_weights, peer_slots) = both["ours"](), both["torch"]()
    order = peer_slots.argsort(-1)
    same = (slots[0, :, 0] == peer_slots.gather(1, order)).all(-1)
    # cdist's matrix product rounds otherwise, so a token may get another of two nearly equal slots
    if same.float().mean() < 0.98:
        raise AssertionError(f"parity, retrieval: only {same.float().mean():.1%} of the tokens have the same slots")
    check("retrieval", weights[0, :, 0][same], peer_weights.gather(1, order)[same], 1e-4)
    both = chunk(x, sizes)
    read, peer_read = both["ours"](), both["torch"]()
    check("chunk, readings", read[same], peer_read[same], 1e-4)
    # after one write: a token whose slots differ has written elsewhere, so most readings are compared, not all
    read, peer_read = both["ours"](), both["torch"]()
    error = (read - peer_read).abs().amax(1) / peer_read.abs().max()
    if (error < 1e-3).float().mean() < 0.9:
        raise AssertionError(f"parity, chunk: readings after a write differ by {error.median():.2g} at the median")
    both = bag(x)
    check("bag", both["ours"](), both["torch"](), FORWARD)
    for gradient in ("dense", "coalesced"):
        both = bag(x, gradient=gradient)
        for got, want in zip(both["ours"](), both["torch"](), strict=True):
            check(f"bag, {gradient}", got.to_dense().detach(), want, BACKWARD)
