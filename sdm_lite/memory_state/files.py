"""States on disk: a safetensors file of the rows owned, their slots and the token counts.

Arrays (E entries by lane and slot, U rows)::

    tokens int64 [B]      owned int64 [B H]      slots int32 [E]
    source int64 [E]      n >= 0: rows[n];  n < 0: what entry -1 - n of the base file stands for
    rows [U, D]           in the state's dtype, bf16 as its bits (U16); bf16 bits too where `stored` says so

Metadata: `format`, `configuration` (JSON) and its SHA-256, the initial memory's SHA-256, `stored`, name and SHA-256 of
the base file if there is one, and a SHA-256 of all of this, arrays included. safetensors checks the header against the
file's length before anything is allocated; a damaged file is noticed by the last hash.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..arrays import narrow_bf16, widen_bf16
from ..cpu import overlay
from ..errors import FileFormatError, ValueRangeError, message
from ..rooms import DeltaOptions
from ..whole_files import as_path, safetensors_for, unreadable, unwritable, write_whole
from .index import Index, entries
from .initial import Initial, check_given
from .pool import RowPool

if TYPE_CHECKING:
    from .state import MemoryState

FORMAT = "sdm-lite memory state 1"
EXACT, BF16 = "exact", "approximate: bf16"
_LONGEST_CHAIN = 64  # files, each the base of the next
_ARRAYS = {"tokens": "I64", "owned": "I64", "slots": "I32", "source": "I64", "rows": None}
_ROWS = {"float32": "F32", "float64": "F64", "float16": "F16", "bfloat16": "U16"}
_NUMPY = {"F32": np.float32, "F64": np.float64, "F16": np.float16, "U16": np.uint16}


class Contents(NamedTuple):
    """A file and the files it is based on, read and checked; `rows[row[e]]` is the row of entry e."""

    configuration: dict[str, Any]
    initial: str
    stored: str
    digest: str
    chain: tuple[str, ...]  # names of the files, this one first
    tokens: np.ndarray
    lane: np.ndarray
    slots: np.ndarray
    row: np.ndarray
    rows: np.ndarray


def save(state: MemoryState, path: Any, base: Any, snapshot_dtype: str | None) -> None:
    """Write a state to `path`, as :meth:`MemoryState.save`."""
    op = "MemoryState.save"
    path = as_path(op, "path", path)
    base = None if base is None else as_path(op, "base", base)
    if snapshot_dtype not in (None, "bf16"):
        raise ValueRangeError(
            message(op, "snapshot_dtype", "None or 'bf16'", repr(snapshot_dtype), "name one of these")
        )
    library = safetensors_for(op, "numpy")
    lane, slots, pool_row = entries(state._index)
    unique, row = np.unique(pool_row, return_inverse=True)
    stored = EXACT if snapshot_dtype is None or state.dtype == "bfloat16" else BF16
    rows, source = _stored_rows(state, unique, stored), row.reshape(-1).astype(np.int64)
    metadata = _metadata(state, stored)
    if base is not None:
        found = _check_base(op, path, base, metadata)
        source, rows = _changed_rows(found, lane, slots, source, rows, state._initial.shape[1])
        metadata |= {"base": found.chain[0], "base_sha256": found.digest}
    lanes = state.batch * state._initial.shape[0]
    arrays = {
        "tokens": state._tokens,
        "owned": np.bincount(lane, minlength=lanes).astype(np.int64),
        "slots": slots.astype(np.int32),
        "source": source,
        "rows": rows,
    }
    metadata["content_sha256"] = _digest(metadata, arrays)

    def write(temporary: Path) -> None:
        try:
            library.numpy.save_file(arrays, temporary, metadata)
        except library.SafetensorError as error:  # its form of a full disk
            raise OSError(str(error)) from error

    try:
        write_whole(path, write)
    except OSError as error:
        raise unwritable(op, path, error) from error


def load(path: Any, initial: Any, dtype: Any, max_bytes: int | None) -> MemoryState:
    """Return the state in `path`, as :meth:`MemoryState.load`."""
    from .state import MemoryState

    op = "MemoryState.load"
    path = as_path(op, "path", path)
    check_given(op, initial)
    contents = read(op, path)
    config = contents.configuration
    first = Initial(op, initial, config["dtype"] if dtype is None else dtype)
    for name, here in zip(("heads", "slots", "width", "dtype"), (*first.shape, first.dtype)):
        if config[name] != here:
            _mismatch(op, path, name, f"{here} (the initial memory given)", f"{config[name]} in the file")
    if contents.initial != first.digest():
        given, saved = (digest[:16] for digest in (first.digest(), contents.initial))
        _mismatch(op, path, "hash of the initial memory", f"{given} (the one given)", f"{saved} in the file")
    options = DeltaOptions(config["rule"], state_dtype=first.dtype)
    state = MemoryState.__new__(MemoryState)
    state._open(first, RowPool(first, max_bytes), options)
    state._follow(contents.tokens)
    _fill(op, state, contents)
    return state


def _fill(op: str, state: MemoryState, contents: Contents) -> None:
    """Give a new state the rows of a file."""
    pool, lanes = state._pool, state.batch * state._initial.shape[0]
    used, row = np.unique(contents.row, return_inverse=True)
    pool.reserve(len(used))
    pool.numbers.counters[overlay.TOP] = len(used)
    pool.numbers.refs[: len(used)] = 0
    pool.numbers.stamp[: len(used)] = 0
    pool.cover(op)
    rows = contents.rows[used]
    if contents.stored == BF16:
        rows = widen_bf16(rows)
        rows = rows.astype(state._initial.compute if state.dtype != "float16" else np.float16)
    pool.write(np.arange(len(used)), rows.view(state._initial.storage))
    fullest = int(np.bincount(contents.lane, minlength=1).max())
    size = max(overlay.SMALLEST, 1 << (2 * fullest).bit_length())
    state._index = Index(np.full((lanes, size, 2), -1, np.int32), np.zeros(lanes, np.int64))
    overlay.insert(*state._index, contents.lane, contents.slots, row.reshape(-1))
    pool.hold(state._index.table, 1)


def read(op: str, path: Path, after: tuple[str, ...] = ()) -> Contents:
    """Return what a file (the base of those `after`) and its base files hold, or raise FileFormatError or FileError."""
    metadata, arrays = _open(op, path)
    config = _configuration(op, path, metadata)
    tokens, owned, slots, source, rows = (arrays[name] for name in _ARRAYS)
    lanes = config["batch"] * config["heads"]
    kind = _ROWS["bfloat16" if metadata["stored"] == BF16 else config["dtype"]]
    good: Any = tokens.shape == (config["batch"],) and owned.shape == (lanes,) and slots.ndim == source.ndim == 1
    good = (
        good
        and rows.dtype == _NUMPY[kind]
        and rows.ndim == 2
        and rows.shape[1] == config["width"]
        and len(slots) == len(source)
    )
    good = good and (tokens >= 0).all() and (owned >= 0).all() and (owned <= config["slots"]).all()
    if not good or int(owned.sum()) != len(slots):
        _damaged(op, path, "arrays that do not fit together")
    lane = np.repeat(np.arange(lanes), owned)
    key = lane * config["slots"] + slots
    inside = (slots >= 0) & (slots < config["slots"])
    if not inside.all() or (np.diff(key) <= 0).any() or (source >= len(rows)).any():
        _damaged(op, path, "slots out of range or out of order")
    stored, row = metadata["stored"], source.copy()
    chain: tuple[str, ...] = (path.name,)
    if metadata.get("base") is not None:
        if len(after) >= _LONGEST_CHAIN:
            _damaged(op, path, f"a chain of more than {_LONGEST_CHAIN} base files")
        base = read(op, _sibling(op, path, metadata["base"]), (*after, path.name))
        wanted = metadata.get("base_sha256", "none")
        if base.digest != wanted or base.stored != stored or base.rows.dtype != rows.dtype:
            _mismatch(op, path, "base file", f"hash {wanted[:16]}", f"{base.digest[:16]} ({base.chain[0]})")
        entry = -1 - source
        old = source < 0
        if (entry >= len(base.row)).any() or base.rows.shape[1:] != rows.shape[1:]:
            _damaged(op, path, "entries that the base file does not have")
        row[old] = base.row[entry[old]] + len(rows)
        rows, chain = np.concatenate([rows, base.rows]), (*chain, *base.chain)
    elif (source < 0).any():
        _damaged(op, path, "entries of a base file, and no base file")
    return Contents(
        config, metadata["initial_sha256"], stored, metadata["content_sha256"], chain, tokens, lane, slots, row, rows
    )


def _open(op: str, path: Path) -> tuple[dict[str, str], dict[str, np.ndarray]]:
    """Return metadata and arrays of one file, as they were written: names, types and the hash are right."""
    library = safetensors_for(op, "numpy")
    try:
        with library.safe_open(path, framework="np") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                _damaged(op, path, f"format {metadata.get('format')!r:.60}, not {FORMAT!r}")
            if sorted(file.keys()) != sorted(_ARRAYS):
                _damaged(op, path, f"arrays {sorted(file.keys())!r:.80}")
            for name, dtype in _ARRAYS.items():
                found = file.get_slice(name).get_dtype()
                if found != dtype and not (dtype is None and found in _ROWS.values()):
                    _damaged(op, path, f"{name} of type {found}")
            arrays = {name: file.get_tensor(name) for name in _ARRAYS}
    except OSError as error:
        raise unreadable(op, path, error) from error
    except (library.SafetensorError, UnicodeDecodeError):
        _damaged(op, path, "no safetensors file, or one cut short")
    if _digest(metadata, arrays) != metadata.get("content_sha256"):
        _damaged(op, path, "bytes that are not those that were written")
    return metadata, arrays


def _configuration(op: str, path: Path, metadata: dict[str, str]) -> dict[str, Any]:
    """Return the configuration, its fields and the other metadata being of the kinds that `save` writes."""
    text = metadata.get("configuration", "")
    if metadata.get("configuration_sha256") != hashlib.sha256(text.encode()).hexdigest():
        _damaged(op, path, "a configuration with another hash")
    try:
        config = json.loads(text)
        sizes = [config[name] for name in ("batch", "heads", "slots", "width")]
        good = len(config) == 6 and all(type(size) is int and 0 <= size < 2**40 for size in sizes)
        good = good and config["dtype"] in _ROWS and config["rule"] in ("shared", "per_slot")
    except (ValueError, TypeError, KeyError, RecursionError):
        good = False
    if not good or metadata.get("stored") not in (EXACT, BF16) or "initial_sha256" not in metadata:
        _damaged(op, path, "a configuration that is not one of a state")
    return config


def _metadata(state: MemoryState, stored: str) -> dict[str, str]:
    heads, slots, width = state._initial.shape
    sizes = {"batch": state.batch, "heads": heads, "slots": slots, "width": width}
    text = json.dumps({**sizes, "dtype": state.dtype, "rule": state.rule}, sort_keys=True)
    return {
        "format": FORMAT,
        "configuration": text,
        "configuration_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "initial_sha256": state._initial.digest(),
        "stored": stored,
    }


def _stored_rows(state: MemoryState, pool_rows: np.ndarray, stored: str) -> np.ndarray:
    """Return rows of the pool as they stand in a file."""
    rows = state._pool.read(pool_rows)
    if state.dtype == "float16":
        rows = rows.view(np.float16)
    return narrow_bf16(rows.astype(np.float32)) if stored == BF16 else rows


def _check_base(op: str, path: Path, base: Path, metadata: dict[str, str]) -> Contents:
    """Return the contents of a base file that fits the state; the configuration may have another batch."""
    fix = "save without base"
    if base.resolve().parent != path.resolve().parent:
        raise ValueRangeError(message(op, "base", f"a file in {path.resolve().parent}", str(base), fix))
    found = read(op, base)
    if path.name in found.chain:
        raise ValueRangeError(message(op, "path", f"none of the files that base needs, {found.chain}", path.name, fix))
    wanted = json.loads(metadata["configuration"])
    for name in ("heads", "slots", "width", "dtype", "rule"):
        if found.configuration[name] != wanted[name]:
            _mismatch(op, base, name, f"{wanted[name]} as the state has", str(found.configuration[name]))
    if found.initial != metadata["initial_sha256"]:
        _mismatch(op, base, "hash of the initial memory", metadata["initial_sha256"][:16], found.initial[:16])
    if found.stored != metadata["stored"]:
        _mismatch(op, base, "stored", metadata["stored"], found.stored)
    if len(found.chain) >= _LONGEST_CHAIN:
        raise ValueRangeError(message(op, "base", f"a chain below {_LONGEST_CHAIN} files", base.name, fix))
    return found


def _changed_rows(
    base: Contents, lane: np.ndarray, slots: np.ndarray, source: np.ndarray, rows: np.ndarray, num_slots: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return (source, rows) with only those rows that the base file does not have at the same lane and slot."""
    key, known = lane * num_slots + slots, base.lane * num_slots + base.slots
    at = np.searchsorted(known, key)
    same = at < len(known)
    same[same] = known[at[same]] == key[same]
    mine, theirs = (np.ascontiguousarray(x).view(np.uint8) for x in (rows, base.rows))
    where = np.flatnonzero(same)
    same[where] = (mine[source[where]] == theirs[base.row[at[where]]]).all(axis=1)
    kept, place = np.unique(source[~same], return_inverse=True)
    source = source.copy()
    source[same], source[~same] = -1 - at[same], place.reshape(-1)
    return source, rows[kept]


def _digest(metadata: dict[str, str], arrays: dict[str, np.ndarray]) -> str:
    named = {name: value for name, value in metadata.items() if name != "content_sha256"}
    found = hashlib.sha256(json.dumps(named, sort_keys=True).encode())
    for name in _ARRAYS:
        array = np.ascontiguousarray(arrays[name])
        found.update(f"{name} {array.dtype} {array.shape}".encode())
        found.update(array.reshape(-1).view(np.uint8).data)
    return found.hexdigest()


def _sibling(op: str, path: Path, name: str) -> Path:
    """Return a file of the same folder: a name from a file must not lead out of it."""
    if not name or name in (".", "..") or os.path.basename(name) != name or "\0" in name:
        _damaged(op, path, f"base {name!r:.60}")
    return path.with_name(name)


def _damaged(op: str, path: Path, got: str) -> None:
    raise FileFormatError(message(op, str(path), "a state as MemoryState.save writes it", got, "use another file"))


def _mismatch(op: str, path: Path, what: str, expected: str, got: str) -> None:
    fix = "use the file, the initial memory and the settings that belong together"
    raise FileFormatError(message(op, f"{path}: {what}", expected, got, fix))
