"""The commands from outside: what they leave behind, and that a mistake is one line and exit code 2."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from app_runs import TINY, digests, run

from sdm_lite.app import checkpoint, cli, demo, generate
from sdm_lite.app.trainer import read_metrics

pytestmark = pytest.mark.usefixtures("own_folder")


def test_import_is_light():
    code = (
        "import sys, sdm_lite.app.cli; heavy = {'torch', 'rich', 'matplotlib', 'safetensors', 'numba'};"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_run_leaves_what_it_promises(trained, capsys):
    names = {path.name for path in trained.iterdir()}
    assert {"checkpoint.json", "metrics.jsonl", "result.json", "loss.png", "perplexity_by_position.png"} <= names
    assert all((trained / name).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" for name in names if name.endswith(".png"))
    lines = read_metrics(trained / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, 9))
    result = json.loads((trained / "result.json").read_text())
    # an untrained model of bytes spends log2(256) = 8 bits on each
    assert 0 < result["bits_per_byte"] < 8
    assert result["by_position"][-1]["to"] == 16 * 64
    account = result["account"]
    assert account["state_elements"] == 64 * 32 and account["ngram_parameters"] == 3 * 256 * 32


def test_half_and_half_equals_whole(data, trained, tmp_path):
    out = tmp_path / "run"
    assert run("train", "--data", data, *TINY, "--steps", 4, "--out", out) == 0
    assert checkpoint.load("test", out).step == 4
    assert run("train", "--data", data, "--threads", 1, "--steps", 8, "--out", out, "--resume") == 0
    assert digests(out) == digests(trained)


def test_resume_finds_its_folder_and_settings(trained, tmp_path, capsys):
    before = digests(trained)
    assert run("train", "--resume", trained) == 0
    assert digests(trained) == before


def test_interrupted_run_saves_and_continues(data, tmp_path):
    out = tmp_path / "run"
    command = [sys.executable, "-m", "sdm_lite.app.cli", "train", "--data", data, *TINY, "--mixer", "gdn"]
    command += ["--steps", "100000", "--out", str(out)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    deadline = time.monotonic() + 120
    while len(read_metrics(out / "metrics.jsonl")) < 3:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=60)[0].decode()
    assert process.returncode == 130
    assert "Traceback" not in output and "--resume" in output
    step = checkpoint.load("test", out).step
    assert step == read_metrics(out / "metrics.jsonl")[-1]["step"] >= 3
    # the learning rate had not begun to fall, so the run may end elsewhere
    assert run("train", "--resume", out, "--steps", 2 * step + 2) == 0
    assert checkpoint.load("test", out).step == 2 * step + 2


def test_compare_trains_matched_models(data, tmp_path, capsys):
    out = tmp_path / "both"
    assert run("train", "--data", data, "--preset", "tiny", "--steps", 4, "--compare", "sdm,gdn", "--out", out) == 0
    results = {name: json.loads((out / name / "result.json").read_text()) for name in ("sdm", "gdn")}
    settings = [{k: v for k, v in result["settings"].items() if k != "mixer"} for result in results.values()]
    assert settings[0] == settings[1]
    flops = [result["account"]["flops_per_token"] * result["steps"] for result in results.values()]
    assert max(flops) / min(flops) < 1.05
    assert (out / "loss.png").exists() and (out / "perplexity_by_position.png").exists()
    printed = capsys.readouterr().out
    for word in ("sdm", "gdn", "FLOPs", "n-gram", "memory", "state"):
        assert word in printed
    # one thread in each child gives what one thread gives here
    assert run("train", "--data", data, *TINY, "--steps", 4, "--mixer", "gdn", "--out", tmp_path / "one") == 0
    assert digests(tmp_path / "one") == digests(out / "gdn")


def test_recall_tells_the_mixers_apart_by_name(tmp_path, capsys):
    out = tmp_path / "recall"
    assert run("recall", "--preset", "tiny", "--mixers", "gdn,conv", "--steps", 4, "--out", out) == 0
    accuracy = {name: json.loads((out / name / "result.json").read_text())["accuracy"] for name in ("gdn", "conv")}
    assert all(list(one) == ["4", "8", "16"] and all(0 <= x <= 1 for x in one.values()) for one in accuracy.values())
    assert (out / "recall.png").read_bytes()[:4] == b"\x89PNG"
    printed = capsys.readouterr().out
    assert "conv none" in printed and "16*" in printed  # state sizes; more pairs than in training


def test_demo_ends_with_one_table_and_two_pictures(tmp_path, monkeypatch, capsys):
    text = {name: {"bits_per_byte": bits} for name, bits in (("sdm", 2.0), ("gdn", 2.01))}
    states = {"sdm": 160, "gdn": 10}
    found = {
        name: {"accuracy": {"64": 1.0, "256": 0.75, "512": 0.5}, "account": {"state_elements": state}}
        for name, state in states.items()
    }

    def part(results, picture):
        def run(*arguments):
            out = next(argument for argument in arguments if isinstance(argument, Path))
            assert not out.exists()  # an earlier demo is gone
            out.mkdir()
            (out / picture).write_bytes(picture.encode())
            return results, 0

        return run

    monkeypatch.setattr(demo.train, "compare", part(text, demo.train.POSITION_PICTURE))
    monkeypatch.setattr(demo.recall, "measure", part(found, demo.recall.PICTURE))
    for _ in range(2):
        assert run("demo", "--preset", "tiny") == 0
    out = tmp_path / "runs" / "demo"
    assert {path.name for path in out.glob("*.png")} == {"perplexity_by_position.png", "recall.png"}
    assert json.loads((out / "demo.json").read_text())["recall"]["sdm"]["accuracy"]["256"] == 0.75
    printed = " ".join(capsys.readouterr().out.split())
    assert "16 times larger" in printed and "text does not separate them" in printed


def test_generate_repeats_itself_with_a_seed(trained, capsys):
    texts = []
    for seed in (1, 1, 2):
        arguments = ["--prompt", "def f", "--tokens", 40, "--temperature", 1.0, "--seed", seed]
        assert run("generate", "--checkpoint", trained, *arguments) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]
    assert all(text.startswith("def f") for text in texts)


def test_generate_decodes_characters_that_come_in_pieces(trained, monkeypatch):
    spoken = "é€".encode() + b"\xff!" + "€".encode()[:2]
    monkeypatch.setattr(generate, "stream_tokens", lambda *a, **k: iter(torch.tensor([[b] for b in spoken])))
    output = io.StringIO()
    options = cli.parser().parse_args(["generate", "--checkpoint", str(trained), "--prompt", "ä"])
    assert generate.run(options, output) == 0
    assert output.getvalue() == "äé€\ufffd!\ufffd\n"
