"""The errors that the library raises on a caller's mistake.

One base class, and below it a class for each kind of mistake that is also the built-in error a
Python user would expect (``except ValueError`` keeps working). Every message names the op, the
argument, what was expected, what came, and the fix: build it with :func:`message`.
"""

from __future__ import annotations


class SdmError(Exception):
    """Base class of every error that this library raises on purpose."""


class ShapeError(SdmError, ValueError):
    """An array has the wrong rank or size."""


class ValueRangeError(SdmError, ValueError):
    """A number, or an entry of an array, is outside what the operation allows."""


class SlotError(SdmError, IndexError, ValueError):
    """A slot is outside [0, N), or stands twice in one token's set."""


class DtypeError(SdmError, TypeError):
    """An array has a dtype, or an argument a type, that the operation does not take."""


class DeviceError(SdmError, ValueError):
    """Arrays lie on different devices, or on one that no ready room serves."""


class BackendError(SdmError, ImportError):
    """The room asked for is not ready here; the text says what it needs."""


class StateFull(SdmError, MemoryError):
    """A state would own more bytes than its `max_bytes`."""


class StateBusy(SdmError, RuntimeError):
    """A state is used from a second thread during a call."""


class FileError(SdmError, OSError):
    """A file cannot be read or written."""


class FileFormatError(SdmError, ValueError):
    """A file is damaged, or holds something else than what is asked of it."""


class DeviceMemoryError(SdmError, MemoryError):
    """A device has not the memory that a call needs; the text names the bytes and what would need fewer."""


def message(op: str, argument: str, expected: str, got: str, fix: str) -> str:
    """Return the one form that all error texts have.

    >>> message("product_key_topk", "k", "at most 9 slots", "10", "lower k or widen the factors")
    'product_key_topk: k: expected at most 9 slots, got 10. Fix: lower k or widen the factors.'
    """
    return f"{op}: {argument}: expected {expected}, got {got}. Fix: {fix}."
