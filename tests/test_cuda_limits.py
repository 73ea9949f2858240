"""The CUDA room's arithmetic, its errors and its reasons: no kernel runs here, with CuPy's stand-in or without."""

from __future__ import annotations

import importlib.util
import re
import sys
import threading

import fake_cupy
import numpy as np
import pytest

import sdm_lite
from sdm_lite import cuda_kernels, errors, rooms
from sdm_lite.cuda_kernels import addressing, devices, modules, shared_memory, tiling
from sdm_lite.cuda_kernels.call import plan_shared_bytes, plan_window
from sdm_lite.cuda_kernels.shared_memory import DeltaShape
from sdm_lite.rooms import DeltaInputs, DeltaOptions


@pytest.fixture
def cupy(monkeypatch):
    return fake_cupy.install(monkeypatch)


# ---- how launches are cut -----------------------------------------------------------------------------------------

SIZES = {"bf16": (2, 4), "float": (4, 4), "double": (8, 8)}


def cut(limits, direction, state, lanes, width, per_token=128):
    state_bytes, real_bytes = SIZES[state]

    def size(tile, rows, tokens):
        half = per_token // 2
        shape = DeltaShape(tile, state_bytes, real_bytes, half, half, 1, rows, tokens, 8 * state_bytes)
        if direction == "forward":
            return shared_memory.forward_bytes(shape)
        return shared_memory.backward_bytes(shape, per_slot=False)

    return tiling.choose(limits, lanes, width, per_token, size)


