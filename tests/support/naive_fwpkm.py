"""Fast-weight PKM as its definition reads, in torch: all n^2 slots, local losses differentiated by autograd.

Nothing here is shared with the library: the write is the gradient of the local losses, taken with
``create_graph=True`` so that slow gradients flow through it. Float64 is meant.
"""

from __future__ import annotations

import torch


def read(q, keys, values, k, epsilon):
    """Return (retrieved [n, D], weights [n, H, k], slots, half scores [n, H, 2, m]) of q [n, H, dk]."""
    n, heads = len(q), keys.shape[0]
    halves = q.view(n, heads, 2, 1, -1)
    scores = -((halves - keys).square().sum(-1) + epsilon).log()
    sums = (scores[:, :, 0, :, None] + scores[:, :, 1, None, :]).flatten(2)
    slots = sums.detach().sort(dim=-1, descending=True, stable=True).indices[..., :k].sort(-1).values
    weights = sums.gather(-1, slots).flatten(1).softmax(-1).view(n, heads, k)
    return (weights[..., None] * values[slots]).sum((1, 2)), weights, slots, scores


def memory_loss(retrieved, targets, gates, factor):
    """Return sum of 1/2 c g |target - retrieved|^2."""
    return 0.5 * (factor * gates * (targets - retrieved).square().sum(-1)).sum()


def address_loss(scores, k):
    """Return sum over heads, halves and sub-keys of p log(p + e), P restricted to each half's own k nearest."""
    kept = scores.detach().sort(dim=-1, descending=True, stable=True).indices[..., :k]
    chosen = scores.gather(-1, kept).softmax(-1)
    marginal = torch.zeros_like(scores).scatter(-1, kept, chosen).mean(0)
    return (marginal * (marginal + 1e-8).log()).sum()


def step_factor(weights, scale):
    flat = weights.flatten(1)
    if scale == "norm":
        return 1 / flat.square().sum(-1)
    return torch.full_like(flat[:, 0], 1 if scale == "paper" else flat.shape[1])


def write(
    q,
    v,
    g,
    mask,
    carried,
    keys,
    values,
    *,
    k,
    lookahead,
    pairs,
    scale,
    value_rate,
    key_rate,
    epsilon,
    mse_to_keys=False,
):
    """Return keys and values after one chunk; q [P, C, H, dk], v [P, C, D], g, mask [P, C].

    `carried` is (q, g, mask) of the chunk before, or None. Gradients of the slow inputs flow through everything but
    counts and addresses.
    """
    (P, C), L = g.shape, lookahead
    sources = [(q[p, t], g[p, t], v[p, t + L]) for p in range(P) for t in range(C - L) if mask[p, t] and mask[p, t + L]]
    if pairs == "wrap":
        late = [(p, C - L + i, i) for p in range(P) for i in range(L)]
        sources += [(q[p, t], g[p, t], v[p, i]) for p, t, i in late if mask[p, t] and mask[p, i]]
    extra = []
    if pairs == "carry" and carried is not None:
        cq, cg, cm = carried
        n = cg.shape[1]  # the last carried token stands right before this chunk's first
        late = [(p, i, i - n + L) for p in range(P) for i in range(n) if i - n + L < C]
        extra = [(cq[p, i], cg[p, i], v[p, t]) for p, i, t in late if cm[p, i] and mask[p, t]]
    sources += extra
    valid = q[mask]
    new_values, new_keys = values, keys
    if sources:
        sq, sg, target = (torch.stack(x) for x in zip(*sources))
        # the loss is differentiated with respect to the table alone: weights are held, but keep their slow graph
        leaf = values if values.requires_grad else values.clone().requires_grad_()
        table = leaf * 1
        _, weights, slots, _ = read(sq, keys, table, k, epsilon)
        retrieved = (weights[..., None] * table[slots]).sum((1, 2))
        loss = value_rate * memory_loss(retrieved, target, sg, step_factor(weights, scale))
        (gradient,) = torch.autograd.grad(loss, table, create_graph=True)
        counted = torch.cat([valid, torch.stack([x[0] for x in extra])]) if extra else valid
        counts = torch.bincount(read(counted, keys, table, k, epsilon)[2].flatten(), minlength=len(values))
        new_values = values - gradient / counts.clamp(min=1)[:, None]
    if len(valid) and key_rate:
        table = keys * 1 if keys.requires_grad else keys.clone().requires_grad_() * 1
        loss = address_loss(read(valid, table, values, k, epsilon)[3], min(k, keys.shape[2]))
        if mse_to_keys and sources:
            # through the weights alone: the step factor is that of the entry keys, held like the gate
            loss = loss + memory_loss(read(sq, table, values, k, epsilon)[0], target, sg, step_factor(weights, scale))
        (gradient,) = torch.autograd.grad(key_rate * loss, table, create_graph=True)
        new_keys = keys - gradient
    return new_keys, new_values


def stream(q, v, g, mask, keys, values, *, chunk, detach_every=None, **options):
    """Return (retrieved [P, T, D], keys, values) of a whole stream; the tail chunk is read only."""
    k, epsilon, L = options["k"], options["epsilon"], options["lookahead"]
    outputs, carried, T = [], None, q.shape[1]
    for number, start in enumerate(range(0, T, chunk)):
        part = slice(start, min(start + chunk, T))
        if detach_every and number and number % detach_every == 0:
            keys, values = keys.detach(), values.detach()
        pieces = [read(q[p, part], keys, values, k, epsilon)[0] for p in range(len(q))]
        outputs.append(torch.stack(pieces))
        if start + chunk <= T:
            new = write(q[:, part], v[:, part], g[:, part], mask[:, part], carried, keys, values, **options)
            tail = slice(start + chunk - L, start + chunk)
            carried, (keys, values) = (q[:, tail], g[:, tail], mask[:, tail]), new
    return torch.cat(outputs, 1), keys, values
