"""Arrays, streams and memory of other frameworks on a GPU: views without a copy, and work in their queue."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from .devices import cupy


def view(x: Any) -> Any:
    """Return a CuPy view of an array on a GPU, by DLPack or the CUDA array interface."""
    if hasattr(x, "__dlpack__"):
        return cupy().from_dlpack(x)
    return cupy().asarray(x)


@contextlib.contextmanager
def borrowed(
    device: int, *, stream: Any = None, allocate: Callable[[int], tuple[int, Any]] | None = None
) -> Iterator[None]:
    """Work on a device, and with another framework's stream and memory where it gives them.

    Parameters
    ----------
    device : int
        Its number.
    stream : object with ``__cuda_stream__``, or None
        None for CuPy's current stream.
    allocate : callable or None
        Given a number of bytes > 0, returns (address, owner); the memory is free again when the owner is collected.
        None for CuPy's pool.
    """
    cp = cupy()

    def memory(size: int) -> Any:
        address, owner = allocate(max(size, 1))  # type: ignore[misc]
        return cp.cuda.MemoryPointer(cp.cuda.UnownedMemory(address, size, owner, device), 0)

    with contextlib.ExitStack() as stack:
        stack.enter_context(cp.cuda.Device(device))
        if stream is not None:
            stack.enter_context(cp.cuda.Stream.from_external(stream))
        if allocate is not None:
            stack.enter_context(cp.cuda.using_allocator(memory))
        yield
