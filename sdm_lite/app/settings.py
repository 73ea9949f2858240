"""What a run is made of: one frozen record, the presets, and what may change when a run is resumed."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from .arguments import LARGEST, LARGEST_SEED
from .mistakes import mistake

MIXERS = ("sdm", "gdn", "conv", "swa", "full")


@dataclass(frozen=True)
class Settings:
    """Everything that decides what a run computes, as it stands in a checkpoint's JSON.

    ``layers`` names the layers from below; "mixer" stands for the run's ``mixer``. Sizes are as in
    :class:`sdm_lite.nn.HybridLM`; ``slots``, ``writes`` and ``reads`` are N, W and R of an SDM layer,
    ``key_dim`` the key width per head of a GDN layer (2 sqrt(N) gives both the same key columns).
    ``memory`` places fast-weight and static product-key memories of ``sub_keys`` squared slots; the former write after
    every ``memory_chunk`` tokens and go on from step to step.
    Recall begins with the first number of ``pairs`` and adds the next after every ``grow_every`` steps.
    A run ends at ``steps`` optimiser steps or after ``seconds`` of training, whichever comes first;
    the learning rate rises over ``warmup`` steps and falls to zero, as half a cosine, over the last
    ``decay`` of the run.
    """

    task: str = "text"
    mixer: str = "sdm"
    seed: int = 0
    # model
    layers: tuple[str, ...] = ("swa", "swa", "mixer", "swa")
    dim: int = 128
    heads: int = 4
    kv_heads: int = 4
    window: int = 128
    hidden: int = 256
    slots: int = 1024
    writes: int = 32
    reads: int = 32
    mixer_heads: int = 1
    key_dim: int = 64
    learn_memory: bool = True
    score_scale: float = 1.0
    memory: tuple[str, ...] = ()
    sub_keys: int = 64
    memory_chunk: int = 128
    ngram_buckets: int = 8192
    tie_embeddings: bool = False
    # text
    data: str | None = None
    length: int = 512
    batch: int = 4
    long_documents: int = 24
    # recall
    pairs: tuple[int, ...] = (16, 32, 64, 128, 256)
    eval_pairs: tuple[int, ...] = (16, 32, 64, 128, 256, 512)
    eval_queries: int = 4096
    keys: int = 1024
    values: int = 128
    tokens: int = 3072
    max_rows: int = 32
    grow_every: int = 30
    # optimisation
    steps: int | None = 1000
    seconds: float | None = None
    warmup: int = 30
    decay: float = 0.5
    learning_rate: float = 4e-3
    muon_rate: float = 0.02
    weight_decay: float = 0.1
    clip: float = 1.0

    def to_json(self) -> dict[str, Any]:
        """Return the record as plain JSON values."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()}

    @classmethod
    def from_json(cls, command: str, stored: dict[str, Any]) -> Settings:
        """Return the record that :meth:`to_json` made; CommandError when a setting is missing."""
        names = [field.name for field in dataclasses.fields(cls)]
        missing = [name for name in names if name not in stored]
        if missing:
            got = f"none for {', '.join(missing)}"
            raise mistake(command, "settings", "a value for every setting", got, "start a new run")
        values: dict[str, Any] = {name: tuple(v) if isinstance(v := stored[name], list) else v for name in names}
        for field in dataclasses.fields(cls):
            value = values[field.name]
            emptied = value == () and field.default != ()
            if emptied or not _is_of(str(field.type), value):
                got = f"{value!r:.40}"
                raise mistake(command, f"setting {field.name}", str(field.type), got, "start a new run")
        return cls(**values)


def _is_of(kind: str, value: Any) -> bool:
    """Return whether `value` has the type of a setting, as its field names it."""
    if kind.startswith("tuple"):
        inner = int if "int" in kind else str
        return isinstance(value, tuple) and all(type(one) is inner for one in value)
    allowed = kind.split(" | ")
    return (
        type(value).__name__ in allowed
        or (value is None and "None" in allowed)
        or ("float" in allowed and type(value) is int)
    )


#: presets of `train`; "small" is used when none is named
TRAIN_PRESETS: dict[str, dict[str, Any]] = {
    "small": {},
    "demo": {"steps": 180},
    "tiny": {
        "dim": 32,
        "heads": 2,
        "kv_heads": 2,
        "window": 32,
        "hidden": 64,
        "slots": 64,
        "writes": 8,
        "reads": 8,
        "key_dim": 16,
        "ngram_buckets": 256,
        "sub_keys": 8,
        "memory_chunk": 16,
        "length": 64,
        "batch": 2,
        "steps": 20,
        "warmup": 5,
        "long_documents": 4,
    },
    "medium": {"dim": 256, "hidden": 512, "slots": 4096, "key_dim": 128, "length": 1024, "steps": 4000},
}

_RECALL = {
    "task": "recall",
    "layers": ("conv", "mixer"),
    "hidden": 0,
    "learn_memory": False,
    "ngram_buckets": 0,
    "tie_embeddings": True,
    "steps": 300,
    "decay": 1.0,
    "learning_rate": 1e-2,
    "muon_rate": 0.0,
    "weight_decay": 0.0,
}
#: presets of `recall`; "demo" is used when none is named
RECALL_PRESETS: dict[str, dict[str, Any]] = {
    "demo": _RECALL,
    # learns in seconds: what the tests hold to
    "tiny": {
        **_RECALL,
        "dim": 64,
        "slots": 256,
        "writes": 16,
        "reads": 16,
        "key_dim": 32,
        "pairs": (4, 8),
        "eval_pairs": (4, 8, 16),
        "eval_queries": 512,
        "keys": 64,
        "values": 16,
        "tokens": 768,
        "steps": 100,
        "warmup": 10,
        "grow_every": 20,
    },
}


