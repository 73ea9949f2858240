"""A small pool of threads for kernels that release the GIL.

Why not Numba's own threading layers: they abort the process when two Python threads call at once,
break forked children, and change torch's thread count. Here the calling thread always works too, so a
call makes progress whatever the workers do; a forked child starts with no workers and makes its own.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable

from ..errors import ValueRangeError, message

SMALL = 1 << 19  # numbers moved: below it one thread is done before others have woken (0.1 to 0.3 ms)

_tasks: queue.SimpleQueue[_Task] = queue.SimpleQueue()
_workers = 0
_lock = threading.Lock()


def thread_count() -> int:
    """Return SDM_LITE_NUM_THREADS, or else the number of CPUs that this process may use."""
    wanted = os.environ.get("SDM_LITE_NUM_THREADS")
    if not wanted:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if not wanted.isdigit() or int(wanted) < 1:
        raise ValueRangeError(
            message("sdm_lite", "SDM_LITE_NUM_THREADS", "a whole number from 1", repr(wanted), "set or unset it")
        )
    return int(wanted)


def threads_for(work: int) -> int:
    """Return how many threads to use where `work` numbers are moved, or operations of that cost done."""
    return 1 if work < SMALL else thread_count()


def run(job_count: int, function: Callable[[int, int], object], work: int) -> None:
    """Call ``function(lo, hi)`` on ranges that cover the jobs [0, job_count), on as many threads as `work` is worth.

    Which thread takes which range is open, so the results must not depend on it. The first exception
    is raised here, after every range that was begun has ended.
    """
    threads = min(threads_for(work), job_count)
    if threads <= 1:
        if job_count:
            function(0, job_count)
        return
    task = _Task(job_count, function, chunk=max(1, job_count // (4 * threads)))
    _ensure_workers(threads - 1)
    for _ in range(threads - 1):
        _tasks.put(task)
    task.work()
    task.ended.wait()
    if task.error is not None:
        raise task.error


class _Task:
    """One call of `run`: hands out ranges of jobs and knows when all of them have ended."""

    def __init__(self, count: int, function: Callable[[int, int], object], chunk: int):
        self.count, self.function, self.chunk = count, function, chunk
        self.begun = self.finished = 0
        self.error: BaseException | None = None
        self.lock = threading.Lock()
        self.ended = threading.Event()

    def work(self) -> None:
        while True:
            with self.lock:
                lo = self.begun
                hi = self.begun = min(lo + self.chunk, self.count)
            if lo == hi:
                return
            try:
                self.function(lo, hi)
            except BaseException as error:
                self.error = self.error or error
            with self.lock:
                self.finished += hi - lo
                if self.finished == self.count:
                    self.ended.set()


def _ensure_workers(count: int) -> None:
    global _workers
    with _lock:
        while _workers < count:
            threading.Thread(target=_serve, args=(_tasks,), name="sdm_lite", daemon=True).start()
            _workers += 1


def _serve(tasks: queue.SimpleQueue[_Task]) -> None:
    while True:
        tasks.get().work()


def _forget_workers() -> None:
    """Start a forked child with a pool of its own: the parent's threads are not in it."""
    global _tasks, _workers, _lock
    _tasks, _workers, _lock = queue.SimpleQueue(), 0, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_workers)
