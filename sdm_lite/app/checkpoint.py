"""Checkpoints: safetensors for the arrays and one JSON file that names them.

A checkpoint ``NAME`` in a folder is ``NAME.json`` and the two files it names,
``model-STEP-DIGEST.safetensors`` and ``optimizer-STEP-DIGEST.safetensors``. The arrays are written
first and the JSON last, each whole or not at all, so that the JSON is the one moment at which the new
checkpoint replaces the old: a save killed before it leaves the old one untouched. There is no pickle.
"""

from __future__ import annotations

import hashlib
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..whole_files import remove_temporaries, write_whole
from .arguments import LARGEST
from .files import read_json, write_json
from .mistakes import CommandError, mistake

FORMAT = "sdm-lite checkpoint 1"
LATEST = "checkpoint"
_OURS = re.compile(r"(model|optimizer)-\d+-[0-9a-f]{12}\.safetensors")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose JSON was read and checked; the arrays are read when asked for."""

    folder: Path
    record: dict[str, Any]

    @property
    def step(self) -> int:
        """Optimiser steps done."""
        return self.record["step"]

    def tensors(self, command: str, part: str) -> dict[str, Any]:
        """Return the arrays of `part` ("model" or "optimizer"); CommandError when the file is cut or damaged."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        entry = self.record["files"][part]
        path = self.folder / entry["name"]
        try:
            size = path.stat().st_size
            if size != entry["bytes"]:
                raise mistake(command, str(path), f"{entry['bytes']} bytes", str(size), "use another checkpoint")
            if _digest(path) != entry["sha256"]:
                raise mistake(command, str(path), "the bytes that were saved", "other bytes", "use another checkpoint")
            return load_file(path)
        except FileNotFoundError:
            raise mistake(command, str(path), "a file", "nothing there", "use another checkpoint") from None
        except OSError as error:
            raise mistake(command, str(path), "a readable file", str(error), "check its permissions") from error
        except SafetensorError as error:
            raise mistake(command, str(path), "safetensors", f"damage ({error})", "use another checkpoint") from error


def save(folder: Path, model: dict[str, Any], optimizer: dict[str, Any], record: dict[str, Any], name: str = LATEST):
    """Write a checkpoint: flat dictionaries of tensors, and `record`, which must hold the integer ``step``.

    Parameters
    ----------
    folder : Path
        Where; it must be there.
    model, optimizer : dict of str to tensor
        The model's state dict, and what :func:`sdm_lite.app.optim.state_tensors` returns.
    record : dict
        Anything else, as JSON: ``step``, ``config``, ``settings``.
    name : str
        A folder holds one checkpoint per name.

    Raises
    ------
    OSError
        Where the disk is full, for instance: the folder then holds what it held before.
    """
    files = {}
    try:
        for part, tensors in (("model", model), ("optimizer", optimizer)):
            files[part] = _write_tensors(folder, f"{part}-{record['step']:06d}", tensors)
        write_json(folder / f"{name}.json", {**record, "format": FORMAT, "files": files})
    finally:
        tidy(folder)


def load(command: str, folder: Path, name: str = LATEST) -> Checkpoint:
    """Read checkpoint `name` of `folder` (or the JSON file itself); CommandError says what is wrong with it."""
    path = folder if folder.suffix == ".json" else folder / f"{name}.json"
    if not path.exists():
        inner = sorted(found.parent.name for found in folder.glob(f"*/{LATEST}.json")) if folder.is_dir() else []
        fix = f"name one of the runs inside: {', '.join(inner)}" if inner else "check the path"
        raise mistake(command, str(folder), f"a folder with {path.name}", "none", fix)
    record = read_json(command, path)
    if record.get("format") != FORMAT:
        raise mistake(command, str(path), repr(FORMAT), repr(record.get("format")), "use another checkpoint")
    _check(command, path, record)
    return Checkpoint(path.parent, record)


def exists(folder: Path, name: str = LATEST) -> bool:
    """Return whether `folder` holds checkpoint `name`."""
    return (folder / f"{name}.json").is_file()


def _check(command: str, path: Path, record: dict[str, Any]) -> None:
    try:
        good = type(record["step"]) is int and 0 <= record["step"] <= LARGEST and isinstance(record["config"], dict)
        good = good and isinstance(record.get("settings", {}), dict)
        elapsed = record.get("elapsed", 0.0)
        good = good and type(elapsed) in (int, float) and 0 <= elapsed < math.inf
        for part in ("model", "optimizer"):
            entry = record["files"][part]
            # only the names that this module gives: a path from a file must not lead out of the folder
            good = good and _OURS.fullmatch(entry["name"]) is not None
            good = good and type(entry["bytes"]) is int and isinstance(entry["sha256"], str)
    except (KeyError, TypeError):
        good = False
    if not good:
        raise mistake(
            command, str(path), "step, config and two named files", "other contents", "use another checkpoint"
        )


def _write_tensors(folder: Path, stem: str, tensors: dict[str, Any]) -> dict[str, Any]:
    from safetensors.torch import save

    # a copy each: safetensors takes no two tensors that share memory (tied embeddings do)
    data = save({name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()})
    digest = hashlib.sha256(data).hexdigest()
    path = folder / f"{stem}-{digest[:12]}.safetensors"
    write_whole(path, lambda temporary: temporary.write_bytes(data))
    return {"name": path.name, "bytes": len(data), "sha256": digest}


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as handle:
        while block := handle.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def tidy(folder: Path) -> None:
    """Delete array files that no checkpoint of this folder names any more, and what a killed save left."""
    remove_temporaries(folder)
    named: set[str] = set()
    for path in folder.glob("*.json"):
        try:
            files = read_json("checkpoint", path).get("files", {})
            named.update(entry["name"] for entry in files.values())
        except CommandError:
            return  # it may be a checkpoint: better too many files than one too few
        except (KeyError, TypeError, AttributeError):
            continue  # another JSON file
    for path in folder.glob("*.safetensors"):
        if _OURS.fullmatch(path.name) and path.name not in named:
            path.unlink(missing_ok=True)
