"""JSON files and folders, with errors in the command line's words."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ..whole_files import write_whole
from .mistakes import mistake


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
    except ValueError as error:  # not JSON, or not UTF-8
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
