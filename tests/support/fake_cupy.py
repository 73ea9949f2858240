"""A stand-in for the few parts of CuPy that the CUDA room uses: memory is NumPy's, kernels run in the emulator.

What real CuPy refuses is refused here too: NumPy arrays among its own, and a silent copy to the host. Numba's kernels
run as Python. `install(monkeypatch)` puts it in CuPy's place and returns the module, whose `device` says what the
machine has and `launches` what has run; with `run = False` launches do nothing but be written down.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.machinery
import sys
import types
import weakref

import numpy as np
from emulated_cuda.run import emulate
from emulated_delta import SERVED

from sdm_lite.cuda_kernels import (
    access_statistics_numba,
    addressing,
    devices,
    hash_slots_numba,
    launch,
    log_plan_numba,
    modules,
    stream_numba,
)

_KEPT = ("shape", "dtype", "size", "ndim", "nbytes", "itemsize", "strides", "flags")
_METHODS = (
    "reshape",
    "astype",
    "view",
    "ravel",
    "copy",
    "sum",
    "any",
    "all",
    "clip",
    "max",
    "min",
    "transpose",
    "squeeze",
)


class OutOfMemoryError(MemoryError):
    pass


class CUDARuntimeError(RuntimeError):
    pass


class Array(np.lib.mixins.NDArrayOperatorsMixin):
    """cupy.ndarray over host memory; `owner` keeps borrowed memory alive."""

    def __init__(self, host: np.ndarray, owner=None):
        self.host, self.owner = np.asarray(host), owner
        self.device = _Device(0)

    def __getattr__(self, name):
        if name in _KEPT:
            return getattr(self.host, name)
        if name in _METHODS:
            return _wrapped(getattr(self.host, name), self.owner)
        raise AttributeError(name)

    @property
    def data(self):
        return types.SimpleNamespace(ptr=self.host.ctypes.data)

    @property
    def T(self):
        return Array(self.host.T, self.owner)

    def get(self):
        _MODULE.syncs += 1
        return self.host.copy()

    def item(self):
        _MODULE.syncs += 1
        return self.host.item()

    def fill(self, value):
        self.host.fill(value)

    def __bool__(self):
        return bool(self.item())

    def __int__(self):
        return int(self.item())

    def __len__(self):
        return len(self.host)

    def __getitem__(self, key):
        return Array(self.host[_host(key)], self.owner)

    def __setitem__(self, key, value):
        self.host[_host(key)] = _host(value)

    def __array__(self, *_, **__):
        raise TypeError("Implicit conversion to a NumPy array is not allowed.")

    def __array_ufunc__(self, ufunc, method, *inputs, **options):
        return _wrapped(getattr(ufunc, method))(*inputs, **options)

    def __dlpack__(self, **_):
        return self.host.__dlpack__()

    def __dlpack_device__(self):
        return (2, 0)


def _host(x):
    if isinstance(x, np.ndarray):
        raise TypeError("Unsupported type <class 'numpy.ndarray'>")
    if isinstance(x, (tuple, list)):
        return type(x)(_host(part) for part in x)
    return x.host if isinstance(x, Array) else x


def _wrapped(function, owner=None):
    def call(*inputs, **options):
        result = function(*(_host(x) for x in inputs), **{name: _host(x) for name, x in options.items()})
        if isinstance(result, tuple):
            return tuple(Array(part, owner) for part in result)
        return Array(result, owner) if isinstance(result, (np.ndarray, np.generic)) else result

    return call


class _Function:
    """A kernel of a RawModule; a launch runs it in the emulator."""

    def __init__(self, file: str, name: str):
        self.file, self.name, self.max_dynamic_shared_size_bytes = file, name, 48 << 10
        self.shared_size_bytes = 0

    def __call__(self, grid, block, args, *, shared_mem=0):
        limit = _MODULE.device["sharedMemPerBlockOptin"]
        assert shared_mem <= min(limit, self.max_dynamic_shared_size_bytes), "more shared memory than a block has"
        assert max(grid[0], 1) < 2**31 and all(size < 2**16 for size in grid[1:]), "a grid that no device takes"
        assert all(isinstance(a, (Array, np.generic)) for a in args), "CuPy takes its arrays and NumPy scalars"
        _MODULE.launches.append((self.name, tuple(grid), block[0], shared_mem, args))
        if not _MODULE.run:
            return
        hosts = [None if a is launch.NULL else a.host if isinstance(a, Array) else a for a in args]
        # the same programs as the kernels' own tests, and one for all of a small file
        built = _MODULE.schedule.get("build", "plain") == "plain"  # a sanitized program of one kernel compiles sooner
        together = SERVED.get(self.file, modules.INSTANCES[self.file] if self.file in _SMALL else ()) if built else ()
        emulate(
            self.file, self.name, grid=grid, block=block, args=hosts, shared_bytes=shared_mem, serve=together,
            **_MODULE.schedule,
        )  # fmt: skip


_SMALL = ("check_values.cu", "plan.cu", "embedding_bag_forward.cu", "embedding_bag_backward.cu")


class RawModule:
    def __init__(self, *, code, options, name_expressions):
        self.file = code.split('"')[1]  # of the first #line
        assert code == modules.source(self.file) and options == modules.OPTIONS
        self.names = name_expressions

    def get_function(self, name):
        assert name in self.names
        return _Function(self.file, name)


class _PythonKernel:
    """A kernel or device function of Numba, run by Python: thread after thread."""

    def __init__(self, function, threads):
        self.function, self.threads = function, threads

    def __call__(self, *args):
        return self.function(*args)

    def __getitem__(self, setting):
        grid, block, _ = setting

        def run(*args):
            with np.errstate(over="ignore"):  # hashes wrap
                for self.threads.now in range(grid * block):
                    self.function(*(_host(a) for a in args))

        return run


def _install_numba(monkeypatch):
    threads = types.SimpleNamespace(now=0)
    stand_in = types.SimpleNamespace(
        grid=lambda axes: threads.now,
        external_stream=lambda address: None,
        as_cuda_array=lambda x, sync: x,
        atomic=types.SimpleNamespace(add=np.add.at),
    )
    monkeypatch.setitem(sys.modules, "numba_cuda", types.ModuleType("numba_cuda"))
    sys.modules["numba_cuda"].__spec__ = importlib.machinery.ModuleSpec("numba_cuda", None)
    for module in (access_statistics_numba, hash_slots_numba, log_plan_numba, stream_numba):
        for name, found in list(vars(module).items()):
            if hasattr(found, "py_func"):
                monkeypatch.setattr(module, name, _PythonKernel(found.py_func, threads))
        monkeypatch.setattr(module, "cuda", stand_in)


class _Device:
    def __init__(self, number=None):
        self.id = _MODULE.current if number is None else number

    def __enter__(self):
        self.before, _MODULE.current = _MODULE.current, self.id

    def __exit__(self, *_):
        _MODULE.current = self.before


class _Stream(contextlib.nullcontext):
    def __init__(self, foreign=None):
        super().__init__()
        self.foreign, self.ptr = foreign, 0

    @classmethod
    def from_external(cls, foreign):
        foreign.__cuda_stream__()
        _MODULE.streams.append(foreign)
        return cls(foreign)

    def synchronize(self):
        _MODULE.syncs += 1

    def is_capturing(self):
        return _MODULE.capturing


@contextlib.contextmanager
def _using_allocator(allocator):
    before, _MODULE.allocator = _MODULE.allocator, allocator
    try:
        yield
    finally:
        _MODULE.allocator = before


class UnownedMemory:
    def __init__(self, ptr, size, owner, device_id):
        self.ptr, self.size, self.owner = ptr, size, owner


class MemoryPointer:
    def __init__(self, memory, offset):
        assert offset == 0
        self.memory = memory


def empty(shape, dtype=np.float64):
    """Memory full of ones' bits (NaN for floats): what a kernel does not write is seen."""
    size = int(np.prod(shape, dtype=object)) * np.dtype(dtype).itemsize
    if size > _MODULE.free:
        raise OutOfMemoryError(f"Out of memory allocating {size:,} bytes")
    if _MODULE.allocator is None or not size:
        host = np.empty(shape, dtype)
        owner = None
    else:
        owner = _MODULE.allocator(size).memory
        flat = (ctypes.c_ubyte * size).from_address(owner.ptr)
        host = np.frombuffer(flat, np.uint8).view(dtype).reshape(shape)
    host.reshape(-1).view(np.uint8)[:] = 0xFF
    _count(_MODULE, size)
    weakref.finalize(host, _count, _MODULE, -size)
    return Array(host, owner)


