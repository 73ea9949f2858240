"""Files of an FwPKMState: a zip of plain arrays (NumPy's npz), no pickle, checked before anything is allocated."""

from __future__ import annotations

import errno
import json
import math
import os
import pathlib
import zipfile
from typing import Any

import numpy as np

from .errors import FileFormatError, message
from .fwpkm_chunks import StreamCall, StreamOptions
from .fwpkm_op import check_flag, check_in_dtype, check_options
from .product_key_memory import check_keys
from .row_table import RowTable
from .validate import check_topk, whole_number
from .whole_files import as_path, unreadable, unwritable, write_whole

FORMAT = "sdm_lite fwpkm state 1"
_LOAD = "FwPKMState.load"
_PAST = ("queries", "values", "gates", "mask")


def save(path: Any, start: Any, lanes: Any, per_sequence: bool, options: StreamOptions | None) -> None:
    """Write a state's parts; each memory as the rows in which it differs from the start."""
    path = as_path("FwPKMState.save", "path", path)
    found = {"start.keys": start.keys, "start.values": start.table.base}
    notes = []
    for i, lane in enumerate(lanes or []):
        slots, rows = lane.table.owned()
        if lane.table.base is not start.table.base:
            rows = lane.table.dense()
            slots = np.arange(len(rows), dtype=np.int32)
        found |= {f"{i}.keys": lane.keys, f"{i}.slots": slots, f"{i}.rows": rows}
        for place, name in enumerate(_PAST):
            if lane.pieces:
                found[f"{i}.{name}"] = np.concatenate([piece[place] for piece in lane.pieces], axis=1)
        notes.append({"carried": lane.carried, "filled": lane.filled, "position": lane.position})
    header = {"format": FORMAT, "per_sequence": per_sequence, "lanes": None if lanes is None else notes}
    header["options"] = None if options is None else vars(options)
    found["header"] = np.frombuffer(json.dumps(header).encode(), np.uint8)

    def write(temporary: pathlib.Path) -> None:
        with open(temporary, "wb") as file:  # savez would add a suffix to a name
            np.savez(file, **found)

    try:
        write_whole(path, write)
    except OSError as error:
        raise unwritable("FwPKMState.save", path, error) from error


def load(path: Any, lane_type: Any) -> tuple[Any, Any, bool, StreamOptions | None]:
    """Return (start, lanes, per_sequence, options), or raise FileFormatError where the file is no whole state."""
    path = as_path(_LOAD, "path", path)
    try:
        file = open(path, "rb")  # noqa: SIM115: an error here is of the path, one below of the contents
    except OSError as error:
        raise unreadable(_LOAD, path, error) from error
    with file:
        try:
            return _state(_arrays(file), lane_type)
        except MemoryError:
            raise
        except Exception as error:  # zipfile, NumPy and json answer damaged bytes with errors of a dozen kinds
            if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
                raise unreadable(_LOAD, path, error) from error
            got, fix = f"{error or type(error).__name__}"[:300], "save the state again"
            raise FileFormatError(message(_LOAD, str(path), "a whole saved state", got, fix)) from error


def _state(found: dict[str, np.ndarray], lane_type: Any) -> tuple[Any, Any, bool, StreamOptions | None]:
    """Return the parts of a state from the arrays of its file; what does not fit together raises."""
    header = json.loads(_take(found, "header", np.dtype(np.uint8), (None,)).tobytes())
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise ValueError(f"no header of format {FORMAT!r}")
    dtype = getattr(found.get("start.keys"), "dtype", None)
    if dtype not in (np.dtype(np.float32), np.dtype(np.float64)):
        raise ValueError(f"keys of dtype {dtype}")
    keys = _take(found, "start.keys", dtype, (None,) * 4)
    check_keys(_LOAD, keys)
    values = _take(found, "start.values", dtype, (keys.shape[2] ** 2, None))
    start = lane_type(keys, RowTable(values))
    per_sequence, notes = check_flag(_LOAD, "per_sequence", header["per_sequence"]), header["lanes"]
    if not isinstance(notes, (list, type(None))) or (not per_sequence and (notes is None or len(notes) != 1)):
        raise ValueError(f"memories {notes!r:.40}")
    options = _options(header["options"], keys)
    lanes = None if notes is None else [_lane(found, i, note, start, lane_type) for i, note in enumerate(notes)]
    for lane in lanes or []:
        if lane.pieces and (options is None or lane.filled >= options.chunk):
            raise ValueError("an open chunk that does not fit the options")
        if per_sequence and lane.batch() not in (None, 1):
            raise ValueError("a memory of its own for more than one sequence")
    if found:
        raise ValueError(f"arrays {sorted(found)!r:.80}, of which the header says nothing")
    return start, lanes, per_sequence, options


