"""Files of FwPKMState: bit for bit back, and every damage refused."""

from __future__ import annotations

import json
import zipfile

import numpy as np
import pytest
from fwpkm_cases import make_stream
from fwpkm_states import begun, goes_on

from sdm_lite import FwPKMState, errors


@pytest.mark.parametrize("per_sequence", [False, True])
def test_a_saved_state_goes_on_bit_for_bit(per_sequence, tmp_path):
    x, state = begun(per_sequence)
    state.save(tmp_path / "state.npz")
    again = FwPKMState.load(tmp_path / "state.npz")
    assert goes_on(again, x) == goes_on(state, x)
    assert again.position == state.position
    again.reset()
    assert goes_on(again, x) == goes_on(FwPKMState(x.keys, x.table, per_sequence=per_sequence), x)
    assert [p.name for p in tmp_path.iterdir()] == ["state.npz"]


def test_damaged_files_are_refused(tmp_path):
    _, state = begun()
    path = tmp_path / "state.npz"
    state.save(path)
    whole = path.read_bytes()
    for cut in (0, 10, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(errors.FileFormatError, match="load"):
            FwPKMState.load(path)
    path.write_bytes(whole)
    with zipfile.ZipFile(path) as old:
        entries = {entry.filename: old.read(entry) for entry in old.infolist()}
    for name, change in (
        ("start.values.npy", lambda b: b.replace(b"(36, 5), }           ", b"(360000000000, 5), } ")),
        ("0.rows.npy", lambda b: b[:-4]),
        ("header.npy", lambda b: b.replace(b"fwpkm state", b"fwpkm stats")),
    ):
        changed = change(entries[name])
        assert changed != entries[name]
        with zipfile.ZipFile(path, "w") as new:
            for other, data in entries.items():
                new.writestr(other, changed if other == name else data)
        with pytest.raises(errors.FileFormatError, match="load"):
            FwPKMState.load(path)


def header(**changes):
    def change(arrays):
        note = json.loads(arrays["header"].tobytes())
        arrays["header"] = np.frombuffer(json.dumps({**note, **changes}).encode(), np.uint8)

    return change


def counts(**changes):
    def change(arrays):
        note = json.loads(arrays["header"].tobytes())
        note["lanes"][0].update(changes)
        arrays["header"] = np.frombuffer(json.dumps(note).encode(), np.uint8)

    return change


def option(**changes):
    def change(arrays):
        note = json.loads(arrays["header"].tobytes())
        header(options={**note["options"], **changes})(arrays)

    return change


def array(name, change):
    def changed(arrays):
        arrays[name] = change(arrays[name])

    return changed


@pytest.mark.parametrize(
    "change",
    [
        header(lanes=3),
        header(lanes={}),
        header(lanes=["a", "b", "c"]),
        header(lanes=[{}, {}, {}]),
        header(lanes=[]),
        header(per_sequence=False),
        header(per_sequence="no"),
        header(options=[1]),
        header(options=None),
        option(k=0),
        option(k=37),
        option(chunk=-1),
        option(chunk=1, lookahead=0),
        option(epsilon=float("nan")),
        option(value_rate=1e300),
        option(depth=1),
        option(update="no"),
        counts(position="a"),
        counts(position=-1),
        counts(filled=2.0),
        counts(filled=4, carried=-1),
        counts(filled=4, carried=0),
        counts(filled=True),
        array("header", lambda x: x[:0]),
        array("header", lambda x: np.frombuffer(b"[" * 100000, np.uint8)),
        array("start.keys", lambda x: x.astype(np.float16)),
        array("start.keys", lambda x: x[0, 0, 0, 0]),
        array("start.keys", lambda x: x.astype(">f4")),
        array("start.values", lambda x: x[:9]),
        array("start.values", lambda x: x.astype(np.float64)),
        array("0.keys", lambda x: x.astype(int)),
        array("0.keys", lambda x: x[:1]),
        array("0.slots", lambda x: x.astype(float)),
        array("0.slots", lambda x: x + 36),
        array("0.rows", lambda x: x.astype(np.float64)),
        array("0.queries", lambda x: x[..., 0]),
        array("0.queries", lambda x: x.astype(int)),
        array("0.values", lambda x: x[..., :1]),
        array("0.gates", lambda x: x[..., None]),
        array("0.mask", lambda x: x.astype(float)),
        lambda arrays: arrays.pop("0.queries"),
        lambda arrays: arrays.update(more=np.zeros(1)),
    ],
)
def test_crafted_files_are_refused(change, tmp_path):
    _, state = begun()
    path = tmp_path / "state.npz"
    state.save(path)
    arrays = dict(np.load(path))
    np.savez(path, **arrays)
    FwPKMState.load(path)
    change(arrays)
    np.savez(path, **arrays)
    with pytest.raises(errors.FileFormatError, match="load: .* expected a whole saved state"):
        FwPKMState.load(path)


def test_a_flipped_bit_is_refused_or_shows_nowhere(tmp_path):
    x = make_stream(B=1, T=6, H=1, m=2, half=1, D=1, dtype=np.float32)
    state, path = FwPKMState(x.keys, x.table, per_sequence=True), tmp_path / "state.npz"
    state.extend(*x.call, k=2, chunk=4)
    state.save(path)
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    for place in range(len(whole)):
        bad = bytearray(whole)
        bad[place] ^= 1 << int(rng.integers(8))
        path.write_bytes(bad)
        try:
            again = FwPKMState.load(path)
        except errors.FileFormatError:
            continue
        assert again.values.tobytes() == state.values.tobytes() and again.position == state.position, place


def test_files_that_are_none_and_compressed_ones_are_refused(tmp_path):
    _, state = begun()
    path = tmp_path / "state.npz"
    state.save(path)
    arrays = dict(np.load(path))
    np.savez_compressed(path, **arrays)
    with pytest.raises(errors.FileFormatError, match="compressed"):
        FwPKMState.load(path)
    for wrong in (None, 3, "a\0b"):
        for call in (FwPKMState.load, state.save):
            with pytest.raises((errors.DtypeError, errors.ValueRangeError), match=r"FwPKMState\.\w+: path"):
                call(wrong)
    for missing in (tmp_path / "none", tmp_path):
        with pytest.raises(errors.FileError):
            FwPKMState.load(missing)
