"""Files that are whole or not there: written under a temporary name, synced, then renamed."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .mistakes import mistake

_TEMPORARY = re.compile(r"\..+\.\d+\.tmp")


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a temporary file beside `path`, sync it to the disk and rename it to `path`.

    A process killed at any moment leaves either the old file or the new one under `path`, never a part, and at
    most a temporary file, for :func:`remove_temporaries`. An OSError names `path`.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        with open(temporary, "rb+") as handle:
            os.fsync(handle.fileno())
        os.replace(temporary, path)
    except OSError as error:
        if error.errno is not None:  # a failed write names no file, other calls the temporary one
            error.filename, error.filename2 = str(path), None
        raise
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def remove_temporaries(folder: Path) -> None:
    """Delete what a killed process left of :func:`write_whole` in `folder`, which no other process may write to."""
    for path in folder.glob(".*.tmp"):
        if _TEMPORARY.fullmatch(path.name):
            path.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Make renames in `folder` survive a power cut, where the system can sync a folder."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:  # Windows cannot open a folder
        return
    try:
        os.fsync(descriptor)
    except OSError:  # some network file systems refuse
        pass
    finally:
        os.close(descriptor)


def write_json(path: Path, value: Any) -> None:
    """Write `value` to `path` as JSON, whole or not at all."""
    text = json.dumps(value, indent=1) + "\n"
    write_whole(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def read_json(command: str, path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`; CommandError when it is missing, unreadable or not an object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise mistake(command, str(path), "a file", "nothing there", "check the path") from None
    except OSError as error:
        raise mistake(command, str(path), "a readable file", str(error.strerror), "check its permissions") from error
    except (ValueError, RecursionError) as error:  # not JSON, or not UTF-8
        raise mistake(command, str(path), "JSON", f"a damaged file ({error})", "use another checkpoint") from error
    if not isinstance(value, dict):
        raise mistake(command, str(path), "a JSON object", type(value).__name__, "use another checkpoint")
    return value


def make_folder(command: str, argument: str, path: Path) -> Path:
    """Create the folder `path` unless it is there; CommandError when it cannot be made or written to."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise mistake(command, argument, "a folder", f"{path} ({error.strerror})", "name another place") from error
    if not os.access(path, os.W_OK):
        raise mistake(command, argument, "a folder that can be written to", str(path), "name another place")
    return path