def _options(note: Any, keys: np.ndarray) -> StreamOptions | None:
    if note is None:
        return None
    given = dict(note)
    check_flag(_LOAD, "update", given.pop("update"))
    options = check_options(_LOAD, **given)
    check_topk(_LOAD, options.k, keys.shape[2] ** 2)
    check_in_dtype(_LOAD, options, keys.dtype.name)
    return options


def _lane(found: dict[str, np.ndarray], i: int, note: Any, start: Any, lane_type: Any) -> Any:
    dtype, (num_slots, width) = start.keys.dtype, start.table.shape
    heads, _, _, half = start.keys.shape
    counts = {name: whole_number(_LOAD, name, note[name]) for name in ("carried", "filled", "position")}
    carried, filled, position = counts.values()
    if len(note) != 3 or min(carried, filled) < 0 or position < carried + filled:
        raise ValueError(f"counts of memory {i}: {note!r:.80}")
    slots = _take(found, f"{i}.slots", np.dtype(np.int32), (None,))
    rows = _take(found, f"{i}.rows", dtype, (len(slots), width))
    lane = lane_type(_take(found, f"{i}.keys", dtype, start.keys.shape), start.table.fork())
    if len(np.unique(slots)) != len(slots):
        raise ValueError(f"slots of memory {i} stand twice")
    if len(slots):
        if slots.min() < 0 or slots.max() >= num_slots:
            raise ValueError(f"slots of memory {i} are outside the table")
        lane.table.put(slots, rows)
        lane.table = lane.table.settle()
    lane.carried, lane.filled, lane.position = carried, filled, position
    if carried + filled:
        mask = _take(found, f"{i}.mask", np.dtype(np.bool_), (None, carried + filled))
        queries = _take(found, f"{i}.queries", dtype, (*mask.shape, heads, 2 * half))
        values = _take(found, f"{i}.values", dtype, (*mask.shape, width))
        gates = _take(found, f"{i}.gates", dtype, mask.shape)
        lane.pieces = [StreamCall(queries, values, gates, mask, 0, 0)]
    return lane


def _take(found: dict[str, np.ndarray], name: str, dtype: np.dtype, shape: tuple) -> np.ndarray:
    """Take an array out of `found`, or raise unless it is there in this dtype and shape; None stands for any size."""
    if name not in found:
        raise ValueError(f"no array {name}")
    x = found.pop(name)
    if x.dtype != dtype or x.ndim != len(shape) or any(n not in (None, size) for n, size in zip(shape, x.shape)):
        raise ValueError(f"{name} of dtype {x.dtype} and shape {list(x.shape)}, not {dtype} {list(shape)}")
    return x


def _arrays(file: Any) -> dict[str, np.ndarray]:
    """Return the arrays of an npz; a header that promises more than the file holds is refused before it is read."""
    found: dict[str, np.ndarray] = {}
    total = os.fstat(file.fileno()).st_size
    with zipfile.ZipFile(file) as archive:
        for entry in archive.infolist():
            name = entry.filename.removesuffix(".npy")
            stored = entry.compress_type == zipfile.ZIP_STORED and entry.compress_size == entry.file_size <= total
            if not stored or name in found:
                raise ValueError(f"{entry.filename}: compressed, larger than the file, or there twice")
            with archive.open(entry) as part:
                version = np.lib.format.read_magic(part)
                read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
                shape, fortran, dtype = read[version](part)
                size = math.prod(shape) * dtype.itemsize
                if dtype.hasobject or fortran or min(shape, default=0) < 0 or size != entry.file_size - part.tell():
                    raise ValueError(f"{entry.filename}: a header that does not fit its {entry.file_size} bytes")
                found[name] = np.frombuffer(bytearray(part.read(size)), dtype).reshape(shape)
    return found
