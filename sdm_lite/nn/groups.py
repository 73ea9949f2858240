"""Which optimiser settings a parameter gets."""

from __future__ import annotations

from typing import Any

from torch import nn


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return two groups for a torch optimiser: parameters that decay, and those that must not.

    No decay for vectors and scalars (biases, norm gains), and for what a module names in its class attribute
    `no_weight_decay`: decay gates, and initial memories, which would fade where no token touches them.

    Examples
    --------
    >>> import torch
    >>> decayed, kept = parameter_groups(nn.Linear(2, 3), 0.1)
    >>> [tuple(p.shape) for p in decayed["params"]], [tuple(p.shape) for p in kept["params"]]
    ([(3, 2)], [(3,)])
    >>> optimiser = torch.optim.AdamW([decayed, kept], lr=1e-3)
    """
    exempt = {
        id(getattr(module, name, None)) for module in model.modules() for name in getattr(module, "no_weight_decay", ())
    }
    decayed: list[nn.Parameter] = []
    kept: list[nn.Parameter] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            (kept if parameter.ndim < 2 or id(parameter) in exempt else decayed).append(parameter)
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": kept, "weight_decay": 0.0}]


def hidden_matrices(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return (the matrices inside a HybridLM's layers, for ``torch.optim.Muon``; all other parameters).

    Embeddings, the head, convolution taps, memories and the gates' one-row matrices are among the others.
    """
    hidden: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        matrix = name.startswith("blocks.") and parameter.ndim == 2
        gate = name.endswith(("a_proj.weight", "b_proj.weight"))
        if parameter.requires_grad:
            (hidden if matrix and not gate else rest).append(parameter)
    return hidden, rest
