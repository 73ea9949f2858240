"""Named, seeded cases: what every room is tested on.

All numbers are drawn in float64 from (name of the case, seed) and then rounded, so the float32 and
the float64 form of a case differ by one rounding per number; use `Case.astype` to hold a float32
room against a float64 oracle on the very same numbers.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace

import numpy as np

from sdm_lite.reference.delta import encode_rows
from sdm_lite.rooms import DeltaInputs


@dataclass(frozen=True)
class DeltaFields:
    """Sizes and kinds of one sparse delta case.

    alpha: "typical" (about 0.95), "uniform" (0.3 to 1), "spikes" (typical, with 1e-4 now and then),
    "zero" (log_decay = 0), "wipe" (typical, with log_decay = -inf now and then).
    decay: "head" or "slot". order: "ascending" or "shuffled" slots within a token.
    lengths: lengths of packed sequences (then B is 1 and T their sum).
    """

    name: str
    B: int = 2
    T: int = 7
    H: int = 2
    N: int = 32
    D: int = 16
    W: int = 8
    R: int = 8
    alpha: str = "typical"
    decay: str = "head"
    order: str = "ascending"
    lengths: tuple[int, ...] | None = None
    shared_state: bool = False


@dataclass(frozen=True)
class Case:
    """A case's arrays in the rooms' canonical form; `state` is [S, H, N, D], or [H, N, D] where shared."""

    fields: DeltaFields
    inputs: DeltaInputs
    state: np.ndarray
    dreadings: np.ndarray
    dfinal: np.ndarray

    def astype(self, dtype) -> Case:
        """Return the same case in another float dtype."""
        slots = ("write_slots", "read_slots", "cu_seqlens")
        inputs = {n: a if n in slots else a.astype(dtype) for n, a in self.inputs._asdict().items()}
        return Case(
            self.fields, DeltaInputs(**inputs), *(a.astype(dtype) for a in (self.state, self.dreadings, self.dfinal))
        )

    def state_bits(self, state_dtype: str) -> np.ndarray:
        """Return the state rounded to a state dtype by its name; bfloat16 and float16 as uint16 bits."""
        return encode_rows(self.state, state_dtype)

    def arguments(self) -> tuple:
        """Return the public op's eight positional arguments: a decay per head is [B, T, H] there."""
        arrays = list(self.inputs[:7])
        if self.fields.decay == "head":
            arrays[3] = arrays[3][..., 0]
        return (*arrays, self.state)

    def token_range(self, start: int, stop: int) -> DeltaInputs:
        """Return tokens start..stop of every (unpacked) sequence, C-contiguous."""
        assert self.inputs.cu_seqlens is None
        return DeltaInputs(*(np.ascontiguousarray(a[:, start:stop]) for a in self.inputs[:7]))


#: small cases over odd sizes and gate extremes; each runs in well under a second in the reference room
DELTA_CASES = [
    DeltaFields("plain"),
    DeltaFields("no_tokens", T=0),
    DeltaFields("no_batch", B=0),
    DeltaFields("one_token", T=1, D=1, N=8, W=3, R=2),
    DeltaFields("one_of_each", B=1, T=7, H=1, N=1, D=1, W=1, R=1),
    DeltaFields("narrow_D3", D=3, N=20, W=5, R=7, order="shuffled"),
    DeltaFields("D17_slot_decay", T=9, D=17, N=24, W=7, R=3, decay="slot"),
    DeltaFields("D64_W64", B=1, T=12, H=1, N=256, D=64, W=64, R=64),
    DeltaFields("D100", B=1, T=9, D=100, N=40, W=9, R=11, order="shuffled", decay="slot"),
    DeltaFields("all_slots", T=11, N=8, W=8, R=8, D=5),
    DeltaFields("all_but_one", B=1, T=30, N=9, W=8, R=7, alpha="uniform"),
    DeltaFields("long", B=1, T=130, H=2, N=64, D=16, W=8, R=8),
    DeltaFields("long_uniform", B=1, T=130, H=1, N=48, D=16, W=8, R=8, alpha="uniform"),
    DeltaFields("long_slot_decay", B=1, T=130, H=1, N=48, D=8, W=8, R=8, decay="slot", alpha="uniform"),
    DeltaFields("spikes", B=1, T=130, H=1, N=32, D=16, alpha="spikes"),
    DeltaFields("spikes_slot", B=1, T=40, H=2, N=32, D=16, alpha="spikes", decay="slot", order="shuffled"),
    DeltaFields("no_decay", B=1, T=130, H=1, N=48, D=16, W=6, alpha="zero"),
    DeltaFields("no_decay_slot", T=20, alpha="zero", decay="slot"),
    DeltaFields("wipe", B=1, T=40, H=2, N=24, D=16, alpha="wipe"),
    DeltaFields("wipe_slot", B=1, T=40, H=1, N=24, D=3, alpha="wipe", decay="slot"),
    DeltaFields("shared_state", B=3, T=7, shared_state=True),
    DeltaFields("shared_no_batch", B=0, T=5, shared_state=True),
    DeltaFields("packed", H=2, lengths=(3, 0, 1, 7, 0), N=24, D=17),
    DeltaFields("packed_shared", H=1, lengths=(0, 5, 6), N=24, D=16, shared_state=True, decay="slot", order="shuffled"),
    DeltaFields("packed_empty", H=1, lengths=(0, 0), N=8, D=4, W=2, R=2),
]


