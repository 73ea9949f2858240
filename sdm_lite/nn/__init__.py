"""Torch layers: the sparse delta memory, its baselines, and a small language model made of them."""

from importlib.util import find_spec as _find_spec

from ..errors import BackendError, message

if _find_spec("torch") is None:
    raise BackendError(
        message("sdm_lite.nn", "import", "torch", "none installed", "install the extra: sdm-lite[torch]")
    )

from .accounting import flops_per_token, parameter_counts, state_elements
from .attention import FullAttention, SlidingWindowAttention
from .cache import CacheMark, HybridState
from .fwpkm_layer import FwPKM, carry_fast_weights
from .gated_delta_net import GatedDeltaNet, gated_delta_rule
from .generate import generate, stream_tokens
from .groups import clip_gradients, hidden_matrices, parameter_groups, value_tables
from .hybrid_lm import SMALL_MODEL_OPTIONS, HybridLM
from .product_key_memory import ProductKeyMemory
from .short_conv import GatedShortConv, ShortConv
from .sparse_delta_memory import SparseDeltaMemory
from .state import MixerState
from .usage import SlotUsage, UsageReport

__all__ = [
    "SMALL_MODEL_OPTIONS",
    "CacheMark",
    "FullAttention",
    "FwPKM",
    "GatedDeltaNet",
    "GatedShortConv",
    "HybridLM",
    "HybridState",
    "MixerState",
    "ProductKeyMemory",
    "ShortConv",
    "SlidingWindowAttention",
    "SlotUsage",
    "SparseDeltaMemory",
    "UsageReport",
    "carry_fast_weights",
    "clip_gradients",
    "flops_per_token",
    "gated_delta_rule",
    "generate",
    "hidden_matrices",
    "parameter_counts",
    "parameter_groups",
    "state_elements",
    "stream_tokens",
    "value_tables",
]