def train_presets() -> dict[str, str]:
    """Return the presets of `train` in words."""
    found = {name: Settings(**values) for name, values in TRAIN_PRESETS.items()}
    return {
        name: f"dim {s.dim}, {s.slots:,} slots, windows of {s.length:,} bytes, {s.steps:,} steps"
        for name, s in found.items()
    }


def recall_presets() -> dict[str, str]:
    """Return the presets of `recall` in words."""
    found = {name: Settings(**values) for name, values in RECALL_PRESETS.items()}
    return {
        name: f"dim {s.dim}, {s.slots:,} slots, {min(s.pairs)} to {max(s.pairs)} pairs in training, {s.steps:,} steps"
        for name, s in found.items()
    }


#: settings that say when a run ends, not what it computes until then
ENDS = ("steps", "seconds")


def choose(command: str, presets: dict[str, dict[str, Any]], preset: str, given: dict[str, Any]) -> Settings:
    """Return the settings of `preset` with what the user gave on top; CommandError for an unknown preset."""
    if preset not in presets:
        raise mistake(command, "--preset", f"one of {', '.join(sorted(presets))}", repr(preset), "name one of these")
    given = dict(given)
    if given.get("seconds") is not None and "steps" not in given:
        given["steps"] = None  # a time limit alone: the preset's number of steps does not cut it short
    settings = Settings(**{**presets[preset], **given})
    _check(command, settings)
    return settings


#: settings that are whole numbers from 1, from 0, and finite numbers from 0
_FROM_ONE = "steps length batch dim slots writes reads window heads kv_heads mixer_heads key_dim keys values".split()
_FROM_ONE += "tokens max_rows eval_queries long_documents sub_keys memory_chunk".split()
_FROM_ZERO = "hidden ngram_buckets grow_every warmup".split()
_NUMBERS = "seconds learning_rate muon_rate weight_decay clip decay".split()


def _check(command: str, settings: Settings) -> None:
    """Raise CommandError, in the words of the command line, where the settings make no run."""

    def refuse(name: str, expected: str, got: Any, fix: str = "pass another number") -> None:
        raise mistake(command, f"--{name.replace('_', '-')}", expected, str(got), fix)

    for name in (*_FROM_ONE, *_FROM_ZERO):
        value, low = getattr(settings, name), int(name in _FROM_ONE)
        if value is not None and not low <= value <= LARGEST:
            refuse(name, f"{low} to {LARGEST}", value)
    unknown = set(settings.layers) - {"mixer", *MIXERS}
    if unknown or settings.mixer not in MIXERS or "mixer" not in settings.layers:
        expected = f"layers out of mixer, {', '.join(MIXERS)}"
        raise mistake(command, "setting layers", expected, str(settings.layers), "start a new run")
    for name in _NUMBERS:
        value, above = getattr(settings, name), name in ("seconds", "learning_rate", "clip")
        if value is not None and not (0 < value < math.inf or (value == 0 and not above)):
            refuse(name, f"a finite number {'above' if above else 'from'} 0", value)
    if not 0 <= settings.seed <= LARGEST_SEED:
        refuse("seed", f"0 to {LARGEST_SEED}", settings.seed)
    if min(settings.pairs + settings.eval_pairs) < 1 or max(settings.pairs + settings.eval_pairs) > settings.keys:
        most = max(settings.pairs + settings.eval_pairs)
        refuse("pairs", f"1 to {settings.keys}, the number of keys", most, "ask for fewer")
    side = math.isqrt(settings.slots)
    if side * side != settings.slots:
        refuse("slots", "a square number", settings.slots, f"pass {side**2} or {(side + 1) ** 2}")
    for name in ("writes", "reads"):
        if getattr(settings, name) > settings.slots:
            fix = f"lower --{name} or raise --slots"
            refuse(name, f"1 to {settings.slots}, the slots", getattr(settings, name), fix)
    part = math.lcm(2 * settings.heads, settings.mixer_heads)
    if settings.dim % part:
        fix = f"pass {max(1, settings.dim // part) * part} or {(settings.dim // part + 1) * part}"
        refuse("dim", f"a multiple of {part}, for {settings.heads} heads of an even width", settings.dim, fix)


def resume_settings(command: str, stored: dict[str, Any], wanted: dict[str, Any]) -> Settings:
    """Return the settings of a checkpoint, with what the user gave checked against them.

    Only `ENDS` may differ: they say when the run stops. Anything else that differs raises CommandError
    with both values.
    """
    values = vars(Settings.from_json(command, stored)).copy()
    for name, value in wanted.items():
        if name not in ENDS and values[name] != value:
            raise mistake(
                command,
                f"--resume with {name}",
                f"{values[name]!r}, as in the checkpoint",
                repr(value),
                "leave it out, or start a new run in another folder",
            )
    if wanted.get("seconds") is not None or wanted.get("steps") is not None:
        values.update({name: wanted.get(name) for name in ENDS})
    settings = Settings(**values)
    _check(command, settings)
    return settings
