"""What a command says besides its results: compiling, once; and honestly what a model will write."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from app_runs import run

from sdm_lite import compile_notice
from sdm_lite.app import notices

pytestmark = pytest.mark.usefixtures("own_folder")


def printed(tmp_path, *lines):
    """Return (stdout, stderr) of a script in a process of its own, whose kernels are kept in an own folder."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "kernels")}
    command = [sys.executable, "-c", "\n".join(lines)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return done.stdout, done.stderr


def test_compiling_is_said_once_and_not_where_kernels_are_kept(tmp_path):
    # the smallest kernel there is
    call = "import numpy as np, sdm_lite; sdm_lite.hash_slots(np.arange(3), 16, 2)"
    logged = "import logging; logging.basicConfig(level=logging.INFO, format='%(message)s')"
    said = compile_notice.TEXT + "\n"
    assert printed(tmp_path / "a", call) == ("", ""), "a library prints nothing by itself"
    assert printed(tmp_path / "b", logged, call, call) == ("", said)
    assert printed(tmp_path / "b", logged, call) == ("", ""), "kept from the process before"
    command = ["from sdm_lite.app.notices import compiling_is_said", "with compiling_is_said():", f"    {call}"]
    assert printed(tmp_path / "c", *command) == ("", said)
    other = ["from numba import njit", "njit(lambda x: x + 1)(1)"]
    quiet = "import sdm_lite.rooms; sdm_lite.rooms.room('cpu', 'test')"
    assert printed(tmp_path / "d", logged, quiet, *other) == ("", ""), "a kernel of the caller's is not ours"


def test_the_handler_is_gone_after_a_command(capsys):
    before = list(compile_notice.LOGGER.handlers), compile_notice.LOGGER.level
    with notices.compiling_is_said():
        compile_notice.LOGGER.info("a line")
    compile_notice.LOGGER.info("another")
    assert capsys.readouterr().err == "a line\n"
    assert (list(compile_notice.LOGGER.handlers), compile_notice.LOGGER.level) == before


def test_a_model_that_writes_noise_is_said_to(data, tmp_path, capsys):
    out = tmp_path / "run"
    assert run("train", "--data", data, "--preset", "tiny", "--threads", 1, "--steps", 2, "--out", out) == 0
    assert "what to expect: noise; after 2 steps it spends" in capsys.readouterr().out
    assert run("generate", "--checkpoint", out, "--prompt", "def", "--tokens", "3", "--seed", 0) == 0
    told = capsys.readouterr()
    assert told.out.startswith("def") and "noise" not in told.out
    assert told.err == "what to expect: noise; this model was trained for 2 steps, on 256 bytes\n"


def test_a_model_that_learned_is_not_called_noise():
    assert "noise" not in notices.expectation({"steps": 1000, "bits_per_byte": 2.0})
    settings = {"length": 512, "batch": 4}
    assert notices.few_steps({"step": 180, "settings": settings}) is None
    assert "on 20,480 bytes" in notices.few_steps({"step": 10, "settings": settings})
    assert notices.few_steps({"step": 10}) is None, "a checkpoint that says nothing of its data"
