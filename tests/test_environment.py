"""Requirements R10 to R12: threads, forks, read-only folders, and what is compiled when."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import stat
import subprocess
import sys
import threading

import cases
import numpy as np
import pytest

import sdm_lite

ROOT = pathlib.Path(__file__).resolve().parent.parent

# a small case that is large enough (2^16 elements touched) for the pool to hand out work
BIG = cases.DeltaFields("environment", B=2, T=40, H=2, N=256, D=64, W=16, R=16)

# run in a subprocess: the same small case through the public names, with a digest of the result and of what was compiled
PROBE = """
import hashlib, json, sys, time
import numpy as np
start = time.perf_counter()
import sdm_lite
imported = time.perf_counter()
rng = np.random.default_rng(0)
B, T, H, N, D, W = 1, int(sys.argv[1]), 2, 64, 16, 8
values = rng.standard_normal((B, T, H, D), dtype=np.float32)
scores = rng.standard_normal((B, T, H, 16), dtype=np.float32)
weights, slots = sdm_lite.product_key_topk(scores, W)
beta = rng.uniform(0, 1, (B, T, H)).astype(np.float32)
state = np.zeros((B, H, N, D), np.float32)
readings = sdm_lite.sparse_delta_rule_(values, slots, weights, -beta, beta, slots, weights, state)
first = time.perf_counter()

def dispatchers():
    from numba.core.dispatcher import Dispatcher
    return {
        id(value): value
        for name, module in list(sys.modules.items()) if name.startswith("sdm_lite")
        for value in list(vars(module).values()) if isinstance(value, Dispatcher)
    }.values()

def compiled():
    # a kernel that was loaded from disk counts as a hit, one that was compiled as a miss or (without a cache) neither
    return sum(len(d.signatures) - sum(d.stats.cache_hits.values()) for d in dispatchers())

def loaded():
    return sum(sum(d.stats.cache_hits.values()) for d in dispatchers())
"""
REPORT = """
digest = hashlib.sha256(readings.tobytes() + state.tobytes()).hexdigest()
report = {"import": imported - start, "first": first - start, "compiled": compiled(), "loaded": loaded(), "digest": digest}
print(json.dumps(report))
"""


def run_probe(
    code: str, *arguments: str, environment: dict[str, str] | None = None, user: int | None = None, cwd: pathlib.Path
) -> tuple[dict, str]:
    """Run the probe followed by `code` in a fresh process; return its report and what went to stderr."""
    command = [sys.executable, "-c", PROBE + code, *arguments]
    options = {"user": user} if user is not None else {}
    result = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=120,
        **options,
    )
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


@pytest.mark.parametrize("count", [1, 2])
def test_torch_keeps_its_thread_count(tmp_path, count):
    pytest.importorskip("torch")
    code = f"""
import torch
torch.set_num_threads({count})
before = torch.get_num_threads(), torch.get_num_interop_threads()
tensors = [torch.from_numpy(x) for x in (values, slots, weights, -beta, beta, slots, weights, state)]
tensors[0].requires_grad_()
sdm_lite.sparse_delta_rule(*tensors)[0].sum().backward()
after = torch.get_num_threads(), torch.get_num_interop_threads()
print(json.dumps({{"before": before, "after": after}}))
"""
    report, _ = run_probe(code, "16", cwd=tmp_path)
    assert report["before"] == report["after"]
    assert report["before"][0] == count


# ---- R12: what is compiled, and when ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def warm_cache(tmp_path_factory):
    """A cache folder that one process has filled, and that process's report."""
    folder = tmp_path_factory.mktemp("numba")
    report, _ = run_probe(REPORT, "16", environment={"NUMBA_CACHE_DIR": str(folder)}, cwd=folder)
    return folder, report


def test_first_process_compiles_and_says_nothing(warm_cache):
    _, report = warm_cache
    assert report["compiled"] > 0  # else the counters below count nothing
    assert report["loaded"] == 0


def test_second_process_starts_warm(warm_cache, tmp_path):
    folder, cold = warm_cache
    runs = [run_probe(REPORT, "16", environment={"NUMBA_CACHE_DIR": str(folder)}, cwd=tmp_path)[0] for _ in range(2)]
    assert [run["compiled"] for run in runs] == [0, 0]
    assert [run["loaded"] for run in runs] == [cold["compiled"]] * 2
    assert {run["digest"] for run in runs} == {cold["digest"]}
    # import and both ops; the better of two, since other work can fall on one of them
    assert min(run["first"] for run in runs) < 2


