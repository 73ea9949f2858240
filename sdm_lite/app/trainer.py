"""The training loop: steps, metrics, checkpoints, and an orderly end on Ctrl-C."""

from __future__ import annotations

import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from ..nn import carry_fast_weights, clip_gradients
from ..whole_files import write_whole
from . import checkpoint, optim
from .mistakes import mistake
from .settings import ENDS, Settings

METRICS = "metrics.jsonl"
BEFORE_DECAY = "before-decay"
#: how notes from an evaluation begin; a watching process looks for it
MEASURING = "measuring"
#: set for child processes: the process that watches them; when it is gone they save and end
PARENT_VARIABLE = "SDM_LITE_PARENT"


class Stopped(Exception):
    """The user asked for an end while something that can be repeated was running."""


class Task(Protocol):
    """What is trained: batches as a function of the step, a loss, and what to measure at the end."""

    #: what a resumed run must find again: it is stored with the checkpoint and compared
    facts: dict[str, Any]

    def batch(self, step: int) -> Any:
        """Return the batch of `step`."""

    def loss(self, model: Any, batch: Any) -> tuple[torch.Tensor, int]:
        """Return the mean loss in nats and the number of tokens that the model read."""

    def evaluate(self, model: Any, note: Callable[[str], None]) -> dict[str, Any]:
        """Return the measurements, as JSON; call `note` between the parts."""


class StopRequest:
    """Turns the first Ctrl-C (or SIGTERM) into a flag; the second one acts at once."""

    def __init__(self) -> None:
        self.signal = 0
        self.parent = int(os.environ.get(PARENT_VARIABLE, 0))
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        """Take over the signals, where Python lets us (in the main thread)."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *details: object) -> None:
        """Give the signals back."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: object) -> None:
        if self.signal:
            raise KeyboardInterrupt
        self.signal = number

    def __bool__(self) -> bool:
        """Return whether to end."""
        if not self.signal and self.parent and os.getppid() != self.parent:
            self.signal = signal.SIGTERM
        return self.signal != 0

    @property
    def exit_code(self) -> int:
        """128 + the signal's number, as shells count it: 130 for Ctrl-C."""
        return 128 + self.signal


