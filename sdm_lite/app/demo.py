"""``sdm-lite demo``: text, then recall; one table and two pictures."""

from __future__ import annotations

import argparse
import shutil
import time
from pathlib import Path

from rich.console import Console

from . import recall, tables, train
from .files import make_folder, write_json
from .mistakes import mistake

MIXERS = "sdm,gdn"
PRESETS = ("demo", "tiny")


def run(options: argparse.Namespace, console: Console) -> int:
    """Run both demos into ``--out``, over an earlier demo; return the exit code."""
    started = time.monotonic()
    if options.preset not in PRESETS:
        raise mistake("demo", "--preset", " or ".join(PRESETS), repr(options.preset), "name one of these")
    out = make_folder("demo", "--out", Path(options.out or "runs/demo"))
    for part in ("text", "recall"):
        shutil.rmtree(out / part, ignore_errors=True)
    mixers = train.parse_mixers("demo", "demo", MIXERS)
    console.rule("1 of 2: language models on bytes of code")
    text, code = train.compare(
        argparse.Namespace(preset=options.preset, save_every=0),
        {"seed": options.seed},
        mixers,
        out / "text",
        False,
        console,
    )
    if text is None:
        return code
    console.rule("2 of 2: recall of key-value pairs")
    recall_options = argparse.Namespace(preset=options.preset, mixers=MIXERS, seed=options.seed)
    found, code = recall.measure(recall_options, out / "recall", console)
    if found is None:
        return code
    pictures = {train.POSITION_PICTURE: out / "text", recall.PICTURE: out / "recall"}
    for name, folder in pictures.items():
        shutil.copyfile(folder / name, out / name)
    write_json(out / "demo.json", {"text": text, "recall": found, "seconds": time.monotonic() - started})
    console.rule("result")
    tables.show_demo(console, text, found)
    for name in pictures:
        train.say(console, f"picture: {out / name}")
    train.say(console, f"{time.monotonic() - started:.0f} s in all")
    return 0
