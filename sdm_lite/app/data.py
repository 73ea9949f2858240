"""Bytes of text or code: found, split by file hash into training and held-out, cut into windows.

Every choice depends on the files' contents and on the seed alone, and the batch of a step on the seed
and the step alone: a resumed run needs no stored position to see the data it would have seen.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .mistakes import mistake

#: a byte between two files; files that hold it are taken for binary and left out
SEPARATOR = b"\0"
#: one file in HELD_OUT is held out; of a single file, its last 1/HELD_OUT
HELD_OUT = 20
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "node_modules"}


@dataclass(frozen=True)
class Corpus:
    """Training bytes and held-out bytes.

    Attributes
    ----------
    train, held_out : ndarray of uint8
        Files one after another, a zero byte between them.
    documents : list of ndarray of uint8
        The held-out files themselves.
    source : str
        What a user would recognise it by.
    files : int
        How many files there are in both.
    fingerprint : str
        A digest of all bytes and of the split; a resumed run must have the same.
    """

    train: np.ndarray
    held_out: np.ndarray
    documents: list[np.ndarray]
    source: str
    files: int
    fingerprint: str

    def windows(self, length: int, batch: int, seed: int, step: int) -> np.ndarray:
        """Return `batch` random windows of `length` + 1 training bytes, uint8 [batch, length + 1]."""
        generator = np.random.default_rng([seed, step])
        starts = generator.integers(0, len(self.train) - length, size=batch)
        return np.stack([self.train[start : start + length + 1] for start in starts])

    def held_out_windows(self, length: int, count: int) -> np.ndarray:
        """Return at most `count` evenly spaced windows of held-out bytes, uint8 [count, length + 1]."""
        room = len(self.held_out) - length - 1
        starts = np.unique(np.linspace(0, room, num=min(count, room // length + 1)).astype(np.int64))
        return np.stack([self.held_out[start : start + length + 1] for start in starts])

    def long_documents(self, length: int, count: int) -> np.ndarray:
        """Return the first `length` + 1 bytes of at most `count` held-out files that are long enough.

        Where no file is, windows of the held-out bytes stand in; the longest length that fits is used.
        """
        whole = [document[: length + 1] for document in self.documents if len(document) > length][:count]
        if whole:
            return np.stack(whole)
        length = min(length, len(self.held_out) - 1)
        return self.held_out_windows(length, count)


def load_corpus(command: str, path: str | None, length: int) -> Corpus:
    """Read the bytes under `path` (a file or a folder; None: this Python's standard library).

    Parameters
    ----------
    command : str
        For error texts.
    path : str or None
        Where to look.
    length : int
        The training length; both parts must hold at least one window of it.

    Returns
    -------
    Corpus

    Raises
    ------
    CommandError
        When nothing is there, it cannot be read, or it is too small.
    """
    root = Path(path) if path is not None else Path(sysconfig.get_paths()["stdlib"])
    suffix = ".py" if path is None else None
    if not root.exists():
        raise mistake(command, "--data", "a file or folder", f"{root}, which is not there", "check the path")
    try:
        documents = [read for read in map(_read, _find(root, suffix)) if read is not None]
    except OSError as error:
        raise mistake(command, "--data", "readable files", str(error), "check their permissions") from error
    source = str(root) if path is not None else f"the standard library of this Python ({root})"
    return _split(command, documents, source, length)


def _find(root: Path, suffix: str | None) -> Iterator[Path]:
    """Yield the files under `root` in a fixed order, without hidden, installed or compiled ones."""
    if root.is_file():
        yield root
        return
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in _SKIPPED_FOLDERS and not name.startswith("."))
        for name in sorted(names):
            file = Path(folder, name)
            if not name.startswith(".") and (suffix is None or name.endswith(suffix)) and file.is_file():
                yield file


def _read(path: Path) -> bytes | None:
    data = path.read_bytes()
    return None if not data or SEPARATOR in data else data


def _split(command: str, documents: list[bytes], source: str, length: int) -> Corpus:
    needed = 4 * (length + 2)
    total = sum(map(len, documents))
    if total < needed:
        got = f"{total} in {len(documents)} files of {source}"
        raise mistake(command, "--data", f"at least {needed} bytes of text", got, "name more text")
    if len(documents) == 1:
        cut = len(documents[0]) - max(length + 2, len(documents[0]) // HELD_OUT)
        train, held_out = [documents[0][:cut]], [documents[0][cut:]]
    else:
        # by content, so that a copy of a file lands on the same side
        hashes = [int.from_bytes(hashlib.sha256(document).digest()[:8], "big") for document in documents]
        held_out = [document for document, code in zip(documents, hashes) if code % HELD_OUT == 0]
        train = [document for document, code in zip(documents, hashes) if code % HELD_OUT != 0]
    corpus = _corpus(train, held_out, source)
    if min(len(corpus.train), len(corpus.held_out)) <= length + 1:
        # few files: hash order decides nothing useful, so cut the whole as if it were one file
        return _split(command, [b"\n".join(documents)], source, length)
    return corpus


def _corpus(train: list[bytes], held_out: list[bytes], source: str) -> Corpus:
    joined = [SEPARATOR.join(part) for part in (train, held_out)]
    digest = hashlib.sha256(joined[0])
    digest.update(SEPARATOR * 2 + joined[1])
    arrays = [np.frombuffer(part, dtype=np.uint8) for part in joined]
    documents = [np.frombuffer(document, dtype=np.uint8) for document in held_out]
    return Corpus(arrays[0], arrays[1], documents, source, len(train) + len(held_out), digest.hexdigest()[:16])
