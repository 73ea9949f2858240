"""Files that are whole or not there: written under a temporary name, synced, then renamed."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .errors import BackendError, DtypeError, FileError, ValueRangeError, message

_TEMPORARY = re.compile(r"\..+\.\d+\.tmp")


def as_path(op: str, name: str, value: Any) -> Path:
    """Return an argument that names a file as a Path, or raise DtypeError or ValueRangeError.

    >>> as_path("save", "path", "a/b").name
    'b'
    """
    fix = "pass a string or a pathlib.Path"
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(text, str):
        raise DtypeError(message(op, name, "a path", f"{value!r:.40} ({type(value).__name__})", fix))
    try:
        nul = b"\0" in os.fsencode(text)
    except UnicodeEncodeError:
        nul = True
    if nul or not Path(text).name:
        raise ValueRangeError(message(op, name, "a path of a file", f"{text!r:.80}", "name a file"))
    return Path(text)


def safetensors_for(op: str, framework: str) -> Any:
    """Return the package safetensors with its module for "numpy" or "torch", or raise BackendError."""
    try:
        importlib.import_module(f"safetensors.{framework}")
        return importlib.import_module("safetensors")
    except ImportError as error:
        fix = "pip install safetensors"
        raise BackendError(message(op, "safetensors", "an installed package", str(error), fix)) from error


def unreadable(op: str, path: Path, error: OSError) -> FileError:
    """Return the error of a file that the system does not let us read."""
    if isinstance(error, FileNotFoundError):  # safetensors' own has no strerror, and names the path again
        got = "no such file"
    else:
        got = "a folder" if path.is_dir() else error.strerror or str(error) or "none"
    return FileError(message(op, str(path), "a file that can be read", got, "check the path"))


def unwritable(op: str, path: Path, error: Exception) -> FileError:
    """Return the error of a file that the system, or a library that writes it, does not let us write."""
    got = getattr(error, "strerror", None) or str(error)
    fix = "check the folder, its permissions and the disk"
    return FileError(message(op, str(path), "a file that can be written", got, fix))


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a temporary file beside `path`, sync it to the disk and rename it to `path`.

    A process killed at any moment leaves either the old file or the new one under `path`, never a part, and at
    most a temporary file, for :func:`remove_temporaries`. An OSError names `path`.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        temporary.chmod(0o666 & ~_umask())  # some writers make files that only their owner can read
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


def _umask() -> int:
    mask = os.umask(0)  # there is no other way to ask
    os.umask(mask)
    return mask


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
