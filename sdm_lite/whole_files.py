"""Files that are whole or not there: written under a temporary name, synced, then renamed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a temporary file beside `path`, sync it to the disk and rename it to `path`.

    A process killed at any moment leaves either the old file or the new one under `path`, never a part.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        temporary.chmod(0o666 & ~_umask())  # some writers make files that only their owner can read
        with open(temporary, "rb+") as handle:
            os.fsync(handle.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


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
