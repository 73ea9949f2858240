"""Keeps the bare source folders off the import path, and one setting for hypothesis.

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


@pytest.fixture
def threads_at_any_size(monkeypatch):
    """Let the pool wake its threads for the small arrays of a test too."""
    from sdm_lite.cpu import pool

    monkeypatch.setattr(pool, "SMALL", 0)
