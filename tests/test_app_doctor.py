"""The doctor: content here, honest about faults, and in need of NumPy and Numba only."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from app_runs import run

from sdm_lite.app import doctor

pytestmark = pytest.mark.usefixtures("own_folder")


def test_doctor_is_content_here(capsys):
    assert run("doctor") == 0
    printed = capsys.readouterr().out
    assert "room cpu: ready" in printed and f"torch {torch.__version__.split('+')[0]}" in printed
    assert "all checks passed" in printed and "WRONG" not in printed


@pytest.mark.parametrize("fault", ["wrong", "raises"])
def test_doctor_reports_a_fault_and_goes_on(fault, monkeypatch, capsys):
    def check():
        if fault == "raises":
            raise RuntimeError("two\nlines")
        return False, "it differs"

    monkeypatch.setattr(doctor, "CHECKS", {"first": check, "second": lambda: (True, "fine")})
    assert run("doctor") == 1
    printed = capsys.readouterr().out
    assert "WRONG first: " in printed and "ok    second: fine" in printed and "1 of 2 checks failed" in printed


def test_compiling_is_told_apart_from_the_check(monkeypatch, capsys):
    from numba import njit

    def check(compiles):
        @njit
        def double(x):
            return 2 * x

        return (double(2) if compiles else 4) == 4, "fine"

    monkeypatch.setattr(doctor, "CHECKS", {"cold": lambda: check(True), "warm": lambda: check(False)})
    assert run("doctor") == 0
    cold, warm = (line for line in capsys.readouterr().out.splitlines() if line.startswith("ok"))
    assert "s of them compiling)" in cold and "compiling" not in warm


def test_doctor_notices_a_cpu_room_that_is_off_by_little(monkeypatch):
    from sdm_lite import cpu

    real = cpu.sparse_delta_forward

    def off(*arguments, **options):
        readings, final, saved = real(*arguments, **options)
        readings[0, 0, 0, 0] += 1e-3
        return readings, final, saved

    monkeypatch.setattr(cpu, "sparse_delta_forward", off)
    assert doctor.check_delta()[0] is False


def test_doctor_needs_numpy_and_numba_only():
    code = (
        "import sys\nfor name in ('torch', 'rich', 'matplotlib', 'safetensors'): sys.modules[name] = None\n"
        "from sdm_lite.app import doctor\nlines = []\n"
        "doctor.CHECKS = {'torch': doctor.check_torch}\nsys.exit(doctor.run(lines.append))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ})
