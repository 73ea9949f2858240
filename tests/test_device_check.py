"""The GPU machine's one command, here on a stand-in with tiny shapes; and the paper model behind its floors."""

from __future__ import annotations

import importlib.util
import json
import pathlib
import sys
import time
import types

import fake_cupy
import numpy as np
import pytest
from emulated_cuda.run import needs

ROOT = pathlib.Path(__file__).resolve().parent.parent


def load_benchmarks():
    """Import the folder `benchmarks` without the root, and its bare `autograd/`, on the import path."""
    folder = ROOT / "benchmarks"
    spec = importlib.util.spec_from_file_location(
        "benchmarks", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    sys.modules["benchmarks"] = importlib.util.module_from_spec(spec)
    return [importlib.import_module(f"benchmarks.{name}") for name in ("device_check", "roofline", "shapes")]


device_check, roofline, shapes = load_benchmarks()
Shape = shapes.Shape
TINY = (Shape("tiny", B=1, T=6, H=1, N=16, D=8, W=2, R=2),)


class Event:
    def record(self):
        self.at = time.perf_counter()

    def synchronize(self):
        pass


@pytest.fixture
def cupy(monkeypatch):
    cupy = fake_cupy.install(monkeypatch)
    cupy.cuda.Event, cupy.cuda.get_elapsed_time = Event, lambda a, b: 1e3 * (b.at - a.at)
    return cupy


@needs("plain")
def test_all_of_it_runs(cupy, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(device_check, "PARITY_SHAPES", (Shape("parity", B=1, T=6, H=2, N=16, D=34, W=3, R=2),))
    assert device_check.run(tmp_path / "check", TINY, row_slots=64, limit_s=120, rounds=1) == 0
    report = json.loads((tmp_path / "check.json").read_text())
    assert report["parity"] == "agrees" and report["device"] == "NVIDIA H200"
    names = [row["name"] for row in report["rows"]]
    expected = ["copy", "gather of random rows", "scatter of random rows", "forward in place", "decode, one token"]
    expected += [
        f"{part}, {r}" for r in ("snapshot", "hybrid", "invert") for part in ("forward and backward", "backward")
    ]
    bags = [f"embedding bag, {part}" for part in ("forward", "gradient of the table", "gradient of the weights")]
    assert names == [*expected, "addressing", "addressing, gradient", *bags]
    assert all(row["seconds"] > 0 and row["bytes"] > 0 for row in report["rows"])
    assert len(report["skipped"]) == 1 and report["skipped"][0].startswith("layer")
    text = (tmp_path / "check.md").read_text()
    assert text.count("\n| ") == len(names) + 1 and capsys.readouterr().out.startswith("NVIDIA H200")


@needs("plain")
def test_a_difference_stops_it(cupy, tmp_path, monkeypatch):
    monkeypatch.setattr(device_check, "PARITY_SHAPES", (Shape("parity", B=1, T=6, H=1, N=16, D=8, W=3, R=2),))
    right = device_check.cuda_kernels.sparse_delta_forward

    def wrong(*args, **options):
        readings, *rest = right(*args, **options)
        readings.host[0, -1, 0, 0] += np.float32(1e-4)
        return readings, *rest

    monkeypatch.setattr(device_check.cuda_kernels, "sparse_delta_forward", wrong)
    assert device_check.run(tmp_path / "check", TINY, row_slots=64, rounds=1) == 1
    report = json.loads((tmp_path / "check.json").read_text())
    assert not report["rows"] and any("readings off by" in line for line in report["parity"])
    assert (tmp_path / "check.md").read_text().startswith("WRONG")


def test_no_time_left_is_said(cupy):
    check = device_check.Check(limit_s=-1, rounds=1)
    assert check.time("copy", "any", 1, lambda: pytest.fail("started")) == 0
    assert check.skipped == ["copy (any): the time was up"] and not check.rows


def test_without_a_gpu_it_says_why(cupy, tmp_path, capsys):
    cupy.cuda.runtime.driverGetVersion = lambda: 0
    assert device_check.run(tmp_path / "check", TINY) == 1
    assert "no NVIDIA driver" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_the_gather_and_scatter_move_rows(cupy):
    if needs("plain").args[0]:
        pytest.skip("no g++")
    check = device_check.Check(rounds=1)
    check.seconds = lambda call: call() or 1.0
    device_check.bandwidth(check, 32)
    moved = [run for run in cupy.launches if run[0].startswith("move_rows")]
    assert len(moved) == 2
    table, rows, index = (np.arange(64, dtype=np.uint8), np.zeros(64, np.uint8), np.array([3, 1, 0, 2], np.int32))
    arguments = [cupy.asarray(a) for a in (table, rows, index)]
    device_check.launch.launch(
        "row_bandwidth.cu", "move_rows<false>", (1,), 256, (*arguments, np.int64(4), np.int32(1))
    )
    assert np.array_equal(arguments[1].host.reshape(4, 16), table.reshape(4, 16)[index])


def test_bytes_by_hand():
    shape = Shape("hand", B=2, T=3, H=1, N=8, D=4, W=2, R=1)
    # 6 tokens of 4 columns: 5 rows of 2 bytes, 2 logged rows, and values, readings, errors of 4 bytes each
    assert roofline.row_bytes(shape, "forward", 2) == 6 * 4 * (5 * 2 + 2 * 2 + 12)
    # M and G of 3 rows in and out, 2 logged rows, and values or errors, dreadings, dvalues and one to spare
    assert roofline.row_bytes(shape, "backward", 2) == 6 * 4 * (2 * 3 * 6 + 2 * 2 + 16)
    # 10 reads of 4 columns; 5 tokens' readings, slots and weights; for the table 6 rows zeroed and written, order too
    assert roofline.bag_bytes(5, 2, 4, 6, "forward") == 160 + 80 + 80
    assert roofline.bag_bytes(5, 2, 4, 6, "gradient of the table") == 160 + 192 + 160
    # 16 rows of 4 columns of 2 bytes, four times, and their float32 gradient; or 3 rows, and a gradient of 16 with 3
    assert roofline.functional_bytes(shape, 2) == 16 * 4 * 12
    assert roofline.functional_bytes(shape, 2, rows=3) == 3 * 4 * 12 + 4 * 4 * (16 + 6)
    assert roofline.operations(shape, "forward") == 6 * 4 * (5 * 2 + 2 * 1)


def test_estimates_are_at_least_their_floor_and_fall_with_the_device():
    for shape in roofline.SHAPES:
        for direction in ("forward", "backward"):
            found = {device: roofline.estimate(device, shape, direction, "bf16") for device in roofline.FIGURES}
            assert all(e.seconds >= e.floor == max(e.resources) > 0 for e in found.values())
            assert found["B200"].seconds < found["H200"].seconds < found["H100"].seconds < found["A100"].seconds
    # by hand: 13.3e9 bytes of rows, log and readings over 80 % of 4.8 TB/s
    e = roofline.estimate("H200", roofline.SHAPES[0], "forward", "bf16", logged=0)
    assert e.row_bytes == 2 * 8192 * 2048 * (3 * 64 * 2 + 12) and e.resources.memory == e.row_bytes / 3.84e12


def test_the_page_has_the_table():
    assert roofline.table() in (ROOT / "docs" / "kernels.md").read_text()


def test_a_layer_is_skipped_without_torch(cupy, monkeypatch):
    monkeypatch.setattr(device_check.importlib.util, "find_spec", lambda name: None)
    check = types.SimpleNamespace(skipped=[])
    device_check.layer(check, TINY[0], 1.0)
    assert check.skipped == ["layer, forward and backward (tiny): torch is not installed"]
