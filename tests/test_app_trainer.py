"""Training: a resumed run equals one that was never interrupted, and ends are orderly."""

from __future__ import annotations

import dataclasses
import os
import signal

import pytest
import torch
from byte_model import ByteModel, NextByte

from sdm_lite.app import checkpoint, optim
from sdm_lite.app.mistakes import CommandError
from sdm_lite.app.muon import Muon, orthogonalise
from sdm_lite.app.settings import Settings
from sdm_lite.app.trainer import BEFORE_DECAY, METRICS, StopRequest, Trainer, pick_checkpoint, read_metrics

SETTINGS = Settings(steps=12, warmup=3, decay=0.5, seed=5)


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def trainer(folder, settings=SETTINGS, task=None, **options):
    folder.mkdir(exist_ok=True)
    torch.manual_seed(settings.seed)
    return Trainer("train", settings, task or NextByte(), ByteModel(), folder, **options)


def train(one, stop=None):
    with stop or StopRequest() as asked:
        return one.train(asked, lambda line: None)


def stop_after(steps):
    """A task that asks for the end, as Ctrl-C does, while a step runs."""
    return NextByte(lambda step: os.kill(os.getpid(), signal.SIGINT) if step == steps - 1 else None)


def resumed(folder, settings=SETTINGS, task=None):
    torch.manual_seed(999)  # the parameters must come from the checkpoint
    one = Trainer("train", settings, task or NextByte(), ByteModel(), folder)
    one.restore(pick_checkpoint("train", folder, settings))
    return one


def everything(one):
    """Parameters and optimiser state by name."""
    return {**one.model.state_dict(), **optim.state_tensors(one.optimizers, one.model)}


def assert_same(one, other):
    ours, expected = everything(one), everything(other)
    assert ours.keys() == expected.keys()
    for name in ours:
        assert torch.equal(ours[name], expected[name]), name


def numbers(folder):
    """The metrics but for those that a clock gives."""
    return [(line["step"], line["loss"], line["learning_rate"]) for line in read_metrics(folder / METRICS)]


@pytest.mark.parametrize("stopped_at", [2, 6, 7, 10])
def test_stopped_and_resumed_equals_whole(tmp_path, stopped_at):
    whole = trainer(tmp_path / "whole")
    assert train(whole)
    first = trainer(tmp_path / "parts", task=stop_after(stopped_at))
    with StopRequest() as stop:
        assert not first.train(stop, lambda line: None)
    assert stop.exit_code == 130
    assert first.step == stopped_at
    second = resumed(tmp_path / "parts")
    assert second.step == stopped_at
    assert train(second)
    assert_same(second, whole)
    assert numbers(tmp_path / "parts") == numbers(tmp_path / "whole")


def test_both_optimizers_are_at_work(tmp_path):
    one = trainer(tmp_path / "run")
    before = {name: value.clone() for name, value in one.model.state_dict().items()}
    train(one)
    owners = {name.split("/")[0] for name in optim.state_tensors(one.optimizers, one.model)}
    assert owners == {"AdamW", "Muon"}
    for name, value in one.model.state_dict().items():
        assert not torch.equal(value, before[name]), name
    losses = [line["loss"] for line in read_metrics(tmp_path / "run" / METRICS)]
    assert losses[-1] < losses[0]


def test_a_finished_run_made_longer_equals_the_long_run(tmp_path):
    long = dataclasses.replace(SETTINGS, steps=24)
    whole = trainer(tmp_path / "whole", long)
    train(whole)
    train(trainer(tmp_path / "parts"))
    second = resumed(tmp_path / "parts", long)
    # the rate had begun to fall: the run goes on from before that
    assert second.step < SETTINGS.steps
    assert train(second)
    assert_same(second, whole)
    assert numbers(tmp_path / "parts") == numbers(tmp_path / "whole")


def test_another_length_that_cannot_be_continued_is_refused(tmp_path):
    whole_decay = dataclasses.replace(SETTINGS, decay=1.0)
    train(trainer(tmp_path / "run", whole_decay))
    with pytest.raises(CommandError, match=r"steps 12.*steps 24"):
        pick_checkpoint("train", tmp_path / "run", dataclasses.replace(whole_decay, steps=24))


