"""``sdm-lite``: the command line. Commands import what they need when they run, so that help comes at once.

Exit codes: 0 done; 1 ``doctor`` found something wrong; 2 a mistake in what was asked for (one line on
stderr); 130 stopped by Ctrl-C, and 143 by SIGTERM, after saving.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any, NoReturn

from ..errors import SdmError
from .mistakes import require

_CLI = ("torch", "rich", "matplotlib", "safetensors")


class Parser(argparse.ArgumentParser):
    """argparse with errors of one line."""

    def error(self, text: str) -> NoReturn:
        """Print the mistake and end with code 2."""
        self.exit(2, f"{self.prog}: {text} (see {self.prog} --help)\n")


def parser() -> Parser:
    """Return the parser of all commands."""
    top = Parser(prog="sdm-lite", description="Sparse, updatable memories: train, compare and inspect small models.")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    _add_train(commands)
    _add_recall(commands)
    _add_demo(commands)
    _add_needle(commands)
    _add_generate(commands)
    doctor = commands.add_parser("doctor", help="say what this machine has and check the ops (about ten seconds)")
    doctor.set_defaults(run=_doctor)
    return top


def _add_train(commands: Any) -> None:
    train = commands.add_parser("train", help="train a language model on bytes of text or code")
    train.set_defaults(run=_train)
    add = train.add_argument
    add("--data", metavar="PATH", help="a file or a folder (default: the sources of this Python's standard library)")
    add("--mixer", choices=("sdm", "gdn", "conv", "swa", "full"), help="the global mixer (default sdm)")
    add("--compare", metavar="A,B", help="train these mixers side by side under equal FLOPs, e.g. sdm,gdn")
    add("--preset", help="tiny, small (default), demo or medium; the options below change it")
    _add_run(train)
    add("--save-every", type=int, default=0, metavar="N", help="steps between checkpoints (default: at the end)")
    add("--threads", type=_positive, metavar="N", help="threads of a single run (default: torch's choice)")
    add("--length", type=_positive, metavar="T", help="bytes in a training window")
    add("--batch", type=_positive, metavar="B", help="windows in a step")
    add("--dim", type=_positive, help="width of the model")
    add("--hidden", type=_positive, help="width inside the MLPs")
    add("--window", type=_positive, help="tokens that sliding-window attention sees")
    add(
        "--memory",
        action="append",
        metavar="KIND@N,N",
        help="memories in layers, counted from 1: fwpkm@1,3 before the mixer, pkm@2 in place of the MLP; repeatable",
    )
    add("--sub-keys", type=_positive, metavar="N", help="keys per half of these memories, which have N * N slots")
    add("--memory-chunk", type=_positive, metavar="C", help="tokens between two writes of fwpkm memories")
    add("--muon-rate", type=float, metavar="X", help="learning rate of Muon; 0: AdamW for everything")


def _add_recall(commands: Any) -> None:
    recall = commands.add_parser("recall", help="train recall of key-value pairs from scratch and compare mixers")
    recall.set_defaults(run=_recall)
    add = recall.add_argument
    add("--mixers", default="sdm,gdn", metavar="A,B", help="out of sdm, gdn, conv, swa, full (default sdm,gdn)")
    add("--preset", help="demo (default) or tiny")
    _add_run(recall)
    add("--pairs", type=_numbers, metavar="N,N", help="numbers of pairs to train on; twice the largest is tested, too")
    add("--key-dim", type=_positive, metavar="N", help="key width of a gdn layer")


def _add_run(command: Any) -> None:
    add = command.add_argument
    add("--steps", type=_positive, metavar="N", help="optimiser steps")
    add("--seconds", type=float, metavar="S", help="seconds of training; with --steps, whichever ends first")
    add("--seed", type=int, metavar="N", help="of the parameters and of the data's order (default 0)")
    add("--out", metavar="DIR", help="folder of the run (default: a new one in runs/)")
    add("--resume", nargs="?", const="", metavar="DIR", help="continue the run in DIR, or in --out, bit for bit")
    add("--learning-rate", type=float, metavar="X", help="of AdamW")
    add("--slots", type=_positive, metavar="N", help="slots of an sdm layer, a square number")
    add("--writes", type=_positive, metavar="W", help="slots that a token writes")
    add("--reads", type=_positive, metavar="R", help="slots that a token reads")


def _add_demo(commands: Any) -> None:
    demo = commands.add_parser("demo", help="text and recall, sdm beside gdn: one table and two pictures")
    demo.set_defaults(run=_demo)
    demo.add_argument("--out", metavar="DIR", help="folder (default runs/demo); an earlier demo in it is replaced")
    demo.add_argument("--preset", default="demo", help="demo, or tiny to see it work in seconds")
    demo.add_argument("--seed", type=int, default=0, metavar="N")


def _add_needle(commands: Any) -> None:
    needle = commands.add_parser("needle", help="find facts in a haystack by re-reading it into fast weights")
    needle.set_defaults(run=_needle)
    add = needle.add_argument
    add("--out", metavar="DIR", help="folder (default runs/needle); an earlier result in it is replaced")
    add("--preset", default="demo", help="demo, or tiny to see it work in seconds")
    add("--variants", metavar="A,B", help="full, no lookahead, no gate weighting, no address loss (default: all)")
    add("--steps", type=_positive, metavar="N", help="optimiser steps of each variant")
    add("--seed", type=int, metavar="N", help="of the parameters and the haystacks (default 0)")
    add("--haystack", type=_positive, metavar="T", help="tokens of a haystack, which is one chunk")
    add("--facts", type=_positive, metavar="N", help="facts in it, in training")
    add("--sub-keys", type=_positive, metavar="N", help="keys per half; the memory has N * N slots")
    add("--trained-passes", type=_positive, metavar="N", help="readings in training")
    add("--passes", type=_positive, metavar="N", help="readings that are measured (default 4)")
    add("--learning-rate", type=float, metavar="X", help="of AdamW")
    add("--jobs", type=_positive, metavar="N", help="trainings at a time, a thread each (default: one per core)")


def _add_generate(commands: Any) -> None:
    generate = commands.add_parser("generate", help="stream text from a checkpoint")
    generate.set_defaults(run=_generate)
    add = generate.add_argument
    add("--checkpoint", required=True, metavar="DIR", help="folder of a run")
    add("--prompt", required=True, metavar="TEXT")
    add("--tokens", type=int, default=256, metavar="N", help="bytes to add (default 256)")
    add("--temperature", type=float, default=0.8, metavar="X", help="0: always the likeliest byte (default 0.8)")
    add("--seed", type=int, metavar="N", help="of the draws (default: another each time)")
    add("--threads", type=_positive, metavar="N", help="threads (default: torch's choice)")


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


def _doctor(options: argparse.Namespace) -> int:
    from . import doctor

    return doctor.run(print)


def _console() -> Any:
    from rich.console import Console

    return Console()


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1, got {text}")
    return value


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(_positive(part) for part in text.split(","))


def main(arguments: list[str] | None = None) -> int:
    """Run a command; return its exit code. A mistake is one line on stderr and code 2."""
    try:
        options = parser().parse_args(arguments)
        return options.run(options)
    except SdmError as error:
        print("sdm-lite " + " ".join(str(error).split()), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output has gone (| head)
        sys.stderr.close()  # nor is there anyone to tell at exit
        return 141


if __name__ == "__main__":
    sys.exit(main())
