"""Files of a `MemoryState`: exact resume, small differences, whole or not there, and refused where they are damaged."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import sys
import time
import tracemalloc

import numpy as np
import pytest
from cases import distinct_slots
from kills import kill_while_saving

import sdm_lite
from sdm_lite import FileError, FileFormatError, MemoryState, StateFull
from sdm_lite.memory_state import files

safetensors = pytest.importorskip("safetensors.numpy")
H, N, D = 2, 40, 8


def token(rng, batch=2, dtype=np.float32, slots=N):
    """Return the seven arrays of one step."""
    shape = (batch, H)
    return [
        rng.standard_normal((*shape, D)).astype(dtype),
        distinct_slots(rng, shape, 4, slots),
        rng.standard_normal((*shape, 4)).astype(dtype),
        -rng.exponential(0.1, shape).astype(dtype),
        rng.uniform(0, 1, shape).astype(dtype),
        distinct_slots(rng, shape, 4, slots),
        rng.standard_normal((*shape, 4)).astype(dtype),
    ]


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.fixture
def initial(rng):
    return rng.standard_normal((H, N, D)).astype(np.float32)


def written(initial, tokens=6, batch=2, seed=1):
    """Return a state after some tokens."""
    state, rng = MemoryState(initial, batch), np.random.default_rng(seed)
    for _ in range(tokens):
        state.step(*token(rng, batch, np.float32))
    return state


def equal(a, b):
    return np.array_equal(a.dense(), b.dense()) and a.tokens.tolist() == b.tokens.tolist()


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("rule", ["shared", "per_slot"])
def test_resume_is_bit_for_bit(rng, tmp_path, dtype, rule):
    torch = pytest.importorskip("torch")
    initial = torch.from_numpy(rng.standard_normal((H, N, D))).to(getattr(torch, dtype))
    state = MemoryState(initial, 2, rule=rule)
    calls = [[torch.from_numpy(a) for a in token(rng)] for _ in range(8)]
    for call in calls[:4]:
        state.step(*call)
    state.reorder([1, 1, 0])
    state.save(tmp_path / "state")
    loaded = MemoryState.load(tmp_path / "state", initial=initial)
    assert loaded.rule == rule and loaded.dtype == dtype
    assert torch.equal(loaded.dense(), state.dense()) and loaded.tokens.tolist() == [4, 4, 4]
    state.evict([2])
    loaded.evict([2])
    for call in calls[4:]:
        assert torch.equal(state.step(*call), loaded.step(*call))
    assert torch.equal(loaded.dense(), state.dense())


def test_a_file_holds_the_rows_owned_and_nothing_else(initial, tmp_path):
    state = written(initial, tokens=3)
    state.reorder([0, 0, 0, 0])  # shared rows are stored once
    state.save(tmp_path / "state")
    owned = state.nbytes().owned
    assert owned < (tmp_path / "state").stat().st_size < owned + 4096
    loaded = MemoryState.load(tmp_path / "state", initial=initial)
    assert equal(loaded, state) and loaded.nbytes() == state.nbytes()


def test_a_base_leaves_only_what_has_changed(initial, tmp_path):
    state, rng = written(initial, tokens=9), np.random.default_rng(5)
    state.save(tmp_path / "first")
    state.step(*token(rng))
    state.save(tmp_path / "second", base=tmp_path / "first")
    state.append(1)
    state.step(*token(rng, 3))
    state.save(tmp_path / "third", base=tmp_path / "second")
    row = D * 4
    assert files.read("test", tmp_path / "first").rows.nbytes > 60 * row
    with safetensors.safe_open(tmp_path / "second", framework="np") as file:
        assert len(file.get_tensor("rows")) <= 2 * H * 4
    assert equal(MemoryState.load(tmp_path / "third", initial=initial), state)
    before = written(initial, tokens=9)
    assert equal(MemoryState.load(tmp_path / "first", initial=initial), before)
    with pytest.raises(ValueError, match="path: expected none of the files that base needs"):
        state.save(tmp_path / "first", base=tmp_path / "third")
    (tmp_path / "elsewhere").mkdir()
    with pytest.raises(ValueError, match="base: expected a file in"):
        state.save(tmp_path / "elsewhere" / "x", base=tmp_path / "third")
    before.save(tmp_path / "first")  # the same bytes again: the chain holds
    assert equal(MemoryState.load(tmp_path / "third", initial=initial), state)
    written(initial, tokens=2).save(tmp_path / "first")
    with pytest.raises(ValueError, match="base file: expected hash"):
        MemoryState.load(tmp_path / "third", initial=initial)
    (tmp_path / "first").unlink()
    with pytest.raises(OSError, match="first"):
        MemoryState.load(tmp_path / "third", initial=initial)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_rounded_storage_says_so(rng, tmp_path, dtype):
    initial = rng.standard_normal((H, N, D)).astype(dtype)
    state = MemoryState(initial, 1)
    for _ in range(4):
        state.step(*token(rng, 1))
    state.save(tmp_path / "state", snapshot_dtype="bf16")
    with safetensors.safe_open(tmp_path / "state", framework="np") as file:
        assert "approximate" in file.metadata()["stored"]
    loaded = MemoryState.load(tmp_path / "state", initial=initial).dense().astype(np.float64)
    dense = state.dense().astype(np.float64)
    assert not np.array_equal(loaded, dense)
    # bf16 keeps 8 bits: half a step is 2^-9 of the number (float16 rounds nothing away beyond its own subnormals)
    assert (np.abs(loaded - dense) <= 2.0**-8 * np.abs(dense) + 1e-7).all()
    with pytest.raises(ValueError, match="stored: expected exact, got approximate"):
        state.save(tmp_path / "next", base=tmp_path / "state")
    with pytest.raises(ValueError, match="snapshot_dtype"):
        state.save(tmp_path / "next", snapshot_dtype="fp8")


def test_a_mismatch_names_both(initial, tmp_path):
    written(initial).save(tmp_path / "state")
    load = MemoryState.load
    for other, text in (
        (np.zeros((H, N + 1, D), np.float32), rf"slots: expected {N + 1} .* got {N} in the file"),
        ((H, N, D), "hash of the initial memory: expected zeros .* got [0-9a-f]{16} in the file"),
        (initial + 1, "hash of the initial memory: expected [0-9a-f]{16} .* got [0-9a-f]{16} in the file"),
    ):
        with pytest.raises(FileFormatError, match=text):
            load(tmp_path / "state", initial=other)
    with pytest.raises(FileFormatError, match="rule: expected per_slot .* got shared"):
        MemoryState(initial, 1, rule="per_slot").save(tmp_path / "other", base=tmp_path / "state")
    with pytest.raises(StateFull):
        load(tmp_path / "state", initial=initial, max_bytes=100)
    with pytest.raises(FileError, match="nothing-here"):
        load(tmp_path / "nothing-here", initial=initial)


def test_zeros_of_torch_come_back(tmp_path):
    torch = pytest.importorskip("torch")
    state = MemoryState((H, N, D), 2, dtype=torch.bfloat16)
    state.step(*[torch.from_numpy(a) for a in token(np.random.default_rng(0))])
    state.save(tmp_path / "state")
    loaded = MemoryState.load(tmp_path / "state", initial=(H, N, D), dtype=torch.bfloat16)
    assert loaded.dense().dtype == torch.bfloat16 and torch.equal(loaded.dense(), state.dense())
    with pytest.raises(FileFormatError, match="dtype: expected float32 .* got bfloat16 in the file"):
        MemoryState.load(tmp_path / "state", initial=(H, N, D), dtype=torch.float32)


def test_without_safetensors_one_clear_error(initial, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(sdm_lite.BackendError, match="pip install safetensors"):
        written(initial).save(tmp_path / "state")
    assert not list(tmp_path.iterdir())


# ---- whole or not there -----------------------------------------------------------------------------------------


def test_kill_while_saving_leaves_a_whole_file(initial, tmp_path):
    path, rng = tmp_path / "state", np.random.default_rng(3)
    states = [written(initial, tokens) for tokens in (3, 6)]
    states[0].save(path)
    start = time.perf_counter()
    states[0].save(path)
    one_save = time.perf_counter() - start
    saves = [lambda state=state: state.save(path) for state in states]
    seen = set()
    for kill in range(200):
        kill_while_saving(saves, finished=kill % 3, pause=float(rng.uniform(0, 2 * one_save)))
        loaded = MemoryState.load(path, initial=initial)
        same = [equal(loaded, state) for state in states]
        assert any(same)
        seen.add(same.index(True))
    assert seen == {0, 1}, "the children did save"
    assert all(name == "state" or name.startswith(".") for name in os.listdir(tmp_path))


def test_a_full_disk_is_an_error_and_the_old_file_stays(initial, tmp_path):
    path, old = tmp_path / "state", written(initial, 2)
    old.save(path)
    new = written(initial, 9)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    try:
        with pytest.raises(OSError, match=r"MemoryState.save: .*too large.*Fix: check the folder") as raised:
            new.save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert isinstance(raised.value, FileError)
    assert os.listdir(tmp_path) == ["state"] and equal(MemoryState.load(path, initial=initial), old)
    new.save(path)
    with pytest.raises(FileError, match="Fix: "):
        new.save(tmp_path / "no" / "folder")


# ---- damaged files ----------------------------------------------------------------------------------------------


def mutated(rng, data: bytes) -> bytes:
    """Return a file with some bits flipped, a part cut, doubled or overwritten, or another header length."""
    out, kind = bytearray(data), rng.integers(7)
    header = 8 + int.from_bytes(data[:8], "little")
    if kind == 0:
        for _ in range(rng.integers(1, 4)):
            out[rng.integers(len(out))] ^= 1 << int(rng.integers(8))
    elif kind == 1:
        out[rng.integers(header)] ^= 1 << int(rng.integers(8))
    elif kind == 2:
        del out[rng.integers(len(out)) :]
    elif kind == 3:
        out[:8] = int(rng.integers(0, 2**63)).to_bytes(8, "little")
    elif kind == 4:
        at = int(rng.integers(len(out)))
        out[at:at] = rng.bytes(int(rng.integers(1, 40)))
    elif kind == 5:
        at = int(rng.integers(len(out)))
        out[at : at + 8] = rng.bytes(8)
    else:  # a digit of the header becomes another: sizes, offsets, shapes
        places = [i for i in range(8, header) if 48 <= out[i] <= 57]
        out[places[rng.integers(len(places))]] = 48 + int(rng.integers(10))
    return bytes(out)


def test_fuzzed_files_are_refused(initial, tmp_path):
    path, rng = tmp_path / "state", np.random.default_rng(0)
    state = written(initial, 2)
    state.save(path)
    data, refused = path.read_bytes(), 0
    for _ in range(10_000):
        damaged = mutated(rng, data)
        path.write_bytes(damaged)
        try:
            loaded = MemoryState.load(path, initial=initial)
        except ValueError as error:
            assert isinstance(error, FileFormatError)
            refused += 1
        else:
            assert damaged == data or equal(loaded, state)
    assert refused > 9_000


def rewrite(path, change):
    """Change a file's arrays and metadata and give it right hashes: what only the later checks can notice."""
    with safetensors.safe_open(path, framework="np") as file:
        arrays, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()
    config = json.loads(metadata["configuration"])
    change(arrays, metadata, config)
    metadata["configuration"] = json.dumps(config, sort_keys=True)
    metadata["configuration_sha256"] = hashlib.sha256(metadata["configuration"].encode()).hexdigest()
    if set(files._ARRAYS) <= set(arrays):
        metadata["content_sha256"] = files._digest(metadata, arrays)
    safetensors.save_file(arrays, path, metadata)


