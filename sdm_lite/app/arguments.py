"""What the options of a command may be: types for argparse, and errors of one line that suggest the likely word."""

from __future__ import annotations

import argparse
import difflib
import math
import re
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

#: counts and sizes end where 32-bit slots do
LARGEST = 2**31 - 1
LARGEST_SEED = 2**64 - 1
_UNKNOWN = re.compile(r"unrecognized arguments: (\S+)|invalid choice: '([^']*)'")


class Parser(argparse.ArgumentParser):
    """argparse with errors of one line."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does; a command refuses what it does not know itself, so that the error is about it."""
        namespace, unknown = super().parse_known_args(args, namespace)
        if unknown and not any(isinstance(action.choices, dict) for action in self._actions):
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return namespace, unknown

    def error(self, text: str) -> NoReturn:
        """Print the mistake, and what may have been meant, and end with code 2."""
        found = _UNKNOWN.search(text)
        if found:
            word = next(group for group in found.groups() if group is not None)
            near = difflib.get_close_matches(word.partition("=")[0], set(_words(self)), n=1)
            text += f"; did you mean {near[0]}?" if near else ""
        self.exit(2, f"{self.prog}: {' '.join(text.split())} (see {self.prog} --help)\n")


def _words(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield the options and choices of a parser."""
    for action in parser._actions:
        yield from action.option_strings
        yield from map(str, action.choices or ())


def whole(low: int, high: int = LARGEST) -> Callable[[str], int]:
    """Return the type of a whole number from `low` to `high`.

    >>> whole(1)("12")
    12
    """

    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"expected a whole number from {low} to {high}, got {text!r:.40}")
        return value

    return convert


def number(low: float, *, low_too: bool = False) -> Callable[[str], float]:
    """Return the type of a finite number above `low`, or from it (`low_too`)."""

    def convert(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (value > low or (low_too and value == low)) or math.isinf(value):
            word = "from" if low_too else "above"
            raise argparse.ArgumentTypeError(f"expected a finite number {word} {low:g}, got {text!r:.40}")
        return value

    return convert


def numbers(text: str) -> tuple[int, ...]:
    """Return whole numbers from 1 with commas between."""
    return tuple(whole(1)(part) for part in text.split(","))


def path(text: str) -> str:
    """Return the name of a file or folder."""
    if "\0" in text:
        raise argparse.ArgumentTypeError(f"expected a path without zero bytes, got {text!r:.40}")
    return text


#: of parameters, data and draws
seed: Callable[[str], Any] = whole(0, LARGEST_SEED)
