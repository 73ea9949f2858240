"""The commands with memory layers: training, carrying fast weights on, resuming, the needle, and mistakes."""

from __future__ import annotations

import json

import pytest
import torch

from sdm_lite.app import checkpoint, cli, models, needle, optim
from sdm_lite.app.settings import TRAIN_PRESETS, Settings, choose
from sdm_lite.app.trainer import BEFORE_DECAY, read_metrics
from sdm_lite.nn import FwPKM, ProductKeyMemory

MEMORY = ["--memory", "fwpkm@1,3", "--memory", "pkm@2"]


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    """Commands write to runs/ by default, and --threads is for the whole process."""
    threads = torch.get_num_threads()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SDM_LITE_NUM_THREADS", "1")
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    for index in range(40):
        words = "".join(f"def function_{index}_{line}(x):\n    return x + {line}\n" for line in range(30))
        (folder / f"{index:02d}.py").write_text(words)
    return str(folder)


def run(*arguments):
    """Exit code of a command, however it ends."""
    try:
        return cli.main([str(argument) for argument in arguments])
    except SystemExit as end:
        return end.code


def train(data, out, *more):
    return run("train", "--data", data, "--preset", "tiny", "--threads", "1", "--mixer", "conv", "--out", out, *more)


def test_train_places_the_memories_and_carries_the_fast_weights(data, tmp_path):
    out = tmp_path / "run"
    assert train(data, out, *MEMORY, "--steps", "6") == 0
    model, found = models.from_checkpoint("test", out)
    assert [isinstance(block.fwpkm, FwPKM) for block in model.blocks] == [True, False, True, False]
    assert [isinstance(block.mlp, ProductKeyMemory) for block in model.blocks] == [False, True, False, False]
    settings = choose("train", TRAIN_PRESETS, "tiny", {"mixer": "conv", "memory": ("fwpkm@1,3", "pkm@2")})
    fresh = models.build(settings, 256)
    for after, before in ((model.blocks[i].fwpkm, fresh.blocks[i].fwpkm) for i in (0, 2)):
        assert not torch.equal(after.values, before.values) and torch.isfinite(after.values).all()
    account = json.loads((out / "result.json").read_text())["account"]
    assert account["memory_parameters"] == 64 * 32
    moments = found.tensors("test", "optimizer")["SparseAdam/blocks.1.mlp.values/exp_avg"]
    assert moments.shape == (64, 32) and moments.any()
    assert run("generate", "--checkpoint", out, "--prompt", "def ", "--tokens", "40", "--seed", "1") == 0


def test_a_resumed_run_is_the_same_bits(data, tmp_path):
    """Fast weights go on from the checkpoint, and so do the row-wise moments of the value table."""
    parts, whole = tmp_path / "parts", tmp_path / "whole"
    rates = ("--muon-rate", "0")
    assert train(data, whole, *MEMORY, *rates, "--steps", "4") == 0
    assert train(data, parts, *MEMORY, *rates, "--steps", "4", "--save-every", "2") == 0
    assert digests(parts) == digests(whole)
    # the latest checkpoint is the last step's: take the run back to the one from before the rate fell
    kept = checkpoint.load("test", parts, BEFORE_DECAY)
    assert 0 < kept.step < 4
    (parts / "checkpoint.json").write_text((parts / f"{BEFORE_DECAY}.json").read_text())
    assert run("train", "--data", data, "--threads", "1", "--resume", parts) == 0
    assert digests(parts) == digests(whole)
    assert len(read_metrics(parts / "metrics.jsonl")) == 4


def digests(folder):
    files = checkpoint.load("test", folder).record["files"]
    return {part: files[part]["sha256"] for part in files}


def test_value_tables_are_optimised_by_rows_at_their_own_rate():
    settings = Settings(**{**TRAIN_PRESETS["tiny"], "mixer": "conv", "memory": ("pkm@1",)})
    model = models.build(settings, 256)
    adam, muon, sparse = optim.build_optimizers(settings, model)
    assert [type(one).__name__ for one in (adam, muon, sparse)] == ["AdamW", "Muon", "SparseAdam"]
    (group,) = sparse.param_groups
    assert group["params"] == [model.blocks[0].mlp.values] and group["lr"] == group[optim.BASE_RATE] == 1e-3
    count = sum(len(group["params"]) for one in (adam, muon, sparse) for group in one.param_groups)
    assert count == len(list(model.parameters()))


def test_needle_trains_measures_and_draws(tmp_path, capfd):
    out = tmp_path / "needle"
    short = ("--preset", "tiny", "--steps", "2", "--passes", "2", "--seeds", "2")
    assert run("needle", *short, "--variants", "full,no address loss", "--out", out) == 0
    record = json.loads((out / needle.RESULT).read_text())
    assert list(record["variants"]) == ["full", "no address loss"]
    for result in record["variants"].values():
        assert list(result["accuracy"]) == ["3", "6", "8"]  # as trained, twice, and as many as fit
        assert all(len(shares) == 3 and 0 <= min(shares) <= max(shares) <= 1 for shares in result["accuracy"].values())
        first, second = (result["seeds"][seed]["accuracy"]["8"] for seed in ("0", "1"))
        assert first != second, "another seed is another model"
        pairs = list(zip(first, second))
        assert result["accuracy"]["8"] == [sum(pair) / 2 for pair in pairs]
        assert result["least"]["8"] == [min(pair) for pair in pairs]
        assert result["most"]["8"] == [max(pair) for pair in pairs]
    assert (out / needle.PICTURE).read_bytes().startswith(b"\x89PNG")
    printed = capfd.readouterr().out  # of the processes that measure, too
    assert "no address loss" in printed and "Chance" in printed and "seeds 0 to 1" in printed
    assert "full, seed 1: step 2 of 2" in printed and "least" in printed
    assert "full: measuring" in printed


def test_needles_are_found_by_the_fast_weights_alone():
    """A memory that is written answers far above chance; the same model without the writes does not."""
    settings = needle.NeedleSettings(**needle.TINY)
    shares = needle.measure(settings, needle.train(settings, "full", lambda step, loss: None), 3)
    # chance is 1/4, and 96 questions have a standard error of .05
    assert shares[0] < 0.45 and shares[1] > 0.7, shares


MISTAKES = {
    "layer": ["--memory", "fwpkm@5"],
    "kind": ["--memory", "lstm@1"],
    "form": ["--memory", "fwpkm"],
    "twice": ["--memory", "fwpkm@1", "--memory", "fwpkm@1"],
    "sub-keys": ["--memory", "fwpkm@1", "--sub-keys", "0"],
    "chunk": ["--memory", "fwpkm@1", "--memory-chunk", "1"],
}
NEEDLE_MISTAKES = {
    "preset": ["--preset", "huge"],
    "variants": ["--variants", "no memory"],
    "facts": ["--facts", "65", "--haystack", "128"],
    "seed": ["--seed", "-1"],
    "seeds": ["--seeds", "0"],
    "--seed": ["--seed", str(0x5EED - 1), "--seeds", "2"],
    "learning-rate": ["--learning-rate", "0"],
    "steps": ["--steps", "0"],
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_and_code_2(data, tmp_path, capsys, name):
    assert train(data, tmp_path / "run", "--steps", "1", *MISTAKES[name]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and ("Fix:" in lines[0] or "--help" in lines[0])
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", NEEDLE_MISTAKES)
def test_a_mistake_with_needles_is_one_line_and_code_2(tmp_path, capsys, name):
    assert run("needle", "--out", tmp_path / "run", *NEEDLE_MISTAKES[name]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and name in lines[0]
    assert not (tmp_path / "run").exists()
