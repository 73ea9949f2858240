"""Which optimiser settings a parameter gets."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

#: learning rate of value tables: a row gets a gradient only at the tokens that read it
VALUE_RATE = 1e-3


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return groups for a torch optimiser: parameters that decay, those that must not, and value tables, if any.

    No decay for vectors and scalars (biases, norm gains), and for what a module names in its class attribute
    `no_weight_decay`: decay gates, and initial memories, which would fade where no token touches them. Value tables
    (`value_tables`) have no decay for the same reason, and a learning rate of their own, 1e-3.

    Examples
    --------
    >>> import torch
    >>> decayed, kept = parameter_groups(nn.Linear(2, 3), 0.1)
    >>> [tuple(p.shape) for p in decayed["params"]], [tuple(p.shape) for p in kept["params"]]
    ([(3, 2)], [(3,)])
    >>> optimiser = torch.optim.AdamW([decayed, kept], lr=1e-3)
    """
    exempt = {id(parameter) for parameter in _named_by(model, "no_weight_decay")}
    tables = value_tables(model)
    apart = {id(parameter) for parameter in tables}
    decayed: list[nn.Parameter] = []
    kept: list[nn.Parameter] = []
    for parameter in model.parameters():
        if parameter.requires_grad and id(parameter) not in apart:
            (kept if parameter.ndim < 2 or id(parameter) in exempt else decayed).append(parameter)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": kept, "weight_decay": 0.0}]
    if tables:
        groups.append({"params": tables, "weight_decay": 0.0, "lr": VALUE_RATE})
    return groups


def value_tables(model: nn.Module) -> list[nn.Parameter]:
    """Return the trained value tables of a model, which its modules name in their class attribute `value_tables`."""
    return [parameter for parameter in _named_by(model, "value_tables") if parameter.requires_grad]


def _named_by(model: nn.Module, attribute: str) -> list[nn.Parameter]:
    found = {
        id(parameter): parameter
        for module in model.modules()
        for name in getattr(module, attribute, ())
        if isinstance(parameter := getattr(module, name, None), nn.Parameter)
    }
    return list(found.values())


@torch.no_grad()
def clip_gradients(model: nn.Module, max_norm: float, *, value_max_norm: float | None = None) -> tuple[float, float]:
    """Clip the gradients of the value tables and those of all other parameters, each as a group of its own.

    Together, the many rows of a table would set the scale of everything else. Sparse gradients are coalesced.

    Parameters
    ----------
    model : nn.Module
    max_norm, value_max_norm : float
        Largest norm of each group; None: the same for both.

    Returns
    -------
    norms : (float, float)
        Before clipping: of the other parameters, and of the value tables.

    Examples
    --------
    >>> layer = nn.Linear(1, 1, bias=False)
    >>> layer.weight.grad = torch.tensor([[3.0]])
    >>> clip_gradients(layer, 1.0), round(layer.weight.grad.item(), 4)
    ((3.0, 0.0), 1.0)
    """
    tables = value_tables(model)
    apart = {id(parameter) for parameter in tables}
    norm = nn.utils.clip_grad_norm_([p for p in model.parameters() if id(p) not in apart], max_norm)
    gradients = []
    for parameter in tables:
        if parameter.grad is not None:
            if parameter.grad.is_sparse:
                parameter.grad = parameter.grad.coalesce()
            gradients.append(parameter.grad._values() if parameter.grad.is_sparse else parameter.grad)
    limit = max_norm if value_max_norm is None else value_max_norm
    value_norm = nn.utils.get_total_norm(gradients) if gradients else torch.zeros(())
    for gradient in gradients:  # as clip_grad_norm_ has it
        gradient.mul_((limit / (value_norm + 1e-6)).clamp(max=1.0))
    return float(norm), float(value_norm)


def hidden_matrices(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return (the matrices inside a HybridLM's layers, for ``torch.optim.Muon``; all other parameters).

    Embeddings, the head, convolution taps, memories, value tables and the gates' one-row matrices are among the others.
    """
    tables = {id(parameter) for parameter in value_tables(model)}
    hidden: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        matrix = name.startswith("blocks.") and parameter.ndim == 2 and id(parameter) not in tables
        gate = name.endswith(("a_proj.weight", "b_proj.weight")) or parameter.shape[0] == 1
        if parameter.requires_grad:
            (hidden if matrix and not gate else rest).append(parameter)
    return hidden, rest
