"""One call at a time into a state."""

from __future__ import annotations

import threading

from .errors import StateBusy, message


class Alone:
    """Lets one call at a time into a state; a second one raises instead of waiting."""

    def __init__(self) -> None:
        self._lock, self._op = threading.Lock(), ""

    def __call__(self, op: str) -> Alone:
        """Name the call that is about to enter."""
        self._op = op
        return self

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            fix = "use a lock, or a fork for each thread"
            raise StateBusy(message(self._op, "state", "one call at a time", "a second one during the first", fix))

    def __exit__(self, *_: object) -> None:
        self._lock.release()