@pytest.mark.parametrize("device", devices.KNOWN)
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(("lanes", "width"), [(2, 2048), (2, 768), (16, 960), (64, 128), (1, 7)])
def test_cuts_fit_the_device_and_hold_a_token(device, direction, lanes, width):
    limits = devices.KNOWN[device]
    for state in ("bf16", "float"):
        found = cut(limits, direction, state, lanes, width)
        assert found.shared_bytes <= limits.shared_per_block
        assert found.row_budget >= 128 and found.token_budget >= 1
        assert found.row_budget < 65_535 and found.row_budget % 2 == 0
        blocks = lanes * -(-width // found.tile)
        assert found.tile == tiling.TILES[-1] or blocks >= limits.multiprocessors


def test_cuts_of_known_devices():
    """The paper model's shapes by hand: 2 lanes of 2048 columns are 128 blocks of 32, fewer than an H200's 132 SMs."""
    assert cut(devices.KNOWN["H200"], "forward", "bf16", 2, 2048)[:1] == (32,)
    assert cut(devices.KNOWN["H200"], "forward", "bf16", 16, 2048).tile == 64
    # 17 lanes of 64 columns: one block a multiprocessor, by its registers, and all of its shared memory
    assert cut(devices.KNOWN["H200"], "forward", "bf16", 17, 2048).shared_bytes > 200 << 10
    # 5 lanes of 1000 columns are 160 blocks of 32: two share a multiprocessor
    assert cut(devices.KNOWN["H200"], "forward", "bf16", 5, 1000).shared_bytes < 114 << 10
    h200, rtx = (cut(devices.KNOWN[name], "forward", "bf16", 2, 2048).row_budget for name in ("H200", "RTX 5090"))
    assert h200 > 2 * rtx  # 227 against 99 KB
    # 64-bit rows of M and G, twice, are more than a consumer's block has
    assert cut(devices.KNOWN["RTX 4090"], "backward", "double", 2, 2048) is None
    assert cut(devices.KNOWN["H100"], "backward", "double", 2, 2048) is not None


def test_a_device_with_nothing_to_spare_gets_no_cut():
    tiny = devices.Limits("tiny", (8, 0), 1, 16 << 10, 16 << 10)
    assert cut(tiny, "forward", "float", 1, 32) is None
    assert cut(tiny, "forward", "float", 1, 32, per_token=8) is not None


def test_windows_of_the_plan_fit_what_every_device_has():
    for rows in (2, 8, 128, 200, 512):
        window = plan_window(rows, 8192)
        assert window & (window - 1) == 0 and plan_shared_bytes(rows, window) <= 48 << 10
    assert plan_window(128, 1) == 1


def test_shared_memory_of_selection_by_hand():
    # k = 4 of 3 x 3 floats: pairs (i + 1)(j + 1) <= 4 with 3 columns: 3 + 2 + 1 = 6, chosen 4 entries of 12 bytes
    expected = 3 * (16 + 16) + 48 + 32 + 32 + 32
    assert addressing.forward_shared_bytes((3, 3), 4, 4) == expected
    assert addressing._candidates((3, 3), 4) == 6


# ---- past 2^31 ----------------------------------------------------------------------------------------------------


class Sized:
    """An array of which only shape and dtype exist."""

    def __init__(self, *shape, dtype=np.float32):
        self.shape, self.dtype, self.ndim = shape, np.dtype(dtype), len(shape)
        self.size = int(np.prod(shape, dtype=object))


def sized_call(batch, tokens, heads, width, writes, slots):
    token = (batch, tokens, heads)
    x = DeltaInputs(
        Sized(*token, width), Sized(*token, writes, dtype=np.int32), Sized(*token, writes), Sized(*token, 1),
        Sized(*token), Sized(*token, writes, dtype=np.int32), Sized(*token, writes),
    )  # fmt: skip
    return cuda_kernels.sparse_delta.calls.open_call(x, DeltaOptions(), slots)


def test_offsets_past_31_bits_reach_the_kernels_as_64(cupy):
    call = sized_call(batch=65, tokens=8192, heads=2, width=2048, writes=64, slots=2**20)
    assert call.lanes * call.slots * call.width > 2**31 and call.total * call.width > 2**31
    start = call.row_start
    assert start.dtype == np.int64 and int(start[-1]) == (call.lanes - 1) * 2**20
    assert call.total == 65 * 8192 * 2


def test_what_kernels_count_in_32_bits_is_refused(cupy):
    with pytest.raises(errors.ValueRangeError, match="2\\^31"):
        sized_call(batch=1, tokens=2**31, heads=1, width=1, writes=1, slots=8)
    call = sized_call(batch=64, tokens=2**19, heads=1, width=1, writes=64, slots=64)
    with pytest.raises(errors.ValueRangeError, match="split the batch"):
        cuda_kernels.log.open_log(call, DeltaOptions(restore="snapshot"), "-")


def test_grids_beyond_the_device_are_refused(cupy):
    from sdm_lite.cuda_kernels import launch

    with pytest.raises(errors.ValueRangeError, match="split the call"):
        launch.launch("plan.cu", "plan_chunks<256>", (2**31,), 256, ())
    with pytest.raises(errors.ValueRangeError, match="232449 bytes"):
        launch.launch("plan.cu", "plan_chunks<256>", (1,), 256, (), 232_449)
    launch.launch("plan.cu", "plan_chunks<256>", (0,), 256, ())  # nothing to do
    assert not cupy.launches


# ---- kernel files -------------------------------------------------------------------------------------------------


def test_sources_are_one_text_with_right_line_numbers():
    text = modules.source("sparse_delta_forward.cu")
    assert not re.search(r'#include "\w+\.cuh"', text) and "#include <" not in text
    assert text.count("struct RowEntry {") == 1  # each header once
    lines = text.splitlines()
    directives = [i for i, line in enumerate(lines) if line.startswith("#line")]
    assert len(directives) > 4
    for i, stop in zip(directives, [*directives[1:], len(lines)], strict=True):
        _, number, file = lines[i].split()
        original = modules.importlib.resources.files("sdm_lite.cuda_kernels").joinpath(file.strip('"')).read_text()
        original = original.replace("#pragma once\n", "\n").splitlines()
        for offset, line in enumerate(lines[i + 1 : stop]):
            if line and int(number) - 1 + offset < len(original):
                assert line == original[int(number) - 1 + offset] or line.startswith("#line")


def test_only_what_is_checked_can_be_asked_for(cupy):
    with pytest.raises(AssertionError, match="INSTANCES"):
        modules.kernel("decode_step.cu", "decode_step<float, 128, false>", 0)


def test_a_kernel_is_made_once(cupy):
    one = modules.kernel("plan.cu", "plan_links<256>", 0)
    assert modules.kernel("plan.cu", "plan_links<256>", 0) is one
    assert modules.kernel("plan.cu", "plan_links<256>", 1) is not one
    assert one.max_dynamic_shared_size_bytes == 227 << 10


def test_a_training_call_compiles_its_modules_side_by_side(cupy, monkeypatch):
    """All are asked for before the first is done: a barrier that one thread alone would never pass."""
    cupy.run = False
    barrier, files = threading.Barrier(6, timeout=20), []

    class Module(fake_cupy.RawModule):
        def __init__(self, **options):
            super().__init__(**options)
            files.append((self.file, cupy.cuda.Device().id))
            barrier.wait()

    monkeypatch.setattr(cupy, "RawModule", Module)
    inputs, state = call_of(cupy)
    options = DeltaOptions(restore="snapshot")
    saved = cuda_kernels.sparse_delta_forward(inputs, state, options, save=True)[2]
    expected = {"sparse_delta_forward.cu", "sparse_delta_backward.cu", "sum_partials.cu", "plan.cu"}
    assert {file for file, _ in files} == {*expected, "sparse_delta_gates.cu"} and len(files) == 6
    dreadings = cupy.zeros(inputs.values.shape, np.float32)
    cuda_kernels.sparse_delta_backward(inputs, options, saved, dreadings, None, state.shape)
    assert len(files) == 6, "the backward compiled something that its forward could have"


def test_an_error_of_one_module_reaches_the_caller(cupy, monkeypatch):
    def refuse(**options):
        raise RuntimeError("NVRTC refuses")

    monkeypatch.setattr(cupy, "RawModule", refuse)
    with pytest.raises(RuntimeError, match="NVRTC refuses"):
        modules.prepare([("plan.cu", "plan_rows<256>"), ("sum_partials.cu", "sum_partials<float, false>")], 0)
    assert not modules._kernels


# ---- what is missing ----------------------------------------------------------------------------------------------


def reason():
    found = sdm_lite.backends()
    assert found["reference"] == found["cpu"] == "ready"
    with pytest.raises(errors.BackendError, match=re.escape(found["cuda"])):
        rooms.room("cuda", "op")
    return found["cuda"]


def test_without_cupy(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "cupy" else find(name))
    assert "CuPy is not installed" in reason() and "pip install" in reason()


def test_with_a_broken_cupy(cupy, monkeypatch):
    monkeypatch.setattr(devices, "cupy", lambda: importlib.import_module("cupy.no_such_module"))
    assert "does not import" in reason()


def test_without_a_driver(cupy):
    cupy.cuda.runtime.driverGetVersion = lambda: 0
    assert "no NVIDIA driver" in reason()


def test_with_an_old_driver(cupy):
    def refuse():
        raise fake_cupy.CUDARuntimeError("cudaErrorInsufficientDriver")

    cupy.cuda.runtime.getDeviceCount = refuse
    cupy.cuda.runtime.driverGetVersion = lambda: 12020
    assert "CUDA 12.2" in reason() and "cuda12" in reason()


def test_without_a_device(cupy):
    cupy.cuda.runtime.getDeviceCount = lambda: 0
    assert "no device" in reason()


def test_with_an_old_device(cupy):
    cupy.device.update(name=b"Tesla T4", major=7, minor=5)
    assert "Tesla T4" in reason() and "8.0" in reason() and "asynchronous copies" in reason()


def test_without_nvrtc(cupy):
    def refuse():
        raise RuntimeError("libnvrtc.so not found")

    cupy.cuda.nvrtc.getVersion = refuse
    assert "NVRTC" in reason() and "pip install" in reason()


def test_a_device_newer_than_nvrtc_needs_ptx(cupy, monkeypatch):
    cupy.device.update(name=b"Next", major=13, minor=0)
    with pytest.raises(errors.BackendError, match="CUPY_COMPILE_WITH_PTX"):
        modules.kernel("plan.cu", "plan_links<256>", 0)
    monkeypatch.setattr(cupy.cuda.compiler, "_use_ptx", True)
    assert modules.kernel("plan.cu", "plan_links<256>", 0)


@pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="CuPy is not installed")
def test_real_cupy_without_a_driver_says_so():
    import cupy

    if cupy.cuda.runtime.driverGetVersion():
        pytest.skip("this machine has a driver")
    assert "no NVIDIA driver" in reason()