class Trainer:
    """Trains `model` on `task` and keeps its files in `folder`.

    Parameters
    ----------
    command : str
        For error texts.
    settings : Settings
        What to compute and when to end.
    task : Task
        Batches, loss, measurements.
    model : nn.Module
        With a ``config`` dictionary from which it can be rebuilt.
    folder : Path
        For ``metrics.jsonl`` and the checkpoints.
    save_every : int
        Steps between checkpoints; 0: only at the end (and on Ctrl-C).
    """

    def __init__(
        self,
        command: str,
        settings: Settings,
        task: Task,
        model: nn.Module,
        folder: Path,
        *,
        save_every: int = 0,
    ):
        self.command, self.settings, self.task, self.model, self.folder = command, settings, task, model, folder
        self.save_every = save_every
        self.optimizers = optim.build_optimizers(settings, model)
        self.step = 0
        self.elapsed = 0.0
        self.saved_step = -1
        self.decaying = False  # whether the last step's learning rate was falling

    @property
    def progress(self) -> float:
        """The share of the run that is done: of its steps or of its time, whichever is larger."""
        shares = [0.0]
        if self.settings.steps is not None:
            shares.append(self.step / self.settings.steps)
        if self.settings.seconds is not None:
            shares.append(self.elapsed / self.settings.seconds)
        return min(1.0, max(shares))

    def restore(self, found: checkpoint.Checkpoint) -> None:
        """Continue from `found`: parameters, optimisers, step and time; later metrics are dropped."""
        for name, value in self.task.facts.items():
            if found.record.get(name) != value:
                expected = f"{found.record.get(name)!r}, as in the checkpoint"
                raise mistake(self.command, f"--resume with {name}", expected, repr(value), "use the same data")
        load_model(self.command, self.model, found)
        tensors = found.tensors(self.command, "optimizer")
        optim.load_state_tensors(self.command, self.optimizers, self.model, tensors)
        self.step, self.elapsed = found.step, float(found.record.get("elapsed", 0.0))
        self.decaying = bool(found.record.get("decaying"))
        _keep_metrics(self.command, self.folder / METRICS, self.step)
        checkpoint.tidy(self.folder)

    def train(self, stop: StopRequest, show: Callable[[dict[str, Any]], None]) -> bool:
        """Step until the end, saving on the way; return False when `stop` came first (saved then, too)."""
        self.model.train()
        if self.progress < 1.0:
            self._warm_up()
        if self.step == 0:
            _keep_metrics(self.command, self.folder / METRICS, 0)
        smooth: float | None = None
        with open(self.folder / METRICS, "a", encoding="utf-8") as metrics:
            while self.progress < 1.0 and not stop:
                falls = optim.is_decaying(self.progress, self.settings.decay)
                if falls and not self.decaying and self.step > 0:
                    self.save(BEFORE_DECAY)
                self.decaying = falls
                line = self._one_step()
                metrics.write(json.dumps(line) + "\n")
                metrics.flush()
                smooth = line["loss"] if smooth is None else 0.95 * smooth + 0.05 * line["loss"]
                show({**line, "loss": smooth})
                if self.save_every and self.step % self.save_every == 0:
                    self.save()
        if self.saved_step != self.step:
            self.save()
        return not stop

    def _warm_up(self) -> None:
        """Run a step without taking it: kernels compile and libraries load now, not on the run's clock."""
        self.task.loss(self.model, self.task.batch(self.step))[0].backward()
        self._forget_gradients()

    def _forget_gradients(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def _one_step(self) -> dict[str, Any]:
        settings = self.settings
        progress = self.progress
        started = time.perf_counter()
        # whatever a layer draws at random is then a function of the step, too
        torch.manual_seed((settings.seed * 1_000_003 + self.step) % 2**64)
        factor = optim.rate_factor(self.step, progress, settings.warmup, settings.decay)
        optim.set_rate(self.optimizers, factor)
        loss, tokens = self.task.loss(self.model, self.task.batch(self.step))
        value = loss.item()
        if not math.isfinite(value):
            fix = "lower --learning-rate; the last checkpoint is untouched"
            raise mistake(self.command, f"loss at step {self.step + 1}", "a finite number", str(value), fix)
        self._forget_gradients()
        loss.backward()
        norm, _ = clip_gradients(self.model, settings.clip)
        for optimizer in self.optimizers:
            optimizer.step()
        carry_fast_weights(self.model)
        taken = time.perf_counter() - started
        self.step += 1
        self.elapsed += taken
        return {
            "step": self.step,
            "loss": value,
            "tokens_per_second": tokens / taken,
            "learning_rate": settings.learning_rate * factor,
            "gradient_norm": norm,
            "seconds": self.elapsed,
            "progress": self.progress,
        }

    def save(self, name: str = checkpoint.LATEST) -> None:
        """Write a checkpoint of this moment."""
        record = {
            "step": self.step,
            "elapsed": self.elapsed,
            "decaying": self.decaying,
            "config": getattr(self.model, "config", {}),
            "settings": self.settings.to_json(),
            **self.task.facts,
        }
        tensors = optim.state_tensors(self.optimizers, self.model)
        checkpoint.save(self.folder, self.model.state_dict(), tensors, record, name)
        if name == checkpoint.LATEST:
            self.saved_step = self.step


def load_model(command: str, model: nn.Module, found: checkpoint.Checkpoint) -> None:
    """Load the parameters of `found` into `model`; CommandError when names, shapes or dtypes differ."""
    tensors = found.tensors(command, "model")
    check_arrays(command, model, found, tensors)
    model.load_state_dict(tensors, strict=True)


def check_arrays(command: str, model: nn.Module, found: checkpoint.Checkpoint, tensors: dict[str, Any]) -> None:
    """Raise CommandError unless `tensors` are what `model` (which may lie on the meta device) holds."""

    def facts(arrays: dict[str, Any]) -> dict[str, tuple[Any, ...]]:
        return {name: (*array.shape, array.dtype) for name, array in arrays.items()}

    expected, got = facts(model.state_dict()), facts(tensors)
    wrong = [name for name in {**expected, **got} if expected.get(name) != got.get(name)]
    if wrong:
        first = f"{wrong[0]} {got.get(wrong[0], 'missing')} for {expected.get(wrong[0], 'nothing')}"
        raise mistake(command, str(found.folder), "the arrays of its config", first, "use another checkpoint")


def pick_checkpoint(command: str, folder: Path, settings: Settings) -> checkpoint.Checkpoint:
    """Return the checkpoint of `folder` from which a run of `settings` continues exactly.

    The latest, where the run ends as it was meant to, or where its learning rate had not begun to fall.
    Otherwise the one kept from before the fall: a run that is made longer repeats the fall later.
    """
    names = [name for name in (checkpoint.LATEST, BEFORE_DECAY) if checkpoint.exists(folder, name)]
    latest = checkpoint.load(command, folder)
    for name in names:
        found = checkpoint.load(command, folder, name)
        stored = found.record.get("settings", {})
        if all(stored.get(end) == getattr(settings, end) for end in ENDS):
            return found
        last = (found.step - 1) / settings.steps if settings.steps is not None else 0.0
        if not found.record.get("decaying") and not optim.is_decaying(last, settings.decay):
            return found
    stored = latest.record.get("settings", {})
    expected = ", ".join(f"{end} {stored.get(end)}" for end in ENDS) + " as in the checkpoint (its rate has fallen)"
    got = ", ".join(f"{end} {getattr(settings, end)}" for end in ENDS)
    raise mistake(command, "--resume with --steps", expected, got, "pass the same, or start a new run")


def _keep_metrics(command: str, path: Path, step: int) -> None:
    """Drop the lines of steps after `step`, and a last line that was cut short."""
    if not path.exists():
        return
    kept = [line for line in read_metrics(path, command) if line["step"] <= step]
    text = "".join(json.dumps(line) + "\n" for line in kept)
    write_whole(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def read_metrics(path: Path, command: str = "train") -> list[dict[str, Any]]:
    """Return the lines of a metrics file but a last one that is being written; CommandError for any other text."""
    lines: list[dict[str, Any]] = []
    texts = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True) if path.exists() else []
    for number, text in enumerate(texts, start=1):
        try:
            line = json.loads(text)
            good = isinstance(line, dict) and type(line["step"]) is int and type(line["loss"]) is float
        except (ValueError, KeyError, RecursionError):
            good = False
        if not good and number == len(texts) and not text.endswith("\n"):
            break
        if not good:
            expected, fix = "a JSON object with step and loss", "delete that line, or the file"
            raise mistake(command, f"{path} line {number}", expected, repr(text.rstrip()[:60]), fix)
        lines.append(line)
    return lines
