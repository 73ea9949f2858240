"""Short causal convolutions: the taps in front of a mixer, and the memoryless control layer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import ValueRangeError, message
from ..validate import check_shape
from .checks import check_vectors
from .gates import choose
from .ragged import last_columns
from .state import MixerState, wants_state

CONV_INITS = ("mix", "current")


def check_conv(op: str, conv: int | None, conv_init: str) -> None:
    """Raise ValueRangeError on a width or an initialisation that no short convolution has."""
    if conv is not None and not (isinstance(conv, int) and 2 <= conv <= 64):
        raise ValueRangeError(message(op, "conv", "None or a width of 2 to 64 taps", repr(conv), "pass None or 4"))
    choose(op, "conv_init", conv_init, CONV_INITS)


class ShortConv(nn.Module):
    """Causal depthwise convolution that can be continued where the last call stopped::

        y[t, c] = sum_i weight[c, 0, width - 1 - i] * x[t - i, c]

    Parameters
    ----------
    channels, width : int
    init : {"mix", "current"}
        Taps uniform in +-0.05, plus 0.7 on the current and 0.7 on the previous token ("mix": what a token
        writes then depends on the pair), or plus 1 on the current token alone.

    Examples
    --------
    >>> conv = ShortConv(2, 4)
    >>> y, taps = conv(torch.ones(1, 5, 2))
    >>> tuple(y.shape), tuple(taps.shape)
    ((1, 5, 2), (1, 3, 2))
    """

    def __init__(self, channels: int, width: int, init: str = "mix") -> None:
        super().__init__()
        check_conv("ShortConv", width, init)
        self.weight = nn.Parameter(torch.empty(channels, 1, width))
        with torch.no_grad():
            self.weight.uniform_(-0.05, 0.05)
            if init == "mix":
                self.weight[..., -2:] += 0.7
            else:
                self.weight[..., -1] += 1.0

    def forward(self, x: Tensor, taps: Tensor | None = None, lengths: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return y [B, T, channels] and the last width - 1 inputs; `taps` are those of the previous call.

        With `lengths` (int64 [B]) the inputs of a sequence end there; padding stands behind them.
        """
        channels, _, width = self.weight.shape
        check_vectors("ShortConv", x, channels, self.weight)
        if taps is not None:
            check_shape("ShortConv", "taps", taps, (x.shape[0], width - 1, channels), "[B, width - 1, channels]")
        if taps is None:
            taps = x.new_zeros(x.shape[0], width - 1, x.shape[-1])
        padded = torch.cat([taps.to(x.dtype), x], dim=1)
        if x.shape[1] == 0:
            return x, taps
        y = F.conv1d(padded.transpose(1, 2), self.weight, groups=self.weight.shape[0]).transpose(1, 2)
        if lengths is not None:
            return y, last_columns(padded, width - 1, x.shape[1] - lengths)
        return y, padded[:, padded.shape[1] - (width - 1) :]


def convolve(
    convs: nn.ModuleDict,
    name: str,
    x: Tensor,
    state: MixerState,
    taps: dict[str, Tensor],
    lengths: Tensor | None = None,
) -> Tensor:
    """Send `x` through the convolution `name` if there is one, continuing `state`; note its taps in `taps`."""
    if name not in convs:
        return x
    y, last = convs[name](x, state.taps.get(name), lengths)
    taps[name] = last
    return y


class GatedShortConv(nn.Module):
    """A gated short convolution: the control that mixes four tokens and remembers nothing else::

        y = Wo (silu(Wg x) * conv(Wv x))

    In the place of the global mixer it shows how much of a result the convolutions in front of a memory explain
    (on bytes of text at small budgets: all of it, see docs/layers.md). In front of a mixer it gives that mixer the
    previous token.

    Parameters
    ----------
    dim : int
    conv : int
        Taps.
    conv_init : {"mix", "current"}

    Examples
    --------
    >>> y, state = GatedShortConv(8)(torch.ones(2, 5, 8))
    >>> tuple(y.shape), state
    ((2, 5, 8), None)
    """

    def __init__(self, dim: int, *, conv: int = 4, conv_init: str = "mix") -> None:
        super().__init__()
        check_conv("GatedShortConv", conv, conv_init)
        self.v_proj = nn.Linear(dim, dim)
        self.g_proj = nn.Linear(dim, dim)
        self.o_proj = nn.Linear(dim, dim)
        self.convs = nn.ModuleDict({"value": ShortConv(dim, conv, conv_init)})
        for linear in (self.v_proj, self.g_proj, self.o_proj):
            nn.init.zeros_(linear.bias)

    def forward(
        self,
        x: Tensor,
        state: MixerState | None = None,
        *,
        return_state: bool | None = None,
        inplace: bool = False,
        lengths: Tensor | None = None,
    ) -> tuple[Tensor, MixerState | None]:
        """Return (y [B, T, dim], state); the arguments are those of :class:`SparseDeltaMemory`."""
        check_vectors("GatedShortConv", x, self.v_proj.in_features, self.v_proj.weight)
        hand_back = wants_state(self, x, state, return_state, inplace, taps=self.convs)
        state = MixerState() if state is None else state
        taps: dict[str, Tensor] = {}
        y = convolve(self.convs, "value", self.v_proj(x), state, taps, lengths)
        y = self.o_proj(F.silu(self.g_proj(x)) * y)
        return y, state.advanced(x.shape[1], None, taps, lengths) if hand_back else None

    def flops_per_token(self, context: int = 0) -> dict[str, int]:
        """Return multiply-adds times two per token: {"projections", "state"}."""
        return {"projections": 2 * sum(p.numel() for p in self.parameters() if p.ndim > 1), "state": 0}

    def state_elements(self, context: int = 0) -> int:
        """Return 0: only three taps are carried."""
        return 0