def put(name, index, value):
    def change(arrays, metadata, config):
        arrays[name][index] = value

    return change


CRAFTED = {
    "slot out of range": put("slots", 0, N),
    "negative slot": put("slots", 0, -1),
    "slots out of order": lambda a, m, c: a.update(slots=a["slots"][::-1].copy()),
    "row that is not there": put("source", 0, 10**9),
    "entry of no base": put("source", 0, -1),
    "more owned than there are": put("owned", 0, N + 1),
    "negative owned": put("owned", 0, -5),
    "negative tokens": put("tokens", 0, -1),
    "huge batch": lambda a, m, c: c.update(batch=10**11),
    "other heads": lambda a, m, c: c.update(heads=1),
    "batch of text": lambda a, m, c: c.update(batch="2"),
    "no rule": lambda a, m, c: c.pop("rule"),
    "rule of another kind": lambda a, m, c: c.update(rule=[]),
    "narrow rows": lambda a, m, c: a.update(rows=a["rows"][:, :4].copy()),
    "rows of another type": lambda a, m, c: a.update(rows=a["rows"].astype(np.float16)),
    "foreign tensor": lambda a, m, c: a.update(other=np.zeros(3, np.float32)),
    "array missing": lambda a, m, c: a.pop("owned"),
    "slots of another type": lambda a, m, c: a.update(slots=a["slots"].astype(np.int64)),
    "other format": lambda a, m, c: m.update(format="pt"),
    "base outside the folder": lambda a, m, c: m.update(base="../state", base_sha256="0"),
    "itself as base": lambda a, m, c: m.update(base="state", base_sha256="0"),
}