def case_id(fields: DeltaFields) -> str:
    """Return the name, for pytest's `ids=`."""
    return fields.name


def make_case(name_or_fields: str | DeltaFields, seed: int = 0, dtype=np.float64, **changes) -> Case:
    """Return a case by its name in DELTA_CASES or by its fields, with some of them changed."""
    fields = name_or_fields
    if isinstance(fields, str):
        fields = next(known for known in DELTA_CASES if known.name == name_or_fields)
    fields = replace(fields, **changes)
    cu_seqlens, sequences = None, fields.B
    if fields.lengths is not None:
        fields = replace(fields, B=1, T=sum(fields.lengths))
        cu_seqlens = np.cumsum([0, *fields.lengths]).astype(np.int64)
        sequences = len(fields.lengths)
    rng = np.random.default_rng([zlib.crc32(fields.name.encode()), seed])
    tokens, table = (fields.B, fields.T, fields.H), (fields.H, fields.N, fields.D)
    write_weights = rng.standard_normal((*tokens, fields.W))
    write_weights /= np.linalg.norm(write_weights, axis=-1, keepdims=True)
    read_weights = np.exp(rng.standard_normal((*tokens, fields.R)))
    read_weights /= read_weights.sum(axis=-1, keepdims=True)
    inputs = DeltaInputs(
        values=rng.standard_normal((*tokens, fields.D)),
        write_slots=distinct_slots(rng, tokens, fields.W, fields.N, fields.order),
        write_weights=write_weights,
        log_decay=_log_decay(rng, fields, tokens),
        beta=rng.uniform(0.1, 0.9, tokens),
        read_slots=distinct_slots(rng, tokens, fields.R, fields.N, fields.order),
        read_weights=read_weights,
        cu_seqlens=cu_seqlens,
    )
    state = 0.1 * rng.standard_normal(table if fields.shared_state else (sequences, *table))
    dreadings = rng.standard_normal((*tokens, fields.D))
    dfinal = rng.standard_normal((sequences, *table))
    return Case(fields, inputs, state, dreadings, dfinal).astype(dtype)


def distinct_slots(rng, shape: tuple[int, ...], count: int, num_slots: int, order: str = "ascending") -> np.ndarray:
    """Return `count` distinct slots of [0, num_slots) for each cell of `shape`, int32 [*shape, count]."""
    slots = np.argsort(rng.random((*shape, num_slots)), axis=-1)[..., :count]
    return np.ascontiguousarray(np.sort(slots, axis=-1) if order == "ascending" else slots, dtype=np.int32)


def _log_decay(rng, fields: DeltaFields, tokens: tuple[int, ...]) -> np.ndarray:
    shape = (*tokens, fields.W if fields.decay == "slot" else 1)
    if fields.alpha == "zero":
        return np.zeros(shape)
    if fields.alpha == "uniform":
        return np.log(rng.uniform(0.3, 1.0, shape))
    log_decay = -np.log1p(np.exp(-(2.944 + 0.5 * rng.standard_normal(shape))))  # sigmoid(2.944) = 0.95
    if fields.alpha in ("spikes", "wipe"):
        hit = rng.random(shape) < 0.1
        hit.reshape(-1)[:1] = True  # small cases have one too
        log_decay[hit] = np.log(1e-4) if fields.alpha == "spikes" else -np.inf
    return log_decay


def make_scores(kind: str, rows: int, widths: tuple[int, ...], seed: int = 0, dtype=np.float32) -> np.ndarray:
    """Return scores [rows, sum(widths)] for the top-k.

    kind: "distinct" (no two slots' sums are equal: float64 and float32 order them alike), "ties"
    (few different values, as from bfloat16), "extreme" (ties, with NaN, +-inf and -0 scattered).
    """
    rng = np.random.default_rng([zlib.crc32(kind.encode()), seed, *widths])
    if kind == "distinct":
        # mixed-radix digits in a random order of columns: every sum is a different integer, exact in float32
        digits, step = [], 1
        for width in reversed(widths):
            digits.insert(0, step * np.argsort(rng.random((rows, width)), axis=1))
            step *= width
        assert step < 2**24
        return np.concatenate(digits, axis=1).astype(dtype)
    scores = np.round(2 * rng.standard_normal((rows, sum(widths)))) / 2
    if kind == "extreme":
        odd = rng.random(scores.shape) < 0.3
        scores[odd] = rng.choice([np.nan, np.inf, -np.inf, -0.0, 0.0], odd.sum())
    return scores.astype(dtype)
