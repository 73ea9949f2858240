"""A mistake, or what the system refuses, is one line and exit code 2, never a traceback."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
import torch
from app_runs import TINY, digests, run

from sdm_lite import whole_files
from sdm_lite.app import checkpoint, cli
from sdm_lite.app.trainer import METRICS, read_metrics

pytestmark = pytest.mark.usefixtures("own_folder")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "--preset", "huge"], ["--preset", "tiny", "'huge'"]),
        (["train", "--mixer", "lstm"], ["--mixer", "'lstm'"]),
        (["train", "--compare", "sdm,lstm"], ["--compare", "'lstm'"]),
        (["train", "--compare", "sdm,sdm"], ["--compare"]),
        (["train", "--compare", "sdm,gdn", "--mixer", "sdm"], ["--mixer"]),
        (["train", "--data", "nowhere"], ["--data", "nowhere"]),
        (["train", "--data", "empty"], ["--data", "bytes of text"]),
        (["train", "--data", "empty/nothing.txt"], ["--data", "bytes of text"]),
        (["train", "--steps", "0"], ["--steps"]),
        (["train", "--steps", "many"], ["--steps"]),
        (["train", "--seconds", "-1"], ["--seconds"]),
        (["train", "--learning-rate", "nan"], ["--learning-rate"]),
        (["train", "--seed", "-1"], ["--seed"]),
        (["train", "--save-every", "-1"], ["--save-every"]),
        (["train", "--slots", "1000", "--data", "text"], ["--slots", "1000", "961 or 1024"]),
        (["train", "--writes", "2000", "--data", "text"], ["--writes", "2000"]),
        (["train", "--out", "text/a.txt", "--data", "text"], ["--out"]),
        (["train", "--resume", "nowhere"], ["--resume", "nowhere"]),
        (["train", "--resume", "empty"], ["empty", "checkpoint.json"]),
        (["recall", "--mixers", "lstm"], ["--mixers", "'lstm'"]),
        (["recall", "--pairs", "4,x"], ["--pairs"]),
        (["recall", "--pairs", "5000"], ["--pairs", "5000"]),
        (["demo", "--preset", "huge"], ["--preset", "'huge'"]),
        (["generate", "--prompt", "x"], ["--checkpoint"]),
        (["generate", "--checkpoint", "nowhere", "--prompt", "x"], ["nowhere"]),
        (["dance"], ["dance"]),
        ([], ["COMMAND"]),
    ],
    ids=" ".join,
)
def test_a_mistake_is_one_line(arguments, words, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "nothing.txt").write_bytes(b"")
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("some text " * 1000)
    assert run(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("sdm-lite")
    assert all(word in captured.err for word in words), captured.err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "--resume", "RUN", "--dim", "64"], ["dim", "32", "64"]),
        (["train", "--resume", "RUN", "--mixer", "gdn"], ["mixer", "'sdm'", "'gdn'"]),
        (["train", "--resume", "RUN", "--seed", "3"], ["seed", "0", "3"]),
        (["train", "--resume", "RUN", "--preset", "small"], ["checkpoint"]),
        (["train", "--resume", "RUN", "--steps", "2"], ["--steps", "8", "2"]),
        (["train", "--out", "RUN"], ["--out", "--resume"]),
        (["generate", "--checkpoint", "RUN", "--prompt", ""], ["--prompt"]),
        (["generate", "--checkpoint", "RUN", "--prompt", "x", "--tokens", "-1"], ["--tokens"]),
        (["generate", "--checkpoint", "RUN", "--prompt", "x", "--temperature", "nan"], ["--temperature"]),
    ],
    ids=" ".join,
)
def test_a_mistake_about_a_run_is_one_line(arguments, words, trained, capsys):
    before = digests(trained)
    assert run(*(trained if word == "RUN" else word for word in arguments)) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert all(word in captured.err for word in words), captured.err
    assert digests(trained) == before


def test_other_data_on_resume_names_both(trained, tmp_path, capsys):
    (tmp_path / "other.txt").write_text("some text " * 1000)
    assert run("train", "--resume", trained, "--data", tmp_path / "other.txt") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "other.txt" in error and "as in the checkpoint" in error


@pytest.mark.parametrize("package", ["torch", "rich", "matplotlib", "safetensors"])
def test_a_missing_package_names_the_extra(package, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, package, None)
    assert run("train", "--steps", 1) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and package in error and 'pip install "sdm-lite[cli]"' in error


@pytest.mark.parametrize("damage", ["cut", "text"])
def test_generate_refuses_a_damaged_checkpoint(damage, trained, tmp_path, capsys):
    for path in trained.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    name = checkpoint.load("test", tmp_path).record["files"]["model"]["name"]
    path = tmp_path / (name if damage == "cut" else "checkpoint.json")
    path.write_bytes(path.read_bytes()[:-20])
    assert run("generate", "--checkpoint", tmp_path, "--prompt", "x") == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("command", [["recall"], ["train", "--compare", "sdm,gdn"]], ids=["recall", "compare"])
def test_resume_of_a_folder_without_such_a_run_is_refused(command, tmp_path, capsys):
    assert cli.main([*command, "--preset", "tiny", "--resume", str(tmp_path)]) == 2
    assert "--resume" in capsys.readouterr().err and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "--muon-rate", "nan"], ["--muon-rate", "finite number from 0", "'nan'"]),
        (["train", "--muon-rate", "-1"], ["--muon-rate", "'-1'"]),
        (["train", "--learning-rate", "inf"], ["--learning-rate", "above 0"]),
        (["train", "--seconds", "nan"], ["--seconds"]),
        (["train", "--seconds", "x"], ["--seconds", "finite number above 0", "'x'"]),
        (["train", "--dim", "9" * 30], ["--dim", "1 to 2147483647"]),
        (["train", "--dim", "30", "--data", "text"], ["--dim", "multiple of 8", "24 or 32"]),
        (["train", "--dim", "2147483640", "--data", "text"], ["--dim, --hidden or --slots"]),
        (["train", "--dim", "800000", "--data", "text"], ["--dim, --hidden or --slots", "GiB"]),
        (["train", "--hidden", "0"], ["--hidden"]),
        (["train", "--seed", str(2**64)], ["--seed", str(2**64 - 1)]),
        (["train", "--seed", "1.5"], ["--seed", "whole number"]),
        (["train", "--out", "a\0b"], ["--out", "a path"]),
        (["train", "--data", "a\0b"], ["--data", "a path"]),
        (["train", "--resume", "a\0b"], ["--resume", "a path"]),
        (["generate", "--checkpoint", "a\0b", "--prompt", "x"], ["--checkpoint", "a path"]),
        (["demo", "--seed", "-1"], ["--seed"]),
        (["recall", "--pairs", "8,0"], ["--pairs"]),
        (["recall", "--pairs", "8,,9"], ["--pairs"]),
        (["recall", "--key-dim", "0"], ["--key-dim"]),
        (["recall", "--slots", "1000"], ["--slots", "961 or 1024"]),
        (["generate", "--checkpoint", "x", "--prompt", "x", "--temperature", "inf"], ["--temperature"]),
        (["generate", "--checkpoint", "x", "--prompt", "x", "--seed", "-1"], ["--seed"]),
        (["train", "--stpes", "3"], ["did you mean --steps?"]),
        (["train", "--stpes=3"], ["did you mean --steps?"]),
        (["trian"], ["did you mean train?"]),
        (["train", "--mixer", "fulll"], ["did you mean full?"]),
        (["train", "--xyzzy"], ["--xyzzy (see"]),
    ],
    ids=lambda value: " ".join(value)[:40] if value and value[0] in ("train", "recall", "generate", "demo") else "",
)
def test_nonsense_is_refused_in_the_words_of_the_command_line(arguments, words, tmp_path, capsys):
    (tmp_path / "text").write_text("some text " * 1000)
    assert run(*arguments) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.startswith("sdm-lite")
    assert all(word in error for word in words), error
    # the names of the code are not those of the user
    assert not any(word in error for word in ("slots_per_head", "num_", "_positive", "_numbers", "convert")), error
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("seed", [2**63, 2**64 - 1])
def test_the_largest_seeds_train_resume_and_generate(seed, data, tmp_path, capsys):
    out = tmp_path / "run"
    assert run("train", "--data", data, *TINY, "--steps", 2, "--seed", seed, "--out", out) == 0
    assert run("train", "--resume", out, "--seed", seed, "--steps", 3) == 0
    assert run("generate", "--checkpoint", out, "--prompt", "x", "--tokens", 3, "--seed", seed) == 0
    assert checkpoint.load("test", out).step == 3 and "Traceback" not in capsys.readouterr().err


FULL = """
import resource, sys
from sdm_lite.app import cli, train, worker
resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))  # no file may grow beyond: a disk that is full
sys.exit({main}(sys.argv[1:]))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no limit on the size of files")
@pytest.mark.parametrize("main", ["cli.main", "worker.main"])
def test_a_full_disk_is_one_line_and_leaves_the_checkpoint_whole(main, trained, tmp_path):
    out = tmp_path / "run"
    settings = {**checkpoint.load("test", trained).record["settings"], "steps": 12}
    shutil.copytree(trained, out)
    (out / "settings.json").write_text(json.dumps(settings))
    before, names = digests(out), {path.name for path in out.iterdir()}
    arguments = ["train", "--resume", out, "--steps", 12] if main == "cli.main" else [out, "--resume"]
    command = [sys.executable, "-c", FULL.format(main=main), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1 and "room on the disk" in done.stderr and "--resume" in done.stderr
    assert digests(out) == before and {path.name for path in out.iterdir()} == names
    checkpoint.load("test", out).tensors("test", "model")


def test_what_a_killed_save_left_goes_with_the_next_resume(trained, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(trained, out)
    (out / ".model-000009-0123456789ab.safetensors.123.tmp").write_bytes(b"part")
    (out / "model-000009-0123456789ab.safetensors").write_bytes(b"whole, but named by no checkpoint")
    (out / ".mine.tmp").write_bytes(b"not of this program")
    assert run("train", "--resume", out) == 0
    assert {path.name for path in out.glob(".*")} == {".mine.tmp"} and not list(out.glob("model-000009-*"))


def test_a_full_disk_names_the_file(tmp_path):
    def write(path):
        path.write_bytes(b"part")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="wanted") as caught:
        whole_files.write_whole(tmp_path / "wanted", write)
    assert caught.value.filename == str(tmp_path / "wanted") and not list(tmp_path.iterdir())


def edited(run_folder, copy, change):
    """A copy of a run whose checkpoint.json went through `change`."""
    shutil.copytree(run_folder, copy)
    record = json.loads((copy / "checkpoint.json").read_text())
    change(record)
    (copy / "checkpoint.json").write_text(json.dumps(record))
    return copy


CHANGES = {
    "settings is a list": lambda r: r.update(settings=[1]),
    "settings are gone": lambda r: r.update(settings={}),
    "steps is text": lambda r: r["settings"].update(steps="many"),
    "seed is a float": lambda r: r["settings"].update(seed=0.5),
    "seed is negative": lambda r: r["settings"].update(seed=-1),
    "seed is huge": lambda r: r["settings"].update(seed=2**64),
    "layers is a number": lambda r: r["settings"].update(layers=3),
    "an unknown layer": lambda r: r["settings"].update(layers=["lstm"]),
    "no heads": lambda r: r["settings"].update(heads=0),
    "negative table": lambda r: r["settings"].update(ngram_buckets=-5),
    "another width": lambda r: r["settings"].update(dim=64),
    "clip is null": lambda r: r["settings"].update(clip=None),
    "decay is infinite": lambda r: r["settings"].update(decay=float("inf")),
    "elapsed is text": lambda r: r.update(elapsed="long"),
    "elapsed is nan": lambda r: r.update(elapsed=float("nan")),
    "step is huge": lambda r: r.update(step=10**400),
    "files is text": lambda r: r.update(files="model"),
    "other optimiser": lambda r: r["settings"].update(muon_rate=0.0),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_checkpoint_edited_by_hand_is_one_line_on_resume(change, trained, tmp_path, capsys):
    out = edited(trained, tmp_path / "run", change)
    assert run("train", "--resume", out, "--threads", 1) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.startswith("sdm-lite train"), error


CONFIGS = {
    "width is text": {"dim": "wide"},
    "width is a list": {"dim": [32]},
    "a vocabulary for no machine": {"vocab_size": 10**12},
    "a vocabulary beyond counting": {"vocab_size": 10**30},
    "more layers": {"num_layers": 40},
    "unknown": {"colour": "red"},
    "options of another type": {"options": [1]},
    "fewer slots": {"slots_per_head": 16},
    "negative": {"ngram_buckets": -1},
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_config_edited_by_hand_is_one_line_in_generate(config, trained, tmp_path, capsys):
    out = edited(trained, tmp_path / "run", lambda record: record["config"].update(config))
    assert run("generate", "--checkpoint", out, "--prompt", "x") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.startswith("sdm-lite generate"), error


METRIC_LINES = ["[]", "3", '{"step": 2}', '{"step": "2", "loss": 1.0}', "{", "\xff", "[" * 100_000]


@pytest.mark.parametrize("line", METRIC_LINES, ids=lambda line: line[:20])
def test_metrics_edited_by_hand_are_one_line_on_resume(line, trained, tmp_path, capsys):
    out = tmp_path / "run"
    shutil.copytree(trained, out)
    texts = (out / METRICS).read_text().splitlines()
    (out / METRICS).write_bytes("\n".join([texts[0], line, *texts[1:], ""]).encode("latin-1"))
    assert run("train", "--resume", out) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and f"{METRICS} line 2" in error, error


def test_a_last_line_cut_short_is_dropped(trained, tmp_path):
    whole = read_metrics(trained / METRICS)
    (tmp_path / METRICS).write_text((trained / METRICS).read_text() + '{"step": 9, "lo')
    assert read_metrics(tmp_path / METRICS) == whole


@pytest.mark.parametrize("key", ["AdamW/embedding.weight/exp_avg", "Muon/blocks.0.mlp.up_proj.weight/momentum_buffer"])
@pytest.mark.parametrize("change", ["gone", "one number", "another name"])
def test_an_optimizer_that_lacks_a_moment_is_one_line(key, change, trained, tmp_path, capsys):
    found = checkpoint.load("test", trained)
    model, optimizer = found.tensors("test", "model"), found.tensors("test", "optimizer")
    assert key in optimizer
    value = optimizer.pop(key)
    if change == "one number":
        optimizer[key] = torch.tensor(1.0)
    elif change == "another name":
        optimizer[key + "s"] = value
    elif key.startswith("Muon"):
        pytest.skip("a parameter without its only moment is one that had no gradient yet")
    checkpoint.save(tmp_path, model, optimizer, found.record)
    assert run("train", "--resume", tmp_path) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "optimizer state" in error, error


@pytest.mark.skipif(sys.platform == "win32", reason="pipes end otherwise on Windows")
@pytest.mark.parametrize("command", ["train", "generate"])
def test_a_reader_that_leaves_ends_the_command_quietly(command, data, trained, tmp_path):
    arguments = {
        "train": ["train", "--data", data, *TINY, "--steps", "100000", "--out", str(tmp_path / "run")],
        "generate": ["generate", "--checkpoint", str(trained), "--prompt", "x", "--tokens", "100000"],
    }[command]
    process = subprocess.Popen(
        [sys.executable, "-m", "sdm_lite.app.cli", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout.read(1)
    process.stdout.close()
    try:
        code = process.wait(timeout=60)
    finally:
        process.kill()
    assert code == 141 and process.stderr.read() == b""
