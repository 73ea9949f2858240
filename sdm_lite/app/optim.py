"""Optimisers of a run, the learning rate as a function of progress, and their state as named tensors."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from ..nn import hidden_matrices, parameter_groups, value_tables
from .mistakes import mistake
from .muon import Muon
from .settings import Settings

#: what each optimiser keeps of a parameter: True where it has the parameter's shape, else one number
_ADAM = {"step": False, "exp_avg": True, "exp_avg_sq": True}
_KEPT = {"AdamW": _ADAM, "SparseAdam": _ADAM, "Muon": {"momentum_buffer": True}}
#: the name under which each group keeps its full learning rate
BASE_RATE = "base_rate"


def build_optimizers(settings: Settings, model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return Muon for the hidden matrices (where ``muon_rate`` > 0) and AdamW for everything else.

    Gains, biases and whatever the layers name (gates, initial memories) get no weight decay. Value tables have Adam
    on the rows with a gradient alone (SparseAdam), at their own rate: the moments of the other rows stay as they are.
    """
    hidden = hidden_matrices(model)[0] if settings.muon_rate > 0 else []
    chosen = set(map(id, hidden))
    groups = parameter_groups(model, settings.weight_decay)
    tables = groups.pop() if value_tables(model) else None
    for group in groups:
        group["params"] = [parameter for parameter in group["params"] if id(parameter) not in chosen]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW([g for g in groups if g["params"]], lr=settings.learning_rate, betas=(0.9, 0.95), fused=True)
    ]
    if hidden:
        optimizers.append(Muon(hidden, lr=settings.muon_rate, weight_decay=settings.weight_decay))
    if tables is not None:
        optimizers.append(torch.optim.SparseAdam(tables["params"], lr=tables["lr"], betas=(0.9, 0.95)))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group[BASE_RATE] = group["lr"]
    return optimizers


def rate_factor(step: int, progress: float, warmup: int, decay: float) -> float:
    """Return the share of the full learning rate for the step after `step` steps, at `progress` in [0, 1].

    Up over `warmup` steps, then 1 until the last `decay` of the run, then half a cosine down to 0. Before
    the fall it depends on `step` alone, so that a longer run begins with exactly the same steps.

    >>> [rate_factor(s, s / 4, warmup=0, decay=0.5) for s in range(4)]
    [1.0, 1.0, 1.0, 0.5]
    """
    factor = min(1.0, (step + 1) / warmup) if warmup > 0 else 1.0
    if is_decaying(progress, decay):
        factor *= 0.5 * (1.0 + math.cos(math.pi * (progress - (1.0 - decay)) / decay))
    return factor


def is_decaying(progress: float, decay: float) -> bool:
    """Return whether the learning rate falls at `progress`."""
    return decay > 0.0 and progress >= 1.0 - decay


def set_rate(optimizers: list[torch.optim.Optimizer], factor: float) -> None:
    """Give every group `factor` times its full learning rate."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group[BASE_RATE] * factor


def state_tensors(optimizers: list[torch.optim.Optimizer], model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the optimisers' state as flat named tensors: ``OPTIMIZER/PARAMETER/KEY``."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    flat = {}
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                flat[f"{type(optimizer).__name__}/{names[id(parameter)]}/{key}"] = torch.as_tensor(value)
    return flat


def load_state_tensors(
    command: str, optimizers: list[torch.optim.Optimizer], model: nn.Module, flat: dict[str, Any]
) -> None:
    """Put back what :func:`state_tensors` returned; CommandError when it belongs to other optimisers."""
    parameters = dict(model.named_parameters())
    by_name = {type(optimizer).__name__: optimizer for optimizer in optimizers}
    for path, value in flat.items():
        owner, _, rest = path.partition("/")
        name, _, key = rest.rpartition("/")
        parameter = parameters.get(name)
        whole = _KEPT.get(owner, {}).get(key)
        shape = parameter.shape if whole and parameter is not None else torch.Size([])
        together = all(f"{owner}/{name}/{other}" in flat for other in _KEPT.get(owner, {}))
        if owner not in by_name or parameter is None or whole is None or not together or value.shape != shape:
            got = f"state for {path} {tuple(value.shape)}"
            raise mistake(command, "optimizer state", "state of this model's parameters", got, "use another checkpoint")
        # SparseAdam counts its steps in an int: a tensor would make the bias correction float32
        counts = owner == "SparseAdam" and key == "step"
        by_name[owner].state[parameter][key] = int(value) if counts else value.clone()
