"""Requirements R10 to R12: threads, forks, read-only folders, and what is compiled when."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys
import threading

import cases
import numpy as np
import pytest

import sdm_lite
from sdm_lite.cpu import memory

pytestmark = pytest.mark.usefixtures("threads_at_any_size")

ROOT = pathlib.Path(__file__).resolve().parent.parent

# a small case that is large enough (2^16 elements touched) for the pool to hand out work
BIG = cases.DeltaFields("environment", B=2, T=40, H=2, N=256, D=64, W=16, R=16)

# run in a subprocess: a small case through the public names, and what was compiled for it or loaded from disk
PROBE = """
import hashlib, json, sys, time
import numpy as np
start = time.process_time()
import sdm_lite
rng = np.random.default_rng(0)
T = int(sys.argv[1])
values = rng.standard_normal((1, T, 2, 16), dtype=np.float32)
scores = rng.standard_normal((1, T, 2, 16), dtype=np.float32)
slots = np.argsort(rng.random((1, T, 2, 64)), axis=-1)[..., :8].astype(np.int32)
weights = rng.standard_normal((1, T, 2, 8), dtype=np.float32)
beta = rng.uniform(0, 1, (1, T, 2)).astype(np.float32)
state = np.zeros((1, 2, 64, 16), np.float32)
call = [values, slots, weights, -beta, beta, slots, weights, state]
readings = sdm_lite.sparse_delta_rule_(*call)
first = time.process_time() - start

def dispatchers():
    from numba.core.dispatcher import Dispatcher
    found = {}
    for name, module in list(sys.modules.items()):
        if name.startswith("sdm_lite"):
            found.update((id(x), x) for x in list(vars(module).values()) if isinstance(x, Dispatcher))
    return found.values()

def loaded():
    return sum(sum(d.stats.cache_hits.values()) for d in dispatchers())

def compiled():
    return sum(len(d.signatures) for d in dispatchers()) - loaded()

def digest():
    return hashlib.sha256(readings.tobytes() + state.tobytes()).hexdigest()
"""
REPORT = """
print(json.dumps({"first": first, "compiled": compiled(), "loaded": loaded(), "digest": digest()}))
"""
# the longest compilation is the selection's: only the tests about compiling pay for it
BOTH = "sdm_lite.product_key_topk(scores, 8)\n"


def run_probe(
    code: str, *, tokens: int = 16, cwd: pathlib.Path, before: str = "", **environment: str
) -> tuple[dict, str]:
    """Run `before`, the probe and `code` in a fresh process; return the JSON it prints and what went to stderr."""
    command = [sys.executable, "-c", before + PROBE + code, str(tokens)]
    variables = {**os.environ, **environment}
    result = subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout), result.stderr


def run_case(case: cases.Case) -> tuple[bytes, bytes]:
    """Return the bits of the readings and of the final state."""
    readings, final = sdm_lite.sparse_delta_rule(*case.arguments(), output_final_state=True)
    return readings.tobytes(), final.tobytes()


# ---- R10: threads and forks ---------------------------------------------------------------------------------------


def test_four_threads_at_once_give_the_same_bits():
    case = cases.make_case(BIG, dtype=np.float32)
    want = run_case(case)
    wrong = []

    def caller():
        for _ in range(25):
            if run_case(case) != want:
                wrong.append(threading.current_thread().name)

    callers = [threading.Thread(target=caller) for _ in range(4)]
    for thread in callers:
        thread.start()
    for thread in callers:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in callers)
    assert not wrong


def test_thread_count_does_not_change_a_bit(monkeypatch):
    case = cases.make_case(BIG, dtype=np.float32)
    results = set()
    for count in ("1", "2", "3", "5"):
        monkeypatch.setenv("SDM_LITE_NUM_THREADS", count)
        results.add(run_case(case))
    assert len(results) == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # forking a process with threads is the point here
def test_forked_workers_work_after_use_in_the_parent(monkeypatch):
    monkeypatch.setenv("SDM_LITE_NUM_THREADS", "2")
    case = cases.make_case(BIG, dtype=np.float32)
    want = run_case(case)  # the parent's pool has threads by now
    children = []
    for _ in range(2):
        child = os.fork()
        if child == 0:
            ok = False
            try:
                ok = run_case(case) == want and run_case(case) == want
            finally:
                os._exit(0 if ok else 1)
        children.append(child)
    deadline = threading.Event()
    codes = []
    for child in children:
        for _ in range(600):  # a deadlock must not hang the test: 60 seconds, then an end
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                codes.append(os.waitstatus_to_exitcode(status))
                break
            deadline.wait(0.1)
        else:
            os.kill(child, 9)
            os.waitpid(child, 0)
            codes.append("hung")
    assert codes == [0, 0]
    assert run_case(case) == want  # and the parent goes on


def test_forked_dataloader_workers():
    torch = pytest.importorskip("torch")
    case = cases.make_case(BIG, dtype=np.float32)
    want = np.frombuffer(run_case(case)[0], np.float32)

    class Readings(torch.utils.data.Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            return torch.from_numpy(np.frombuffer(run_case(case)[0], np.float32).copy())

    loader = torch.utils.data.DataLoader(Readings(), num_workers=2, multiprocessing_context="fork", timeout=60)
    batches = list(loader)
    assert len(batches) == 4
    assert all(np.array_equal(batch[0].numpy(), want) for batch in batches)


def test_torch_keeps_its_thread_count(tmp_path):
    pytest.importorskip("torch")
    code = """
