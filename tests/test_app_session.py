"""Sessions of `sdm-lite generate`, its searches, and `sdm-lite state show`."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from caches import same_cache

from sdm_lite.app import checkpoint, cli, generate, models
from sdm_lite.app.settings import TRAIN_PRESETS, Settings
from sdm_lite.nn import HybridLM, HybridState

TINY = {**TRAIN_PRESETS["tiny"], "layers": ("swa", "mixer")}


def write_checkpoint(folder, **settings):
    """A checkpoint of an untrained model."""
    folder.mkdir()
    chosen = Settings(**{**TINY, "tie_embeddings": True, **settings})
    model = models.build(chosen, 256)
    record = {"step": 0, "config": model.config, "settings": chosen.to_json()}
    checkpoint.save(folder, model.state_dict(), {}, record)
    return folder


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Small products gain nothing from threads, and on a busy machine threads wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("runs") / "one")


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def run(*arguments):
    """Exit code of a command, however it ends."""
    try:
        return cli.main([str(argument) for argument in arguments])
    except SystemExit as end:
        return end.code


def say(folder, prompt, *more):
    return run("generate", "--checkpoint", folder, "--prompt", prompt, "--tokens", 12, "--seed", 3, *more)


def ids(text):
    return torch.tensor([list(text.encode())])


def text(tokens):
    return bytes(tokens[0].tolist()).decode(errors="replace")


def test_two_processes_are_one_conversation(trained, tmp_path):
    session, printed = tmp_path / "session", b""
    for prompt in ("one and ", "two and "):
        command = [sys.executable, "-m", "sdm_lite.app.cli", "generate", "--checkpoint", str(trained), "--tokens", "12"]
        command += ["--prompt", prompt, "--seed", "3", "--session", str(session), "--threads", "1"]
        printed += subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
    model, found = models.from_checkpoint("test", trained)
    weights, cache, said = found.record["files"]["model"]["sha256"], HybridState(), ""
    for prompt in ("one and ", "two and "):
        said += text(model.generate(ids(prompt), 12, temperature=generate.TEMPERATURE, seed=3, cache=cache)) + "\n"
    assert printed.decode() == said
    found = HybridState.load(session, model, of=weights)
    assert found.positions == [40] and same_cache(found, cache)


def test_interrupt_leaves_the_session_as_it_was(trained, tmp_path, monkeypatch, capsys):
    session = tmp_path / "session"
    assert say(trained, "abc", "--session", session) == 0
    before, stream = session.read_bytes(), generate.stream_tokens

    def interrupted(*arguments, **options):
        yield from (token for token, _ in zip(stream(*arguments, **options), range(3)))
        raise KeyboardInterrupt

    monkeypatch.setattr(generate, "stream_tokens", interrupted)
    assert say(trained, "more", "--session", session) == 130
    assert session.read_bytes() == before
    monkeypatch.undo()
    assert say(trained, "more", "--session", session) == 0 and session.read_bytes() != before
    assert [path.name for path in tmp_path.iterdir()] == ["session"]


def test_a_session_of_another_model_is_refused(trained, tmp_path, capsys):
    session = tmp_path / "session"
    assert say(trained, "abc", "--session", session) == 0
    before = session.read_bytes()
    other = write_checkpoint(tmp_path / "other", seed=1)
    smaller = write_checkpoint(tmp_path / "smaller", window=16)
    names = [checkpoint.load("test", folder).record["files"]["model"]["sha256"] for folder in (trained, other)]
    capsys.readouterr()
    for folder, words in ((other, names), (smaller, ["window = 16", "window = 32"])):
        assert say(folder, "abc", "--session", session) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and all(word in error for word in words), error
    assert session.read_bytes() == before


def test_a_session_that_cannot_be_used_is_one_line(trained, tmp_path, capsys):
    session = tmp_path / "session"
    assert say(trained, "abc", "--session", session) == 0
    model, found = models.from_checkpoint("test", trained)
    weights = found.record["files"]["model"]["sha256"]
    HybridState.load(session, model, of=weights).fork([0, 0]).save(tmp_path / "two", of=weights)
    (tmp_path / "cut").write_bytes(session.read_bytes()[:-9])
    (tmp_path / "text").write_text("not a session")
    (tmp_path / "folder").mkdir()
    capsys.readouterr()
    for name in ("two", "cut", "text", "folder", "nowhere/session"):
        assert say(trained, "abc", "--session", tmp_path / name) == 2, name
        captured = capsys.readouterr()
        assert captured.err.count("\n") == 1 and name.split("/")[0] in captured.err and not captured.out


@pytest.mark.parametrize("flags", [["--beams", 3], ["--speculative"], ["--speculative", "batched"]], ids=str)
def test_searches(flags, trained, tmp_path, capsys):
    model, _ = models.from_checkpoint("test", trained)
    options = {"num_beams": 3} if flags[0] == "--beams" else {}  # drafts change nothing
    assert say(trained, "abab", *flags, "--session", tmp_path / "session") == 0
    cache = HybridState()
    assert capsys.readouterr().out == text(model.generate(ids("abab"), 12, cache=cache, **options)) + "\n"
    capsys.readouterr()
    assert say(trained, "ab", *flags, "--session", tmp_path / "session") == 0
    assert capsys.readouterr().out == text(model.generate(ids("ab"), 12, cache=cache, **options)) + "\n"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--beams", 0], ["--beams"]),
        (["--beams", 2, "--speculative"], ["--beams", "--speculative"]),
        (["--beams", 2, "--temperature", 0.5], ["--temperature"]),
        (["--speculative", "--temperature", 0.5], ["--temperature"]),
        (["--speculative", "quick"], ["quick", "batched"]),
    ],
    ids=str,
)
def test_flags_that_do_not_go_together(flags, words, trained, capsys):
    assert say(trained, "abc", *flags) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and all(word in error for word in words), error


# ---------------------------------------------------------------- state show


def test_state_show_of_a_session(trained, tmp_path, capsys):
    assert say(trained, "abc", "--session", "session") == 0
    capsys.readouterr()
    assert run("state", "show", "session", "--plot", "slots.png") == 0
    printed = " ".join(capsys.readouterr().out.split())
    model, found = models.from_checkpoint("test", trained)
    cache = HybridState.load("session", model, of=found.record["files"]["model"]["sha256"])
    owned = cache.nbytes().owned
    dense, first = cache.layers[1].memory.dense(), model.blocks[1].mixer.initial_memory()
    changed = (dense[0] != first).any(-1).nonzero().tolist()
    assert f"{owned:,}" in printed and f" {len(changed)} " in printed and " 15 " in printed
    assert owned == len(changed) * 32 * 4
    head, slot = max(changed, key=lambda at: dense[0, at[0], at[1]].norm())
    assert f"layer 2: 1 head of 64 slots of 32 float32; rule shared head {head} slot {slot}:" in printed
    assert (tmp_path / "slots.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_state_show_of_several_sequences_and_of_a_memory(trained, tmp_path, capsys):
    model, _ = models.from_checkpoint("test", trained)
    cache = HybridState()
    model.generate(ids("abcd"), 5, cache=cache)
    cache = cache.fork([0, 0])
    cache.append()
    cache.save("several")
    assert run("state", "show", "several") == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "written by 2 of 3" in printed and "│ 2 │ 0 │ 0 │ 0 │" in printed
    cache.layers[1].memory.save("memory")
    assert run("state", "show", "memory") == 0
    assert "written by 2 of 3" in " ".join(capsys.readouterr().out.split())


def test_state_show_of_fast_weights(capsys):
    options = {"fwpkm": dict(sub_keys=4, k=2, key_dim=4, value_dim=8, chunk=4)}
    sizes = dict(num_heads=2, memory=("fwpkm@2",), options=options)
    model, cache = HybridLM(256, 16, 2, layers=["swa", "conv"], **sizes).eval(), HybridState()
    model.generate(ids("abcd"), 5, cache=cache)
    cache.fork([0, 0]).save("fast")
    owned = cache.fork([0, 0]).layers[1].fast.nbytes().owned
    assert run("state", "show", "fast") == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert f"layer 2: fast weights, 1 head, 16 slots of 8; tokens 9, 9; {owned:,} bytes owned" in printed


def test_state_show_of_a_file_of_something_else(trained, capsys):
    weights = next(trained.glob("model-*.safetensors"))
    assert run("state", "show", weights) == 2
    error = capsys.readouterr().err
    assert "state show" in error and "HybridState.load" not in error


def test_state_show_of_what_is_no_state(trained, tmp_path, capsys):
    assert say(trained, "abc", "--session", "session") == 0
    (tmp_path / "cut").write_bytes((tmp_path / "session").read_bytes()[:-9])
    (tmp_path / "text").write_text("not a session")
    weights = next(trained.glob("model-*.safetensors"))
    capsys.readouterr()
    for name in ("cut", "text", "nowhere", ".", weights):
        assert run("state", "show", name) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and error.count(f" {name}: ") == 1 and error.count(str(tmp_path)) <= 1
        assert not any(word in error for word in ("deserializ", "os error", "Errno")), "our own words"
    assert run("state", "show", "session", "--plot", "nowhere/slots.png") == 2
    assert run("state") == 2