def test_numba_cuda_is_named_where_it_is_needed(cupy, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "numba_cuda" else find(name))
    with pytest.raises(errors.BackendError, match="numba-cuda"):
        sdm_lite.hash_slots(cupy.asarray(np.arange(3)), 8, 2)


# ---- devices of arrays --------------------------------------------------------------------------------------------


def test_host_arrays_do_not_go_to_the_cuda_room_nor_device_arrays_to_another(cupy):
    scores = np.zeros((2, 8), np.float32)
    with pytest.raises(errors.DeviceError, match="arrays on cpu"):
        sdm_lite.product_key_topk(scores, 2, backend="cuda")
    with pytest.raises(errors.DeviceError, match="arrays on cuda:0"):
        sdm_lite.product_key_topk(cupy.asarray(scores), 2, backend="cpu")


def test_devices_do_not_mix(cupy):
    x = [cupy.asarray(np.zeros(shape, dtype)) for shape, dtype in ARGUMENTS]
    x[4].device = fake_cupy._Device(1)
    with pytest.raises(errors.DeviceError, match="beta: expected an array on cuda:0, got this array is on cuda:1"):
        sdm_lite.sparse_delta_rule(*x)
    x[4] = np.zeros(ARGUMENTS[4][0], np.float32)
    with pytest.raises(errors.DtypeError, match="all of one kind"):
        sdm_lite.sparse_delta_rule(*x)


