"""Several runs side by side, each a process with one thread, watched through the files it writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import compile_notice
from .mistakes import CommandError
from .progress import Board
from .trainer import MEASURING, METRICS, PARENT_VARIABLE, StopRequest

#: each child computes with one thread: small models gain nothing from two, and two children need both cores
ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "NUMBA_NUM_THREADS": "1",
    "SDM_LITE_NUM_THREADS": "1",
}
LOG = "log.txt"
_POLL = 0.2


@dataclass
class Child:
    """One run: its name, its folder (with its settings in it) and what else to pass to the worker."""

    name: str
    folder: Path
    arguments: list[str]
    process: subprocess.Popen[bytes] = field(init=False)
    started: float = 0.0
    seen: int = field(default=-1)


def cores() -> int:
    """Return how many CPUs this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_children(children: list[Child], board: Board, stop: StopRequest) -> bool:
    """Run `children`, as many at a time as there are cores; return False when `stop` ended them early.

    Raises
    ------
    CommandError
        When a child fails, with the last line that it wrote.
    """
    waiting = list(children)
    running: list[Child] = []
    told = False
    try:
        while waiting or running:
            while waiting and len(running) < cores() and not stop:
                running.append(_start(waiting.pop(0)))
            if stop and not told:
                told = True
                waiting.clear()
                for child in running:
                    child.process.terminate()  # they save and end
            for child in list(running):
                _show(child, board)
                if child.process.poll() is not None:
                    running.remove(child)
                    _finish(child, board, stopping=bool(stop))
            time.sleep(_POLL)
    finally:
        for child in running:  # only after an error: let the others save, too
            child.process.terminate()
        for child in running:
            _wait(child.process)
    return not stop


def _wait(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(timeout=20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _start(child: Child) -> Child:
    # each child in a group of its own: Ctrl-C reaches this process, which tells them, once
    environment = {**os.environ, **ONE_THREAD, PARENT_VARIABLE: str(os.getpid())}
    with open(child.folder / LOG, "wb") as log:
        child.process = subprocess.Popen(
            [sys.executable, "-m", "sdm_lite.app.worker", str(child.folder.resolve()), *child.arguments],
            cwd=child.folder,  # -m looks for modules there first: a folder of the user's could hide the package
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    child.started = time.time()
    return child


def _show(child: Child, board: Board) -> None:
    """Show the last metrics of the child, or what it says it does otherwise."""
    path = child.folder / METRICS
    try:
        status = path.stat()
    except OSError:  # no step yet
        if last_line(child.folder / LOG) == compile_notice.TEXT:
            board.phase(child.name, compile_notice.TEXT)
        return
    if status.st_mtime < child.started:  # an earlier run's
        return
    if status.st_size == child.seen:
        _, found, what = last_line(child.folder / LOG).partition(MEASURING)
        if found:
            board.phase(child.name, found + what)
        return
    child.seen = status.st_size
    tail = _tail(path)
    if tail:
        last = tail[-1]
        loss, speed = (sum(line[key] for line in tail) / len(tail) for key in ("loss", "tokens_per_second"))
        board.update(child.name, last["progress"], last["step"], loss, speed)


def _finish(child: Child, board: Board, stopping: bool) -> None:
    code = child.process.returncode
    if code == 0:
        board.phase(child.name, "done", 1.0)
    elif not stopping:
        log = child.folder / LOG
        # code 2 is a mistake in one line; anything else is a fault, and its log says more
        more = "" if code == 2 else f" (ended with code {code}; see {log})"
        raise CommandError(f"{child.name}: {last_line(log) or 'it said nothing'}{more}")


def last_line(path: Path) -> str:
    """Return the last line of a log that is not empty."""
    try:
        lines = _last_bytes(path).decode("utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _last_bytes(path: Path, size: int = 8192) -> bytes:
    with open(path, "rb") as handle:
        handle.seek(max(0, path.stat().st_size - size))
        return handle.read()


def _tail(path: Path) -> list[dict[str, Any]]:
    """Return the last whole lines of a metrics file without reading all of it."""
    lines = []
    for line in _last_bytes(path).split(b"\n")[1:-1][-10:]:
        try:
            lines.append(json.loads(line))
        except ValueError:
            continue
    return lines
