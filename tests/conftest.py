"""Keeps the bare source folders off the import path, one setting for hypothesis, and runs of the application.

`python -m pytest` puts the repository's root first on ``sys.path``, where `autograd/` and
`cuda_kernels/` lie under bare names: the tests must import what an installed user imports.
"""

import pathlib
import sys

import pytest
from hypothesis import settings

_root = pathlib.Path(__file__).resolve().parent.parent
sys.path[:] = [entry for entry in sys.path if pathlib.Path(entry or ".").resolve() != _root]

# derandomized: a failure on one machine is the same failure on another; no deadline, since a first call may compile
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


@pytest.fixture(scope="session", autouse=True)
def kernels_see_the_types_they_were_compiled_for():
    """Hold every call of a kernel that goes past Numba's look at types to the types of the first."""
    from sdm_lite.cpu.compile import SameTypes

    SameTypes.looks_again = True


@pytest.fixture
def threads_at_any_size(monkeypatch):
    """Let the pool wake its threads for the small arrays of a test too."""
    from sdm_lite.cpu import pool

    monkeypatch.setattr(pool, "SMALL", 0)


@pytest.fixture
def own_folder(tmp_path, monkeypatch):
    """An empty folder to run commands in: they write to runs/ by default, and --threads is for the whole process."""
    import torch

    threads = torch.get_num_threads()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SDM_LITE_NUM_THREADS", "1")
    yield tmp_path
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """A folder of text to train on."""
    folder = tmp_path_factory.mktemp("data")
    for index in range(60):
        words = "".join(f"def function_{index}_{line}(x):\n    return x + {line}\n" for line in range(30))
        (folder / f"{index:02d}.py").write_text(words)
    return str(folder)


@pytest.fixture(scope="session")
def trained(data, tmp_path_factory):
    """The folder of a finished run of 8 steps; tests copy it before they change it."""
    from app_runs import TINY, run

    out = tmp_path_factory.mktemp("runs") / "trained"
    assert run("train", "--data", data, *TINY, "--steps", 8, "--out", out) == 0
    return out
