"""What ends a command with one line: a user's mistake, or a package that is not installed."""

from __future__ import annotations

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
