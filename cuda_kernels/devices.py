"""What the CUDA room needs of the machine, said exactly where it is missing, and the limits of a device."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import Any, NamedTuple

from ..errors import BackendError, message

#: asynchronous copies to shared memory (cp.async) and the rounding to bf16 are instructions of Ampere and later
OLDEST = (8, 0)

_INSTALL = "pip install 'sdm-lite[cuda13]' (or [cuda12], for drivers older than 580)"


class Limits(NamedTuple):
    """What a launch may use of a device; bytes of shared memory are those of one block, and of a multiprocessor."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    shared_per_block: int
    shared_per_multiprocessor: int
    threads_per_multiprocessor: int = 2048


#: the published figures, for tests, compile checks and the paper model
KNOWN = {
    limits.name: limits
    for limits in (
        Limits("A100", (8, 0), 108, 163 << 10, 164 << 10),
        Limits("H100", (9, 0), 132, 227 << 10, 228 << 10),
        Limits("H200", (9, 0), 132, 227 << 10, 228 << 10),
        Limits("B200", (10, 0), 148, 227 << 10, 228 << 10),
        Limits("RTX 4090", (8, 9), 128, 99 << 10, 100 << 10, 1536),
        Limits("RTX 5090", (12, 0), 170, 99 << 10, 100 << 10, 1536),
    )
}


def cupy() -> Any:
    """Return CuPy, which is imported here only and at the first need of it."""
    return importlib.import_module("cupy")


def unavailable() -> str | None:
    """Return why no CUDA call can be served and what to do about it, or None where one can."""
    if importlib.util.find_spec("cupy") is None:
        return f"CuPy is not installed: {_INSTALL}"
    try:
        cp = cupy()
    except ImportError as error:
        return f"CuPy is installed but does not import ({error}): {_INSTALL}"
    runtime = cp.cuda.runtime
    driver = runtime.driverGetVersion()
    if not driver:
        return "no NVIDIA driver is loaded: install the driver, or use the cpu room"
    try:
        count = runtime.getDeviceCount()
    except runtime.CUDARuntimeError as error:
        return f"the driver (CUDA {_release(driver)}) does not serve this CuPy ({error}): {_INSTALL}"
    if not count:
        return "the driver shows no device: see nvidia-smi and CUDA_VISIBLE_DEVICES, or use the cpu room"
    if all(_too_old(limits_of(i)) for i in range(count)):
        return _too_old(limits_of(0))
    try:
        cp.cuda.nvrtc.getVersion()
    except (ImportError, RuntimeError) as error:
        return f"NVRTC, which compiles the kernels, is missing ({error}): {_INSTALL}"
    return None


def check_numba(op: str) -> None:
    """Raise BackendError where numba-cuda, which compiles some of the kernels, is not installed."""
    if importlib.util.find_spec("numba_cuda") is None:
        raise BackendError(message(op, "backend", "numba-cuda", "an environment without it", _INSTALL))


def device_unavailable(device: int) -> str | None:
    """Return why one device cannot be served, or None where it can."""
    limits = limits_of(device)
    cp = cupy()
    newest = max(cp.cuda.nvrtc.getSupportedArchs())
    major, minor = limits.capability
    # within a major version code for an older device runs on a newer one; across, only PTX does, which CuPy
    # makes when told to (for the newest architecture that NVRTC knows)
    if major > newest // 10 and not getattr(cp.cuda.compiler, "_use_ptx", False):
        return (
            f"{limits.name} has compute capability {major}.{minor} and NVRTC knows up to {newest // 10}.{newest % 10}: "
            "install a newer NVRTC, or set CUPY_COMPILE_WITH_PTX=1 before CuPy is imported"
        )
    return _too_old(limits)


@functools.lru_cache(maxsize=64)
def limits_of(device: int) -> Limits:
    """Return the limits of one device of this process, by its number."""
    found = cupy().cuda.runtime.getDeviceProperties(device)
    name = found["name"]
    return Limits(
        name.decode() if isinstance(name, bytes) else name,
        (found["major"], found["minor"]),
        found["multiProcessorCount"],
        found["sharedMemPerBlockOptin"],
        found["sharedMemPerMultiprocessor"],
        found["maxThreadsPerMultiProcessor"],
    )


def _release(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def _too_old(limits: Limits) -> str | None:
    if limits.capability >= OLDEST:
        return None
    (major, minor), (want, minor_want) = limits.capability, OLDEST
    return (
        f"{limits.name} has compute capability {major}.{minor} and the kernels need {want}.{minor_want} "
        "(asynchronous copies to shared memory): use a newer device or the cpu room"
    )
