"""Plain torch forms of what sdm_lite.nn computes, token by token, for autograd in float64: the layers' oracle."""

import math

import torch
import torch.nn.functional as F


def product_key_topk(scores, k, widths):
    """The k best of all N sums, ties to the lower slot, in ascending order of slots."""
    sums, *rest = scores.split(list(widths), -1)
    for part in rest:
        sums = (sums[..., :, None] + part[..., None, :]).flatten(-2)
    slots = sums.sort(dim=-1, descending=True, stable=True).indices[..., :k].sort(-1).values
    return sums.gather(-1, slots), slots


def sparse_delta_rule(values, write_slots, k, log_decay, beta, read_slots, q, state, rule="shared"):
    """Section 4 as it is written, out of place; state [H, N, D] or [B, H, N, D]."""
    B, T, H, D = values.shape
    memory = state.expand(B, *state.shape[-3:]).clone()
    log_decay = log_decay[..., None] if log_decay.ndim == 3 else log_decay
    readings = []
    for t in range(T):
        where = write_slots[:, t].long()[..., None].expand(-1, -1, -1, D)
        rows = memory.gather(2, where) * log_decay[:, t].exp()[..., None]
        weight, strength, value = k[:, t][..., None], beta[:, t][..., None, None], values[:, t][:, :, None]
        if rule == "shared":
            rows = rows + weight * strength * (value - (weight * rows).sum(2, keepdim=True))
        else:
            rows = rows + weight * strength * (value - rows)
        memory = memory.scatter(2, where, rows)
        where = read_slots[:, t].long()[..., None].expand(-1, -1, -1, D)
        readings.append((q[:, t][..., None] * memory.gather(2, where)).sum(2))
    return torch.stack(readings, 1) if T else values, memory


def gated_delta_rule(q, k, values, log_decay, beta, state):
    """The dense rule; q, k [B, T, H, d_k], values [B, T, H, d_v], state [B, H, d_k, d_v]."""
    readings = []
    for t in range(k.shape[1]):
        state = state * log_decay[:, t].exp()[..., None, None]
        delta = beta[:, t][..., None] * (values[:, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, t]))
        state = state + k[:, t][..., None] * delta[..., None, :]
        readings.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return torch.stack(readings, 1), state


def causal_conv(x, weight):
    """y[t, c] = sum_i weight[c, width - 1 - i] x[t - i, c]."""
    y, width = torch.zeros_like(x), weight.shape[-1]
    for t in range(x.shape[1]):
        for i in range(min(width, t + 1)):
            y[:, t] = y[:, t] + weight[:, 0, width - 1 - i] * x[:, t - i]
    return y


def rms(x, eps=1e-6):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def gates(layer, x):
    a = x @ layer.a_proj.weight.T + layer.a_proj.bias + layer.dt_bias
    log_decay = -layer.A_log.exp() * (1 + a.exp()).log()
    return log_decay, 1 / (1 + (-(x @ layer.b_proj.weight.T + layer.b_proj.bias)).exp())


def gated(readings, gate, kind):
    return readings * (gate.sigmoid() if kind is True else gate * gate.sigmoid()) if kind else readings


def sparse_layer(layer, x, select=product_key_topk, rule_loop=sparse_delta_rule):
    """What SparseDeltaMemory computes with product keys, from its parameters."""
    H = layer.num_heads

    def tap(name, y):
        return causal_conv(y, layer.convs[name].weight) if name in layer.convs else y

    def address(name, scores, k, scale):
        scores = tap(name, scores).unflatten(-1, (H, -1))
        if layer.score_norm == "rms":
            scores = torch.cat([rms(part) for part in scores.split(list(layer.factors), -1)], -1)
        best, slots = select(scores, k, layer.factors)
        return slots, torch.softmax(best if scale is None else best * scale[:, None], -1)

    read_slots, q = address("read", layer.Wq_read(x), layer.num_reads, layer.read_scale)
    write_slots, k = address("write", layer.Wk_write(x), layer.num_writes, layer.write_scale)
    values = tap("value", layer.Wv_write(x))
    values = values * values.sigmoid() if len(layer.convs) else values
    log_decay, beta = gates(layer, x)
    if layer.key_weighted_decay:
        log_decay = log_decay[..., None] * k
    if not layer.write:
        beta, log_decay = torch.zeros_like(beta), torch.zeros_like(log_decay)
    values = values.unflatten(-1, (H, -1))
    memory = layer.initial_memory()
    y, memory = rule_loop(values, write_slots, k, log_decay, beta, read_slots, q, memory, layer.rule)
    if isinstance(layer.readings_norm, torch.nn.RMSNorm):
        y = rms(y) * layer.readings_norm.weight
    elif isinstance(layer.readings_norm, torch.nn.LayerNorm):
        y = rms(y - y.mean(-1, keepdim=True)) * layer.readings_norm.weight
    y = y.flatten(2)
    return layer.Wo(gated(y, layer.Wog(x), layer.output_gate) if layer.output_gate else y), memory


def dense_layer(layer, x):
    """What GatedDeltaNet computes, from its parameters, with a zero state."""
    H = layer.num_heads

    def tap(name, y):
        return (causal_conv(y, layer.convs[name].weight) if name in layer.convs else y).unflatten(-1, (H, -1))

    q, k, v = tap("query", layer.q_proj(x)), tap("key", layer.k_proj(x)), tap("value", layer.v_proj(x))
    q, k = (y / y.norm(dim=-1, keepdim=True) for y in (q, k))
    v = v * v.sigmoid() if len(layer.convs) else v
    state = x.new_zeros(x.shape[0], H, k.shape[-1], v.shape[-1])
    y, state = gated_delta_rule(q, k, v, *gates(layer, x), state)
    y = (rms(y) * layer.o_norm.weight).flatten(2)
    return layer.o_proj(gated(y, layer.g_proj(x), layer.output_gate) if layer.output_gate else y), state


def attention_layer(layer, x):
    """Dense softmax attention with a band mask (all of the past without a window), and rotary positions."""
    B, T, d = x.shape[0], x.shape[1], layer.head_dim

    def heads(project):
        return project(x).view(B, T, -1, d).transpose(1, 2)

    def turn(y):
        half = d // 2
        pairs = torch.complex(y[..., :half].double(), y[..., half:].double())
        angle = torch.arange(T)[:, None] * 10000.0 ** (-torch.arange(half).double() / half)
        pairs = pairs * torch.polar(torch.ones_like(angle), angle)
        return torch.cat([pairs.real, pairs.imag], -1).to(y.dtype)

    q, k, v = heads(layer.q_proj), heads(layer.k_proj), heads(layer.v_proj)
    if layer.rope:
        q, k = turn(q), turn(k)
    k, v = (y.repeat_interleave(layer.num_heads // layer.num_kv_heads, 1) for y in (k, v))
    scores = q @ k.transpose(-1, -2) / math.sqrt(d)
    back = torch.arange(T)[:, None] - torch.arange(T)
    seen = (back >= 0) & (back < (layer.window or T + 1))
    y = F.softmax(scores.masked_fill(~seen, -torch.inf), -1) @ v
    return layer.o_proj(y.transpose(1, 2).flatten(2))