counts = [torch.get_num_threads(), torch.get_num_interop_threads()]
tensors = [torch.from_numpy(x) for x in call]
tensors[0].requires_grad_()
sdm_lite.sparse_delta_rule(*tensors)[0].sum().backward()
counts += [torch.get_num_threads(), torch.get_num_interop_threads()]
print(json.dumps(counts))
"""
    set_first = "import torch\ntorch.set_num_threads(3)\ntorch.set_num_interop_threads(5)\n"
    counts, _ = run_probe(code, cwd=tmp_path, before=set_first, OMP_NUM_THREADS="1", SDM_LITE_NUM_THREADS="2")
    assert counts == [3, 5, 3, 5]


# ---- R12: what is compiled, and when ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def warm_cache(tmp_path_factory):
    """A cache folder that one process has made and filled, that process's report, and what it said."""
    parent = tmp_path_factory.mktemp("numba")
    folder = parent / "not" / "there" / "yet"
    return folder, *run_probe(BOTH + REPORT, cwd=parent, NUMBA_CACHE_DIR=str(folder))


def test_missing_cache_folder_is_made_in_silence(warm_cache):
    folder, report, errors = warm_cache
    assert report["compiled"] > 0  # else the counters below count nothing
    assert report["loaded"] == 0
    assert any(folder.rglob("*.nbc"))
    assert not errors


def test_second_process_starts_warm(warm_cache, tmp_path):
    folder, cold, _ = warm_cache
    warm, _ = run_probe(BOTH + REPORT, cwd=tmp_path, NUMBA_CACHE_DIR=str(folder))
    assert warm["compiled"] == 0
    assert warm["loaded"] > 0
    assert warm["digest"] == cold["digest"]
    # import and first call; seconds of this process, since those of the clock also count what else the machine does
    assert warm["first"] < 2


def test_a_hundred_lengths_are_one_compilation(warm_cache, tmp_path):
    code = (
        BOTH
        + """
before = compiled(), loaded()
for T in range(1, 101):
    *inputs, state = [np.ascontiguousarray(np.resize(x, (1, T, *x.shape[2:]))) for x in call[:7]] + [state]
    sdm_lite.product_key_topk(np.resize(scores, (T, 16)), 1 + T % 8)
    sdm_lite.sparse_delta_rule_(*inputs, state)
print(json.dumps([before, (compiled(), loaded())]))
"""
    )
    (before, after), _ = run_probe(code, cwd=tmp_path, NUMBA_CACHE_DIR=str(warm_cache[0]))
    assert after == before


# ---- R11: imports anywhere ----------------------------------------------------------------------------------------


@pytest.fixture
def package_without_a_cache(tmp_path):
    """A copy of the installed package in which no cache folder can be made.

    A file stands where the folder would be made, which stops root as well, whom permissions do not.
    """
    package = tmp_path / "site" / "sdm_lite"
    for source, target in (("sdm_lite", package), ("autograd", package / "autograd")):
        shutil.copytree(ROOT / source, target, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "cuda_kernels", package / "cuda_kernels", ignore=shutil.ignore_patterns("__pycache__"))
    for folder in [package, *(path for path in package.rglob("*") if path.is_dir())]:
        (folder / "__pycache__").touch()
    return package.parent


def test_no_place_for_a_cache_costs_one_warning(package_without_a_cache, warm_cache):
    nowhere = {"HOME": os.devnull, "XDG_CACHE_HOME": os.devnull + "/cache", "NUMBA_CACHE_DIR": ""}
    path = {"PYTHONPATH": str(package_without_a_cache), "PYTHONDONTWRITEBYTECODE": "1", "PYTHONWARNINGS": "always"}
    code = REPORT + "assert 'site' in sdm_lite.__file__"
    report, errors = run_probe(code, cwd=package_without_a_cache, **nowhere, **path)
    assert report["digest"] == warm_cache[1]["digest"]
    assert errors.count("UserWarning: sdm_lite") == 1, errors
    assert "NUMBA_CACHE_DIR" in errors  # the way out


def test_works_without_torch_and_cupy(warm_cache, tmp_path):
    # None in sys.modules makes an import of that name fail, as if it were not installed
    hide = "import sys\nsys.modules.update(dict.fromkeys(('torch', 'cupy', 'rich', 'matplotlib', 'safetensors')))\n"
    code = """
import sdm_lite.autograd
try:
    sdm_lite.sparse_delta_rule_(*call, backend="cuda")
except sdm_lite.BackendError as error:
    print(json.dumps({"rooms": sdm_lite.backends(), "error": str(error)}))
"""
    report, _ = run_probe(code, cwd=tmp_path, before=hide, NUMBA_CACHE_DIR=str(warm_cache[0]))
    assert report["rooms"]["reference"] == report["rooms"]["cpu"] == "ready"
    assert report["rooms"]["cuda"] in report["error"]
    assert "sparse_delta_rule_" in report["error"]


# ---- worked case 12, the rest -------------------------------------------------------------------------------------


def test_read_only_state_is_refused_and_unchanged():
    case = cases.make_case("plain", dtype=np.float32)
    state = case.state.copy()
    state.flags.writeable = False
    before = state.tobytes()
    with pytest.raises(ValueError, match="state.*read-only"):
        sdm_lite.sparse_delta_rule_(*case.arguments()[:7], state)
    assert state.tobytes() == before


def test_read_only_inputs_are_fine():
    case = cases.make_case("plain", dtype=np.float32)
    want = run_case(case)
    for array in case.arguments():
        array.flags.writeable = False
    assert run_case(case) == want


@pytest.mark.parametrize("count", [1 << 16, 1 << 20])
def test_large_own_arrays_begin_on_a_cache_line(count):
    for _ in range(2):  # the second time from what was kept
        array = memory.empty((count, 3), np.dtype(np.float32))
        assert array.shape == (count, 3) and array.flags.c_contiguous and array.ctypes.data % 64 == 0
        del array