TOKEN = (1, 3, 2)
ARGUMENTS = [
    ((*TOKEN, 5), np.float32), ((*TOKEN, 2), np.int32), ((*TOKEN, 2), np.float32), (TOKEN, np.float32),
    (TOKEN, np.float32), ((*TOKEN, 2), np.int32), ((*TOKEN, 2), np.float32), ((1, 2, 8, 5), np.float32),
]  # fmt: skip


def test_calls_run_on_the_device_of_their_arrays(cupy):
    cupy.run = False
    scores = cupy.asarray(np.zeros((2, 8), np.float32))
    scores.device = fake_cupy._Device(1)
    seen = []
    cupy.ascontiguousarray = lambda x, dtype=None: seen.append(cupy.current) or x
    sdm_lite.product_key_topk(scores, 2)
    assert seen == [1] and cupy.current == 0


# ---- memory and graphs --------------------------------------------------------------------------------------------


def call_of(cupy):
    x = [cupy.asarray(np.zeros(shape, dtype)) for shape, dtype in ARGUMENTS]
    x[3] = x[3][..., None]
    return DeltaInputs(*x[:7]), x[7]


def test_out_of_memory_names_the_bytes_and_what_needs_fewer(cupy):
    cupy.run = False
    inputs, state = call_of(cupy)
    cupy.free = 1 << 20
    big = cupy.zeros((1, 2, 4096, 5), np.float32)
    cupy.free = 100_000
    with pytest.raises(errors.DeviceMemoryError, match="163,840 bytes.*sparse_delta_rule_"):
        cuda_kernels.sparse_delta_forward(inputs, big, DeltaOptions(), final=True)
    cupy.free = 350  # the table has 320 bytes, the log 12 rows of 32
    with pytest.raises(MemoryError, match='log of overwritten rows.*384 bytes.*restore="invert"'):
        cuda_kernels.sparse_delta_forward(inputs, state, DeltaOptions(restore="snapshot"), save=True)


def test_a_capture_waits_for_nothing(cupy):
    cupy.run = False
    inputs, state = call_of(cupy)
    cupy.capturing, cupy.syncs = True, 0
    cuda_kernels.sparse_delta_update(inputs, state, DeltaOptions())
    for options in (DeltaOptions(restore="snapshot"), DeltaOptions(state_dtype="bfloat16")):
        table = state if options.state_dtype == "float32" else cupy.zeros(state.shape, np.uint16)
        _, _, saved = cuda_kernels.sparse_delta_forward(inputs, table, options, save=True)
        dreadings = cupy.zeros(inputs.values.shape, np.float32)
        cuda_kernels.sparse_delta_backward(inputs, options, saved, dreadings, None, state.shape)
    assert cupy.syncs == 0
    for restore in ("hybrid", "invert"):
        with pytest.raises(errors.BackendError, match='restore="snapshot"'):
            cuda_kernels.sparse_delta_forward(inputs, state, DeltaOptions(restore=restore), save=True)
    with pytest.raises(errors.BackendError, match="check=False"):
        cuda_kernels.values_are_fine(inputs, 8)


def test_planning_a_log_waits_once(cupy, monkeypatch):
    """For the size of the log; Numba, which else waits for the stream at every array, is told not to."""
    stand_in, trusted = cuda_kernels.log.cupy(), []
    inputs, state = call_of(cupy)
    stream_numba = importlib.import_module("sdm_lite.cuda_kernels.stream_numba")
    monkeypatch.setattr(stream_numba.cuda, "as_cuda_array", lambda x, sync: trusted.append(sync) or x)
    call = cuda_kernels.call.open_call(inputs, DeltaOptions(), 8)
    stand_in.syncs = 0
    cuda_kernels.log.open_log(call, DeltaOptions(restore="invert"), "-")
    assert stand_in.syncs == 1 and len(trusted) == 15 and not any(trusted)


def test_unusual_sizes_are_refused_with_the_fix(cupy):
    inputs, state = call_of(cupy)
    slots, weights = (cupy.zeros((*TOKEN, 0), dtype) for dtype in (np.int32, np.float32))
    none = inputs._replace(read_slots=slots, read_weights=weights, write_slots=slots, write_weights=weights)
    with pytest.raises(errors.ValueRangeError, match="a write or a read.*use the cpu room"):
        cuda_kernels.sparse_delta_forward(none, state, DeltaOptions())
    cupy.device.update(sharedMemPerBlockOptin=2 << 10, sharedMemPerMultiprocessor=3 << 10)
    cupy.run = False
    devices.limits_of.cache_clear()
    with pytest.raises(errors.ValueRangeError, match="lower W and R"):
        cuda_kernels.sparse_delta_forward(inputs, state, DeltaOptions(restore="snapshot"), save=True)


def test_importing_the_room_imports_no_cupy():
    import subprocess

    code = "import sys, sdm_lite.cuda_kernels; sys.exit(bool({'cupy', 'torch', 'numba'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
