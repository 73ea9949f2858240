"""One layer for every option of the torch mixers."""

from __future__ import annotations

from sdm_lite.nn import FullAttention, GatedDeltaNet, GatedShortConv, SlidingWindowAttention, SparseDeltaMemory

SIZES = {"slots_per_head": 16, "num_writes": 4, "num_reads": 5}
SDM_OPTIONS = {
    "plain": {},
    "heads": {"num_heads": 2},
    "per_slot": {"rule": "per_slot"},
    "key_weighted_decay": {"key_weighted_decay": True, "memory_init_std": 0.5},
    "zero_memory": {"learn_memory": False},
    "random_memory": {"memory_init_std": 0.5},
    "layer_norm": {"readings_norm": "layer"},
    "no_norm": {"readings_norm": None, "output_gate": True},
    "read_only": {"write": False, "memory_init_std": 0.5},
    "one_factor": {"factors": (16,)},
    "uneven_factors": {"factors": (2, 8)},
    "three_factors": {"factors": (2, 4, 2)},
    "conv_current": {"conv": 3, "conv_init": "current"},
    "stratified": {"decay_init": "stratified", "num_heads": 4},
    "recipe": {
        "conv": 4,
        "key_init": "shared",
        "score_norm": "rms",
        "score_scale": 1.0,
        "decay_init": "slow",
        "output_gate": "silu",
        "num_heads": 2,
    },
}
GDN_OPTIONS = {
    "plain": {},
    "heads": {"num_heads": 2, "output_gate": False},
    "recipe": {"conv": 4, "key_init": "shared", "decay_init": "slow"},
    "sigmoid_gate": {"output_gate": True, "decay_init": "stratified", "num_heads": 3, "conv": 2},
}
MIXERS = {
    **{f"sdm_{name}": (lambda o=options: SparseDeltaMemory(8, **SIZES, **o)) for name, options in SDM_OPTIONS.items()},
    "sdm_hash": lambda: SparseDeltaMemory(8, **SIZES, addressing="hash", num_heads=2),
    "sdm_snapshot": lambda: SparseDeltaMemory(8, **SIZES, restore="snapshot", snapshot_dtype="bf16"),
    "sdm_invert": lambda: SparseDeltaMemory(8, **SIZES, restore="invert"),
    **{
        f"gdn_{name}": (lambda o=options: GatedDeltaNet(8, head_k_dim=4, head_v_dim=6, chunk=4, **o))
        for name, options in GDN_OPTIONS.items()
    },
    "conv": lambda: GatedShortConv(8),
    "swa": lambda: SlidingWindowAttention(8, 4, 2, window=4),
    "full": lambda: FullAttention(8, 4, 2),
    "full_nope": lambda: FullAttention(8, 2, rope=False),
}