def test_a_hundred_lengths_are_one_compilation(warm_cache, tmp_path):
    folder, _ = warm_cache
    code = """
before = compiled() + loaded()
for T in range(1, 101):
    x = [np.ascontiguousarray(np.resize(a, (1, T, *a.shape[2:]))) for a in (values, slots, weights, -beta, beta)]
    sdm_lite.product_key_topk(scores.reshape(-1, 16)[:T], 1 + T % 8)
    sdm_lite.sparse_delta_rule_(*x, x[1], x[2], state)
print(json.dumps({"before": before, "after": compiled() + loaded()}))
"""
    report, _ = run_probe(code, "16", environment={"NUMBA_CACHE_DIR": str(folder)}, cwd=tmp_path)
    assert report["after"] == report["before"]


# ---- R11: imports anywhere ----------------------------------------------------------------------------------------


def copy_of_the_package(folder: pathlib.Path) -> pathlib.Path:
    """Lay the three source folders out as they are installed, as plain files."""
    target = folder / "site" / "sdm_lite"
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "sdm_lite", target, ignore=ignore)
    for name in ("autograd", "cuda_kernels"):
        shutil.copytree(ROOT / name, target / name, ignore=ignore)
    return target.parent


def make_read_only(folder: pathlib.Path) -> None:
    for path in [folder, *folder.rglob("*")]:
        path.chmod(path.stat().st_mode & ~(stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH))


def make_writable(folder: pathlib.Path) -> None:
    for path in [folder, *folder.rglob("*")]:
        path.chmod(path.stat().st_mode | stat.S_IWUSR)


@pytest.fixture
def read_only_home(tmp_path):
    """A home and a package folder that cannot be written to; the user who runs the probe, since root may write anywhere."""
    site = copy_of_the_package(tmp_path)
    home = tmp_path / "home"
    home.mkdir()
    user = 65534 if hasattr(os, "geteuid") and os.geteuid() == 0 else None
    if user is not None:
        for folder in [tmp_path, *tmp_path.parents]:
            if not folder.stat().st_mode & stat.S_IXOTH:
                if folder.stat().st_uid != 0 or folder == folder.parent:
                    pytest.skip(f"{folder} cannot be entered by another user")
                folder.chmod(folder.stat().st_mode | stat.S_IXOTH | stat.S_IROTH)
    make_read_only(tmp_path / "site")
    make_read_only(home)
    yield site, home, user
    make_writable(tmp_path / "site")
    make_writable(home)


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX permissions")
def test_read_only_folders_cost_one_warning(read_only_home, warm_cache):
    site, home, user = read_only_home
    environment = {"HOME": str(home), "PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1"}
    environment |= {"XDG_CACHE_HOME": str(home / "cache"), "NUMBA_CACHE_DIR": "", "PYTHONWARNINGS": "always"}
    try:
        report, errors = run_probe(
            REPORT + "assert 'site' in sdm_lite.__file__", "16", environment=environment, user=user, cwd=site
        )
    except PermissionError:
        pytest.skip("the interpreter itself cannot be run by another user")
    assert report["digest"] == warm_cache[1]["digest"]
    assert errors.count("UserWarning: sdm_lite") == 1, errors
    assert "NUMBA_CACHE_DIR" in errors


def test_missing_cache_folder_is_made(tmp_path):
    folder = tmp_path / "not" / "there" / "yet"
    report, errors = run_probe(REPORT, "4", environment={"NUMBA_CACHE_DIR": str(folder)}, cwd=tmp_path)
    assert report["compiled"] > 0
    assert "UserWarning" not in errors
    assert any(folder.rglob("*.nbc"))


def test_works_without_torch_and_cupy(warm_cache, tmp_path):
    # None in sys.modules makes an import of that name fail, as if it were not installed
    code = """
import sys
assert sys.modules.get("torch") is None
from sdm_lite.autograd import Tensor
y, _ = sdm_lite.sparse_delta_rule(Tensor(values, requires_grad=True), slots, weights, -beta, beta, slots, weights, state)
y.sum().backward()
try:
    sdm_lite.sparse_delta_rule_(values, slots, weights, -beta, beta, slots, weights, state, backend="cuda")
except sdm_lite.BackendError as error:
    text = str(error)
print(json.dumps({"states": sdm_lite.backends(), "error": text}))
"""
    hidden = "import sys\nfor name in ('torch', 'cupy', 'rich', 'matplotlib', 'safetensors'):\n    sys.modules[name] = None\n"
    command = [sys.executable, "-c", hidden + PROBE + code, "8"]
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(warm_cache[0])}
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["states"]["reference"] == report["states"]["cpu"] == "ready"
    assert report["states"]["cuda"] in report["error"]
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
