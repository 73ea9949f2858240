"""What a command says besides its results: that kernels are being compiled, and what its model will write."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from typing import Any

from ..compile_notice import LOGGER

#: a model of bytes that spends more bits on each than this writes noise; an untrained one spends 8
NOISE_BITS = 4.0
#: bytes of training below which a model is above that: "demo" ended with 5.1 bits on 51,200 bytes, with 2.8 on 122,880
FEW_BYTES = 100_000


@contextlib.contextmanager
def compiling_is_said() -> Iterator[None]:
    """Print to stderr what the library logs from level INFO on, above all that kernels are being compiled."""

    class Printer(logging.Handler):
        """Prints to whatever stderr is at the moment: a live display may have put its own in place."""

        def emit(self, record: logging.LogRecord) -> None:
            print(record.getMessage(), file=sys.stderr, flush=True)

    printer, level = Printer(logging.INFO), LOGGER.level
    LOGGER.addHandler(printer)
    LOGGER.setLevel(logging.INFO)
    try:
        yield
    finally:
        LOGGER.removeHandler(printer)
        LOGGER.setLevel(level)


def expectation(result: dict[str, Any]) -> str:
    """Return one line on what a model of bytes will write, from the result of its training.

    >>> expectation({"steps": 20, "bits_per_byte": 7.3})
    'what to expect: noise; after 20 steps it spends 7.3 bits on a byte (8: untrained). Train longer, or --preset small'
    """
    bits, steps = result["bits_per_byte"], f"{result['steps']:,} steps"
    if bits > NOISE_BITS:
        spent = f"after {steps} it spends {bits:.1f} bits on a byte (8: untrained)"
        return f"what to expect: noise; {spent}. Train longer, or --preset small"
    spent = f"after {steps} it spends {bits:.2f} bits on a byte"
    return f"what to expect: bytes that look like its data at a glance and mean nothing; {spent}"


def few_steps(record: dict[str, Any]) -> str | None:
    """Return one line where a checkpoint's model has seen so few bytes that it writes noise, else None."""
    settings = record.get("settings", {})
    try:
        seen = record["step"] * settings["length"] * settings["batch"]
    except (KeyError, TypeError):
        return None
    if seen >= FEW_BYTES:
        return None
    return f"what to expect: noise; this model was trained for {record['step']:,} steps, on {seen:,} bytes"
