"""One run from its settings to its result: task, model, training, measurements."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from . import models
from .data import load_corpus
from .files import write_json
from .progress import Board
from .settings import Settings
from .tasks import RecallTask, TextTask
from .trainer import Stopped, StopRequest, Trainer, pick_checkpoint

RESULT = "result.json"


def build_task(command: str, settings: Settings) -> TextTask | RecallTask:
    """Return the task of `settings`; CommandError when its data cannot be had."""
    if settings.task == "recall":
        return RecallTask(settings)
    return TextTask(settings, load_corpus(command, settings.data, settings.length))


def run_one(
    command: str,
    task: TextTask | RecallTask,
    folder: Path,
    board: Board,
    stop: StopRequest,
    *,
    resume: bool = False,
    save_every: int = 0,
) -> dict[str, Any] | None:
    """Train and measure one model on `task` in `folder`; return its result, or None when `stop` came first."""
    settings = task.settings
    name = settings.mixer
    model = models.build(settings, task.vocab_size)
    trainer = Trainer(command, settings, task, model, folder, save_every=save_every)
    if resume:
        trainer.restore(pick_checkpoint(command, folder, settings))

    def show(line: dict[str, Any]) -> None:
        board.update(name, line["progress"], line["step"], line["loss"], line["tokens_per_second"])

    def note(text: str) -> None:
        if stop:
            raise Stopped
        board.phase(name, text)

    if not trainer.train(stop, show):
        return None
    started = time.perf_counter()
    try:
        with torch.no_grad():
            measured = task.evaluate(model, note)
    except Stopped:
        return None
    result = {
        "mixer": settings.mixer,
        "settings": settings.to_json(),
        "steps": trainer.step,
        "seconds": {"training": trainer.elapsed, "measuring": time.perf_counter() - started},
        "account": models.account(model, settings),
        **task.facts,
        **measured,
    }
    write_json(folder / RESULT, result)
    board.phase(name, "done", 1.0)
    return result