@pytest.mark.parametrize("change", CRAFTED.values(), ids=CRAFTED)
def test_crafted_files_are_refused(initial, tmp_path, change):
    path = tmp_path / "state"
    written(initial, 2).save(path)
    rewrite(path, lambda *parts: None)
    MemoryState.load(path, initial=initial)  # the rewriting itself is right
    rewrite(path, change)
    with pytest.raises(FileFormatError):
        MemoryState.load(path, initial=initial)


def test_absurd_headers_allocate_nothing(initial, tmp_path):
    path = tmp_path / "state"
    written(initial, 2).save(path)
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    absurd = []
    for shape, offsets in (
        ([2**40], [0, 2**43]),
        ([2**62, 4], [0, 16]),
        ([-1], [0, 8]),
        ([2], [8, 8]),
        ([2], [0, 2**63]),
    ):
        changed = json.loads(json.dumps(header))
        changed["tokens"].update(shape=shape, data_offsets=offsets)
        absurd.append(changed)
    overlapping = json.loads(json.dumps(header))
    overlapping["owned"]["data_offsets"] = overlapping["source"]["data_offsets"]
    for changed in (*absurd, overlapping):
        text = json.dumps(changed).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
        tracemalloc.start()
        with pytest.raises(FileFormatError):
            MemoryState.load(path, initial=initial)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 1 << 20


@pytest.mark.parametrize("path", [None, 3, b"bytes", "a\0b", "", "\ud800"])
def test_what_is_no_path_is_refused(initial, path):
    state = written(initial)
    for use in (lambda: state.save(path), lambda: MemoryState.load(path, initial=initial)):
        with pytest.raises((sdm_lite.DtypeError, sdm_lite.ValueRangeError), match="path"):
            use()


def test_a_base_that_is_no_path_is_refused(initial, tmp_path):
    with pytest.raises(sdm_lite.DtypeError, match="base"):
        written(initial).save(tmp_path / "state", base=5)
    assert not (tmp_path / "state").exists()