def _count(module, size):
    """Keep the bytes that are alive of what `empty` gave, and their peak."""
    module.held += size
    module.peak = max(module.peak, module.held)


def zeros(shape, dtype=np.float64):
    array = empty(shape, dtype)
    array.fill(0)
    return array


def asarray(x, dtype=None, order=None):
    """From the host too, as CuPy's: a copy to the device. A view of what has the CUDA array interface."""
    if hasattr(x, "__cuda_array_interface__"):
        return Array(x.host_view())
    return Array(np.array(x.host if isinstance(x, Array) else x, dtype=dtype, order=order, copy=None))


def ascontiguousarray(x, dtype=None):
    assert isinstance(x, Array), "a NumPy array came to CuPy"
    return Array(np.ascontiguousarray(x.host, dtype), x.owner)


def from_dlpack(x):
    assert x.__dlpack_device__()[0] in (1, 2)
    return Array(np.from_dlpack(x) if not isinstance(x, Array) else x.host, x)


class _Module(types.ModuleType):
    """What has no stand-in above is NumPy's function over host memory."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _wrapped(getattr(np, name))


_MODULE: _Module = None  # type: ignore[assignment]

H200 = {
    "name": b"NVIDIA H200", "major": 9, "minor": 0, "multiProcessorCount": 132, "sharedMemPerBlockOptin": 227 << 10,
    "sharedMemPerMultiprocessor": 228 << 10, "maxThreadsPerMultiProcessor": 2048,
}  # fmt: skip


def install(monkeypatch, device=H200, schedule=None) -> _Module:
    """Put the stand-in in CuPy's place for one test."""
    global _MODULE
    cupy = _MODULE = _Module("cupy")
    cupy.__spec__ = importlib.machinery.ModuleSpec("cupy", None)
    vars(cupy).update(
        ndarray=Array, RawModule=RawModule, empty=empty, zeros=zeros, asarray=asarray, from_dlpack=from_dlpack,
        ascontiguousarray=ascontiguousarray, device=dict(device), schedule=schedule or {}, launches=[], run=True,
        streams=[], current=0, syncs=0, allocator=None, capturing=False, free=float("inf"), held=0, peak=0,
    )  # fmt: skip
    cupy.cuda = types.SimpleNamespace(
        Device=_Device,
        Stream=_Stream,
        get_current_stream=_Stream,
        using_allocator=_using_allocator,
        UnownedMemory=UnownedMemory,
        MemoryPointer=MemoryPointer,
        runtime=types.SimpleNamespace(
            CUDARuntimeError=CUDARuntimeError,
            driverGetVersion=lambda: 13000,
            getDeviceCount=lambda: 1,
            getDeviceProperties=lambda number: cupy.device,
        ),
        nvrtc=types.SimpleNamespace(getVersion=lambda: (13, 0), getSupportedArchs=lambda: (75, 80, 90, 100, 120, 121)),
        compiler=types.SimpleNamespace(_use_ptx=False),
    )
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(modules, "_kernels", {})
    monkeypatch.setattr(modules, "_turns", {})
    devices.limits_of.cache_clear()
    addressing._on_device.cache_clear()
    _install_numba(monkeypatch)
    return cupy
