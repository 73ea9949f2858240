"""What a user installs: the wheel's contents, what an import costs and what it pulls in."""

from __future__ import annotations

import importlib.metadata
import json
import pathlib
import re
import shutil
import statistics
import subprocess
import sys
import zipfile

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
SOURCE_FOLDERS = {"sdm_lite": "sdm_lite", "cuda_kernels": "sdm_lite/cuda_kernels", "autograd": "sdm_lite/autograd"}


def run_python(code: str, *, cwd: pathlib.Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run `code` in a fresh interpreter whose working directory is `cwd`."""
    return subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, check=check, capture_output=True, text=True, timeout=60
    )


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory):
    """Names of the files in a wheel built from a copy of the sources (a build leaves folders behind)."""
    work = tmp_path_factory.mktemp("wheel")
    source = work / "source"
    source.mkdir()
    for folder in SOURCE_FOLDERS:
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", str(work), str(source)], check=True, capture_output=True, timeout=120)
    (wheel,) = work.glob("*.whl")
    return set(zipfile.ZipFile(wheel).namelist())


def test_wheel_holds_every_source_file(wheel_names):
    missing = []
    for folder, package in SOURCE_FOLDERS.items():
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in {".py", ".cu", ".cuh"} and "__pycache__" not in path.parts:
                name = f"{package}/{path.relative_to(ROOT / folder).as_posix()}"
                if name not in wheel_names:
                    missing.append(name)
    # a new subfolder must be added to `packages` in pyproject.toml
    assert not missing


def test_wheel_is_typed_and_licensed(wheel_names):
    assert "sdm_lite/py.typed" in wheel_names
    assert any(name.endswith("licenses/LICENSE") for name in wheel_names)


def test_wheel_installs_one_top_level_name(wheel_names):
    top = {name.split("/")[0] for name in wheel_names}
    assert {name for name in top if not name.endswith(".dist-info")} == {"sdm_lite"}


def test_no_global_module_leaks(tmp_path):
    # another package may own the name `autograd`: what must not happen is that ours answers to it
    code = """
import importlib.util, sys
for name in ("autograd", "cuda_kernels"):
    spec = importlib.util.find_spec(name)
    print(spec.origin if spec else "absent")
"""
    lines = run_python(code, cwd=tmp_path).stdout.split()
    assert not [line for line in lines if line.startswith(str(ROOT))]


@pytest.mark.parametrize("folder", ["autograd", "cuda_kernels"])
def test_bare_import_from_the_root_raises(folder):
    result = run_python(f"import {folder}", cwd=ROOT, check=False)
    assert result.returncode != 0
    assert "ImportError" in result.stderr
    assert f"sdm_lite.{folder}" in result.stderr


def test_import_is_light(tmp_path):
    # seconds of the process, since those of the clock also count what else the machine does; a median of three
    code = """
import json, time
start = time.process_time()
import sdm_lite
seconds = time.process_time() - start
import sys
heavy = [name for name in ("torch", "cupy", "rich", "matplotlib", "safetensors") if name in sys.modules]
print(json.dumps({"seconds": seconds, "heavy": heavy}))
"""
    runs = [json.loads(run_python(code, cwd=tmp_path).stdout) for _ in range(4)][
        1:
    ]  # the first may fill the disk cache
    assert all(run["heavy"] == [] for run in runs)
    assert statistics.median(run["seconds"] for run in runs) < 0.5


def test_import_compiles_nothing(tmp_path):
    code = """
import numba.core.compiler as compiler
calls = []
original = compiler.compile_extra
def counted(*args, **kwargs):
    calls.append(args)
    return original(*args, **kwargs)
compiler.compile_extra = counted
import sdm_lite, sdm_lite.cpu, sdm_lite.reference, sdm_lite.autograd
from numba.core.dispatcher import Dispatcher
import sys
compiled = [
    f"{name}.{key}"
    for name, module in list(sys.modules.items()) if name.startswith("sdm_lite")
    for key, value in list(vars(module).items())
    if isinstance(value, Dispatcher) and value.signatures
]
print(len(calls), compiled)
"""
    assert run_python(code, cwd=tmp_path).stdout.strip() == "0 []"


def test_version_is_the_installed_one():
    import sdm_lite

    assert sdm_lite.__version__ == importlib.metadata.version("sdm-lite")


def test_public_names_exist():
    import sdm_lite

    missing = [name for name in sdm_lite.__all__ if not hasattr(sdm_lite, name)]
    assert not missing
    promised = {"product_key_topk", "hash_slots", "sparse_delta_rule", "sparse_delta_rule_", "backends"}
    assert promised <= set(sdm_lite.__all__)


def test_constraints_pin_every_dependency():
    """Each requirement of pyproject.toml, extras too, has an exact version in constraints.txt."""
    pinned = {
        re.split(r"==", line)[0].strip().lower()
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line and not line.startswith("#")
    }
    for requirement in importlib.metadata.requires("sdm-lite") or []:
        name = re.match(r"[A-Za-z0-9._-]+", requirement).group().lower()
        assert name in pinned | {"sdm-lite"}, requirement
