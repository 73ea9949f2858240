"""Files of an FwPKMState: a zip of plain arrays (NumPy's npz), no pickle, checked before anything is allocated."""

from __future__ import annotations

import json
import math
import pathlib
import zipfile
from typing import Any

import numpy as np

from .errors import FileError, FileFormatError, message
from .fwpkm_stream import StreamCall, StreamOptions
from .row_table import RowTable
from .whole_files import write_whole

FORMAT = "sdm_lite fwpkm state 1"
_PAST = ("queries", "values", "gates", "mask")


def save(path: Any, start: Any, lanes: Any, per_sequence: bool, options: StreamOptions | None) -> None:
    """Write a state's parts; each memory as the rows in which it differs from the start."""
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
        write_whole(pathlib.Path(path), write)
    except OSError as error:
        got, fix = error.strerror or str(error), "check the folder, its permissions and the disk"
        raise FileError(message("FwPKMState.save", str(path), "a file that can be written", got, fix)) from error


def load(path: Any, lane_type: Any) -> tuple[Any, Any, bool, StreamOptions | None]:
    """Return (start, lanes, per_sequence, options), or raise FileFormatError where the file is no whole state."""
    try:
        found = _arrays(path)
        header = json.loads(found["header"].tobytes())
        if header["format"] != FORMAT:
            raise ValueError(f"format {header['format']!r}")
        start = lane_type(found["start.keys"], RowTable(found["start.values"]))
        lanes = None
        if header["lanes"] is not None:
            lanes = [_lane(found, i, note, start, lane_type) for i, note in enumerate(header["lanes"])]
        options = None if header["options"] is None else StreamOptions(**header["options"])
        return start, lanes, bool(header["per_sequence"]), options
    except (zipfile.BadZipFile, ValueError, KeyError, TypeError, EOFError, IndexError) as error:
        fix = "save the state again"
        raise FileFormatError(message("FwPKMState.load", str(path), "a whole saved state", str(error), fix)) from error
    except OSError as error:
        got, fix = error.strerror or str(error), "check the path"
        raise FileError(message("FwPKMState.load", str(path), "a file that can be read", got, fix)) from error


def _lane(found: dict[str, np.ndarray], i: int, note: dict, start: Any, lane_type: Any) -> Any:
    slots, rows, keys = found[f"{i}.slots"], found[f"{i}.rows"], found[f"{i}.keys"]
    num_slots, width = start.table.shape
    if rows.shape != (len(slots), width) or len(np.unique(slots)) != len(slots) or keys.shape != start.keys.shape:
        raise ValueError(f"rows or keys of memory {i} do not fit the start")
    if len(slots) and not (0 <= slots.min() and slots.max() < num_slots):
        raise ValueError(f"slots of memory {i} are outside the table")
    lane = lane_type(keys, start.table.fork())
    if len(slots):
        lane.table.put(slots, rows)
        lane.table = lane.table.settle()
    lane.carried, lane.filled, lane.position = note["carried"], note["filled"], note["position"]
    if lane.carried + lane.filled:
        past = [found[f"{i}.{name}"] for name in _PAST]
        if any(x.shape[1] != lane.carried + lane.filled for x in past):
            raise ValueError(f"the open chunk of memory {i} is not whole")
        lane.pieces = [StreamCall._make((*past, 0, 0))]
    return lane


def _arrays(path: Any) -> dict[str, np.ndarray]:
    """Return the arrays of an npz; a header that promises more than the file holds is refused before it is read."""
    found = {}
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            with archive.open(entry) as file:
                version = np.lib.format.read_magic(file)
                read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
                shape, fortran, dtype = read[version](file)
                size = math.prod(shape) * dtype.itemsize
                if dtype.hasobject or fortran or min(shape, default=0) < 0 or size != entry.file_size - file.tell():
                    raise ValueError(f"{entry.filename}: a header that does not fit its {entry.file_size} bytes")
                data = np.frombuffer(bytearray(file.read(size)), dtype)
                found[entry.filename.removesuffix(".npy")] = data.reshape(shape)
    return found
