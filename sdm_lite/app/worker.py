"""The process behind one of several runs: ``python -m sdm_lite.app.worker FOLDER``, settings in FOLDER."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ..errors import SdmError

SETTINGS = "settings.json"


def main(arguments: list[str] | None = None) -> int:
    """Run what FOLDER/settings.json says; 0 done, 2 a mistake (one line), 130 or 143 stopped and saved."""
    parser = argparse.ArgumentParser(prog="sdm-lite worker", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--save-every", type=int, default=0)
    options = parser.parse_args(arguments)
    import torch
    from rich.console import Console

    from .files import read_json
    from .mistakes import system_mistake
    from .notices import compiling_is_said
    from .progress import Board
    from .run import build_task, run_one
    from .settings import Settings
    from .trainer import StopRequest

    torch.set_num_threads(1)
    try:
        settings = Settings.from_json("worker", read_json("worker", options.folder / SETTINGS))
        command = "recall" if settings.task == "recall" else "train"
        task = build_task(command, settings)
        board = Board([settings.mixer], Console(force_terminal=False))
        with compiling_is_said(), StopRequest() as stop, board:
            result = run_one(
                command, task, options.folder, board, stop, resume=options.resume, save_every=options.save_every
            )
    except SdmError as error:
        print(error, file=sys.stderr)
        return 2
    except (OSError, MemoryError) as error:
        print(system_mistake("worker", error), file=sys.stderr)
        return 2
    return 0 if result is not None else stop.exit_code


if __name__ == "__main__":
    sys.exit(main())
