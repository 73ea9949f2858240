"""What ends a command with one line: a user's mistake, or a package that is not installed."""

from __future__ import annotations

import errno
import importlib

from ..errors import BackendError, SdmError, message


class CommandError(SdmError, ValueError):
    """A mistake in what the user asked for; the command line prints its text and exits with code 2."""


def mistake(command: str, argument: str, expected: str, got: str, fix: str) -> CommandError:
    """Return the error for a wrong `argument` of `command`, in the one form that all error texts have.

    >>> str(mistake("train", "--steps", "at least 1", "0", "pass a larger number"))
    'train: --steps: expected at least 1, got 0. Fix: pass a larger number.'
    """
    return CommandError(message(command, argument, expected, got, fix))


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def system_mistake(command: str, error: Exception) -> CommandError:
    """Return the error for what the system refused while `command` ran: a full disk, a lost file, no memory.

    >>> str(system_mistake("train", OSError(28, "No space left on device", "run/metrics.jsonl")))
    'train: run/metrics.jsonl: expected room on the disk, got No space left on device. Fix: make room, then --resume.'
    """
    if not isinstance(error, OSError):
        fix = "lower the sizes, --batch or --length"
        return mistake(command, "memory", "enough for this model and batch", f"{error!s:.200}" or "too little", fix)
    name, reason = str(error.filename or "a file of the run"), error.strerror or str(error)
    if error.errno in _FULL:
        return mistake(command, name, "room on the disk", reason, "make room, then --resume")
    return mistake(command, name, "a file that can be read and written", reason, "check the path and its permissions")


def is_out_of_memory(error: RuntimeError) -> bool:
    """Return whether this is what torch raises where the CPU's memory ends (it has no class of its own)."""
    return "can't allocate memory" in str(error) or "not enough memory" in str(error)


def require(command: str, *packages: str) -> None:
    """Raise BackendError, naming the extra to install, unless every one of `packages` can be imported."""
    for name in packages:
        try:
            importlib.import_module(name)
        except ImportError as error:
            missing = error.name or name
            raise BackendError(
                message(command, missing, f"the package {missing}", "none that can be imported", EXTRA_FIX)
            ) from error


EXTRA_FIX = 'pip install "sdm-lite[cli]"'
