"""The commands from outside: what they leave behind, and that a mistake is one line and exit code 2."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from sdm_lite.app import checkpoint, cli, demo, doctor, generate
from sdm_lite.app.trainer import read_metrics

TINY = ["--preset", "tiny", "--threads", "1"]


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
    for index in range(60):
        words = "".join(f"def function_{index}_{line}(x):\n    return x + {line}\n" for line in range(30))
        (folder / f"{index:02d}.py").write_text(words)
    return str(folder)


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    """The folder of a finished run of 8 steps."""
    out = tmp_path_factory.mktemp("runs") / "trained"
    assert cli.main(["train", "--data", data, *TINY, "--steps", "8", "--out", str(out)]) == 0
    return out


def run(*arguments):
    """Exit code of a command, however it ends."""
    try:
        return cli.main([str(argument) for argument in arguments])
    except SystemExit as end:
        return end.code


def digests(folder):
    files = checkpoint.load("test", folder).record["files"]
    return {part: files[part]["sha256"] for part in files}


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
        (["train", "--slots", "1000", "--data", "text"], ["slots_per_head", "1000"]),
        (["train", "--writes", "2000", "--data", "text"], ["2000"]),
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


@pytest.mark.parametrize("command", [["recall"], ["train", "--compare", "sdm,gdn"]], ids=["recall", "compare"])
def test_resume_of_a_folder_without_such_a_run_is_refused(command, tmp_path, capsys):
    assert cli.main([*command, "--preset", "tiny", "--resume", str(tmp_path)]) == 2
    assert "--resume" in capsys.readouterr().err and not list(tmp_path.iterdir())
