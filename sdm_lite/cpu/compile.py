"""Compilation of the CPU kernels: one decorator, with Numba's on-disk cache where there is a place for it."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import pathlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from numba import njit
from numba.core import event

from ..compile_notice import LOGGER, TEXT

_warned = False


def kernel(function):
    """Compile `function` with Numba at its first call: no GIL, IEEE division, cached on disk.

    Where no folder can hold the cache the kernel works all the same, and one warning says that every
    process will compile anew.
    """
    options = {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True}
    try:
        dispatcher = njit(cache=True, **options)(function)
    except RuntimeError as error:  # Numba's answer when neither __pycache__ nor the user's cache can be written
        _warn_once(str(error))
        return njit(**options)(function)
    _stamp_with_all_sources(dispatcher)
    return dispatcher


class SameTypes:
    """A kernel as one place calls it: with arguments that have the same types at every call.

    Numba looks at the types of all arguments to find the compiled code, which takes several microseconds where they are
    tuples of arrays: as long as a kernel over one token. Here it looks once.
    """

    looks_again = False  # True: every call is held to the first one's types (the tests do so)

    def __init__(self, kernel: Any):
        self._kernel = kernel
        self._types: tuple = ()
        self._code: Any = None

    def __call__(self, *arguments: Any) -> Any:
        """Run the kernel."""
        if self._code is None:
            types = self._types_of(arguments)
            self._kernel.compile(types)
            self._types, self._code = types, self._kernel.overloads[types].entry_point
        elif self.looks_again and self._types_of(arguments) != self._types:
            raise TypeError(f"{self._kernel.__name__}: {self._types_of(arguments)} after {self._types}")
        return self._code(*arguments)

    def _types_of(self, arguments: tuple) -> tuple:
        return tuple([self._kernel.typeof_pyval(x) for x in arguments])


@functools.lru_cache(maxsize=256)
def same_types(kernel: Any, *settled: Any) -> SameTypes:
    """Return the kernel for arguments whose types follow from what is `settled`: dtypes, and what is None."""
    return SameTypes(kernel)


class _Notice(event.Listener):
    """Logs the first compilation of a kernel of ours."""

    told = False

    def on_start(self, started: Any) -> None:
        ours = started.data["dispatcher"].py_func.__module__.startswith(__package__.partition(".")[0])
        if ours and not self.told:
            self.told = True
            LOGGER.info(TEXT)

    def on_end(self, ended: Any) -> None:
        pass


event.register("numba:compile", _Notice())


@contextlib.contextmanager
def compile_time() -> Iterator[Callable[[], float]]:
    """Give a function that returns the seconds that Numba has compiled for since the block began."""
    with event.install_listener("numba:compile", event.TimingListener()) as listener:
        yield lambda: listener.duration if listener.done else 0.0


def _warn_once(reason: str) -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            f"sdm_lite: compiled kernels cannot be kept on disk ({reason}); every process compiles them anew. "
            "Set NUMBA_CACHE_DIR to a writable folder.",
            UserWarning,
            stacklevel=4,
        )


def _stamp_with_all_sources(dispatcher) -> None:
    """Make a change of any file of this room invalidate the cached kernel, not of its own file alone."""
    cache_file = dispatcher._cache._cache_file
    cache_file._source_stamp = (cache_file._source_stamp, _DIGEST)


def _digest() -> str:
    digest = hashlib.sha256()
    for path in sorted(pathlib.Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


_DIGEST = _digest()


def inlined(function):
    """Compile `function` into the kernels that call it."""
    return njit(nogil=True, error_model="numpy", forceinline=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)(
        function
    )