def test_other_data_is_refused(tmp_path):
    train(trainer(tmp_path / "run", task=NextByte(facts={"data": "aaaa"})))
    with pytest.raises(CommandError, match=r"'aaaa'.*'bbbb'"):
        resumed(tmp_path / "run", task=NextByte(facts={"data": "bbbb"}))


def test_save_every_keeps_the_last_and_nothing_else(tmp_path):
    steps = []

    def look(step):
        if checkpoint.exists(tmp_path / "run"):
            steps.append(checkpoint.load("train", tmp_path / "run").step)

    train(trainer(tmp_path / "run", task=NextByte(look), save_every=4))
    assert sorted(set(steps)) == [4, 8]
    assert checkpoint.load("train", tmp_path / "run").step == 12
    names = {path.name.split("-")[1] for path in (tmp_path / "run").glob("*.safetensors")}
    assert names == {"000012", f"{checkpoint.load('train', tmp_path / 'run', BEFORE_DECAY).step:06d}"}


def test_seconds_end_a_run_and_its_rate_has_fallen(tmp_path):
    settings = dataclasses.replace(SETTINGS, steps=None, seconds=0.3)
    assert train(trainer(tmp_path / "run", settings))
    lines = read_metrics(tmp_path / "run" / METRICS)
    assert lines[-1]["progress"] == 1.0
    assert lines[-2]["seconds"] < 0.3 <= lines[-1]["seconds"]
    assert lines[-1]["learning_rate"] < 0.5 * settings.learning_rate


def test_a_loss_that_is_not_finite_ends_the_run_and_spares_the_checkpoint(tmp_path):
    class Broken(NextByte):
        def loss(self, model, batch):
            loss, tokens = super().loss(model, batch)
            return (loss * float("nan") if one.step == 5 else loss), tokens

    one = trainer(tmp_path / "run", task=Broken(), save_every=4)
    with pytest.raises(CommandError, match="step 6"):
        train(one)
    assert checkpoint.load("train", tmp_path / "run").step == 4


def test_metrics_have_the_promised_fields(tmp_path):
    train(trainer(tmp_path / "run"))
    lines = read_metrics(tmp_path / "run" / METRICS)
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert all({"loss", "tokens_per_second"} <= line.keys() and line["tokens_per_second"] > 0 for line in lines)


def test_second_interrupt_is_immediate():
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_child_ends_when_its_parent_is_gone(monkeypatch):
    monkeypatch.setenv("SDM_LITE_PARENT", str(os.getppid()))
    assert not StopRequest()
    monkeypatch.setenv("SDM_LITE_PARENT", str(os.getppid() + 1))
    stop = StopRequest()
    assert stop and stop.exit_code == 143


@pytest.mark.parametrize("shape", [(8, 8), (6, 20), (20, 6)])
def test_muon_is_torchs_but_for_bfloat16(shape):
    reference = getattr(torch.optim, "Muon", None)
    if reference is None:
        pytest.skip("this torch has no Muon")
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(shape, generator=generator)
    ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    optimizers = [Muon([ours], lr=0.02, weight_decay=0.1), reference([theirs], lr=0.02, weight_decay=0.1)]
    for _ in range(5):
        gradient = torch.randn(shape, generator=generator)
        for parameter, optimizer in zip((ours, theirs), optimizers):
            parameter.grad = gradient.clone()
            optimizer.step()
    moved = (theirs - start).norm()
    # torch rounds fifteen matrix products to 8 bits; another momentum or scale would differ by 5 % and more
    assert (ours - theirs).norm() < 0.02 * moved


def test_orthogonalise_keeps_directions_and_evens_out_sizes():
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.linalg.qr(torch.randn(6, 6, generator=generator))[0] for _ in range(2))
    sizes = torch.tensor([1.0, 0.8, 0.5, 0.3, 0.2, 0.1])
    found = left.mT @ orthogonalise(((left * sizes) @ right)[None])[0] @ right.mT
    off_diagonal = found - torch.diag(found.diagonal())
    assert off_diagonal.abs().max() < 1e-5  # float32 rounding over fifteen products
    assert 0.6 < found.diagonal().min() and found.diagonal().max() < 1.3
