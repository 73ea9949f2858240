"""``sdm-lite``: the command line. Commands import what they need when they run, so that help comes at once.

Exit codes: 0 done; 1 ``doctor`` found something wrong; 2 a mistake in what was asked for (one line on
stderr); 130 stopped by Ctrl-C, and 143 by SIGTERM, after saving.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from ..errors import SdmError
from .arguments import Parser, number, numbers, path, seed, whole
from .mistakes import is_out_of_memory, require, system_mistake
from .notices import compiling_is_said
from .settings import MIXERS, recall_presets, train_presets

_CLI = ("torch", "rich", "matplotlib", "safetensors")


def parser() -> Parser:
    """Return the parser of all commands."""
    top = Parser(prog="sdm-lite", description="Sparse, updatable memories: train, compare and inspect small models.")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    _add_train(commands)
    _add_recall(commands)
    _add_demo(commands)
    _add_needle(commands)
    _add_generate(commands)
    _add_state(commands)
    doctor = commands.add_parser(
        "doctor",
        help="say what this machine has, compile and check the ops",
        description="Say which packages, rooms and threads this machine has, then check the ops: whether compiled "
        "kernels can be kept, the CPU room gives what the reference gives, gradients agree with differences, and torch "
        "with NumPy; and how fast one forward is. Needs NumPy and Numba only. Exit code 1 where a check fails.",
    )
    doctor.set_defaults(run=_doctor)
    return top


def _add_train(commands: Any) -> None:
    train = commands.add_parser(
        "train",
        help="train a language model on bytes of text or code",
        epilog=f"presets: {_sentences(train_presets())} "
        "Options given beside a preset win over it. What a run leaves in its folder: docs/command-line.md.",
    )
    train.set_defaults(run=_train)
    add = train.add_argument
    add(
        "--data",
        type=path,
        metavar="PATH",
        help="a file or a folder (default: the sources of this Python's standard library)",
    )
    add("--mixer", choices=MIXERS, help="the global mixer (default sdm)")
    add("--compare", metavar="A,B", help="train these mixers side by side under equal FLOPs, e.g. sdm,gdn")
    add("--preset", help="tiny, small (default), demo or medium; the options below change it")
    _add_run(train)
    add("--save-every", type=whole(0), default=0, metavar="N", help="steps between checkpoints (default: at the end)")
    add("--threads", type=whole(1), metavar="N", help="threads of a single run (default: torch's choice)")
    add("--length", type=whole(1), metavar="T", help="bytes in a training window")
    add("--batch", type=whole(1), metavar="B", help="windows in a step")
    add("--dim", type=whole(1), help="width of the model")
    add("--hidden", type=whole(1), help="width inside the MLPs")
    add("--window", type=whole(1), help="tokens that sliding-window attention sees")
    add(
        "--memory",
        action="append",
        metavar="KIND@N,N",
        help="memories in layers, counted from 1: fwpkm@1,3 before the mixer, pkm@2 in place of the MLP; repeatable",
    )
    add("--sub-keys", type=whole(1), metavar="N", help="keys per half of these memories, which have N * N slots")
    add("--memory-chunk", type=whole(1), metavar="C", help="tokens between two writes of fwpkm memories")
    add("--muon-rate", type=number(0, low_too=True), metavar="X", help="learning rate of Muon; 0: AdamW for everything")


def _sentences(presets: dict[str, str]) -> str:
    return " ".join(f"{name}: {text}." for name, text in presets.items())


def _add_recall(commands: Any) -> None:
    recall = commands.add_parser(
        "recall",
        help="train recall of key-value pairs from scratch and compare mixers",
        epilog=f"presets: {_sentences(recall_presets())}",
    )
    recall.set_defaults(run=_recall)
    add = recall.add_argument
    add("--mixers", default="sdm,gdn", metavar="A,B", help=f"out of {', '.join(MIXERS)} (default sdm,gdn)")
    add("--preset", help="demo (default) or tiny")
    _add_run(recall)
    add("--pairs", type=numbers, metavar="N,N", help="numbers of pairs to train on; twice the largest is tested, too")
    add("--key-dim", type=whole(1), metavar="N", help="key width of a gdn layer")


def _add_run(command: Any) -> None:
    add = command.add_argument
    add("--steps", type=whole(1), metavar="N", help="optimiser steps")
    add("--seconds", type=number(0), metavar="S", help="seconds of training; with --steps, whichever ends first")
    add("--seed", type=seed, metavar="N", help="of the parameters and of the data's order (default 0)")
    add("--out", type=path, metavar="DIR", help="folder of the run (default: a new one in runs/)")
    add(
        "--resume",
        nargs="?",
        const="",
        type=path,
        metavar="DIR",
        help="continue the run in DIR, or in --out, bit for bit",
    )
    add("--learning-rate", type=number(0), metavar="X", help="of AdamW")
    add("--slots", type=whole(1), metavar="N", help="slots of an sdm layer, a square number")
    add("--writes", type=whole(1), metavar="W", help="slots that a token writes")
    add("--reads", type=whole(1), metavar="R", help="slots that a token reads")


def _add_demo(commands: Any) -> None:
    demo = commands.add_parser("demo", help="text and recall, sdm beside gdn: one table and two pictures")
    demo.set_defaults(run=_demo)
    add = demo.add_argument
    add("--out", type=path, metavar="DIR", help="folder (default runs/demo); an earlier demo in it is replaced")
    add("--preset", default="demo", help="demo, or tiny to see it work in seconds")
    add("--seed", type=seed, default=0, metavar="N", help="as in train (default 0)")


def _add_needle(commands: Any) -> None:
    needle = commands.add_parser("needle", help="find facts in a haystack by re-reading it into fast weights")
    needle.set_defaults(run=_needle)
    add = needle.add_argument
    add("--out", type=path, metavar="DIR", help="folder (default runs/needle); an earlier result in it is replaced")
    add("--preset", default="demo", help="demo, or tiny to see it work in seconds")
    add("--variants", metavar="A,B", help="full, no lookahead, no gate weighting, no address loss (default: all)")
    add("--steps", type=whole(1), metavar="N", help="optimiser steps of each variant")
    add("--seed", type=seed, metavar="N", help="of the parameters and the haystacks (default 0)")
    add("--seeds", type=whole(1), default=1, metavar="N", help="train N seeds, from --seed on: mean and range")
    add("--haystack", type=whole(1), metavar="T", help="tokens of a haystack, which is one chunk")
    add("--facts", type=whole(1), metavar="N", help="facts in it, in training")
    add("--sub-keys", type=whole(1), metavar="N", help="keys per half; the memory has N * N slots")
    add("--trained-passes", type=whole(1), metavar="N", help="readings in training")
    add("--passes", type=whole(1), metavar="N", help="readings that are measured (default 4)")
    add("--learning-rate", type=number(0), metavar="X", help="of AdamW")
    add("--jobs", type=whole(1), metavar="N", help="trainings at a time, a thread each (default: one per core)")


def _add_generate(commands: Any) -> None:
    generate = commands.add_parser("generate", help="stream text from a checkpoint")
    generate.set_defaults(run=_generate)
    add = generate.add_argument
    add("--checkpoint", required=True, type=path, metavar="DIR", help="folder of a run")
    add("--prompt", required=True, metavar="TEXT")
    add("--tokens", type=whole(0), default=256, metavar="N", help="bytes to add (default 256)")
    add("--temperature", type=number(0, low_too=True), metavar="X", help="0: always the likeliest byte (default 0.8)")
    add("--seed", type=seed, metavar="N", help="of the draws (default: another each time)")
    add("--session", type=path, metavar="FILE", help="go on with the conversation in FILE, and keep it there")
    add("--beams", type=whole(1), default=1, metavar="N", help="search with N beams instead of drawing bytes")
    speculative = "the likeliest bytes, several checked in one pass; batched: up to near ties"
    add("--speculative", nargs="?", const=True, default=False, choices=("batched",), help=speculative)
    add("--threads", type=whole(1), metavar="N", help="threads (default: torch's choice)")


def _add_state(commands: Any) -> None:
    state = commands.add_parser("state", help="look into saved states and sessions")
    verbs = state.add_subparsers(dest="verb", metavar="VERB", required=True)
    show = verbs.add_parser("show", help="sequences, tokens, rows owned, most-written slots")
    show.set_defaults(run=_state)
    show.add_argument("file", metavar="FILE")
    show.add_argument("--plot", metavar="PNG", help="draw which slots are in use")


def _train(options: argparse.Namespace) -> int:
    require("train", *_CLI)
    from . import train

    return train.run(options, _console())


def _recall(options: argparse.Namespace) -> int:
    require("recall", *_CLI)
    from . import recall

    return recall.run(options, _console())


def _demo(options: argparse.Namespace) -> int:
    require("demo", *_CLI)
    from . import demo

    return demo.run(options, _console())


def _needle(options: argparse.Namespace) -> int:
    require("needle", *_CLI)
    from . import needle

    return needle.run(options, _console())


def _generate(options: argparse.Namespace) -> int:
    require("generate", "torch", "safetensors")
    from . import generate

    return generate.run(options)


def _state(options: argparse.Namespace) -> int:
    require("state show", *_CLI)
    from . import state

    return state.run(options, _console())


def _doctor(options: argparse.Namespace) -> int:
    from . import doctor

    return doctor.run(print)


def _console() -> Any:
    from rich.console import Console

    class PipedConsole(Console):
        """A console that lets :func:`main` end the command when the reader of its output has gone."""

        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    return PipedConsole()


def main(arguments: list[str] | None = None) -> int:
    """Run a command; return its exit code. A mistake is one line on stderr and code 2."""
    options = parser().parse_args(arguments)
    try:
        with compiling_is_said():
            return options.run(options)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output has gone (| head): nor is there anyone to tell at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except SdmError as error:
        return _say(error)
    except (OSError, MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not is_out_of_memory(error):
            raise
        return _say(system_mistake(options.command, error))


def _say(error: SdmError) -> int:
    print("sdm-lite " + " ".join(str(error).split()), file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
