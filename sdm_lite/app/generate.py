"""``sdm-lite generate``: stream text from a checkpoint, and keep a conversation's memory in a session file."""

from __future__ import annotations

import argparse
import codecs
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import torch

from ..nn import HybridState, stream_tokens
from . import models
from .mistakes import mistake
from .notices import few_steps
from .tasks import BYTES

COMMAND = "generate"
TEMPERATURE = 0.8


def run(options: argparse.Namespace, output: TextIO | None = None) -> int:
    """Print the prompt and its continuation as it comes; return the exit code."""
    output = output or sys.stdout
    temperature = _checked(options)
    prompt = options.prompt.encode("utf-8", errors="surrogateescape")
    if not prompt:
        raise mistake(COMMAND, "--prompt", "at least one byte", "an empty prompt", "pass some text")
    models.use_threads(options.threads)
    model, found = models.from_checkpoint(COMMAND, Path(options.checkpoint))
    if model.config["vocab_size"] != BYTES:
        got = f"a vocabulary of {model.config['vocab_size']}"
        raise mistake(COMMAND, "--checkpoint", "a model of bytes", got, "use one that sdm-lite train made")
    weights = found.record["files"]["model"]["sha256"]
    cache = None if options.session is None else _opened(Path(options.session), model, weights)
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    try:
        output.write(decoder.decode(prompt))
        output.flush()
        for token in _tokens(options, model, torch.tensor([list(prompt)], dtype=torch.int64), temperature, cache):
            output.write(decoder.decode(bytes([int(token)])))
            output.flush()
        output.write(decoder.decode(b"", final=True) + "\n")
        output.flush()
    except KeyboardInterrupt:  # the session stays as it was before this run
        output.write("\n")
        return 130
    if cache is not None:
        cache.save(options.session, of=weights)
    note = few_steps(found.record)
    if note:
        print(note, file=sys.stderr)  # what was generated stands alone on stdout
    return 0


def _checked(options: argparse.Namespace) -> float:
    """Return the temperature, or raise CommandError for numbers that make no sense, alone or together."""
    temperature = options.temperature
    if options.tokens < 0:
        raise mistake(COMMAND, "--tokens", "0 or more", str(options.tokens), "pass a number of bytes")
    if temperature is not None and not temperature >= 0:
        raise mistake(COMMAND, "--temperature", "0 or more", str(temperature), "pass 0 for the likeliest")
    if options.beams == 1 and not options.speculative:
        return TEMPERATURE if temperature is None else temperature
    if options.beams > 1 and options.speculative:
        got = f"--beams {options.beams} and --speculative"
        raise mistake(COMMAND, "--beams", "one of the two", got, "leave one out")
    if temperature:
        got = f"--temperature {temperature}"
        raise mistake(COMMAND, "--beams and --speculative", "no draws beside them", got, "leave --temperature out")
    return 0.0


def _opened(path: Path, model: Any, weights: str) -> HybridState:
    """Return the session in `path`, or a new one where there is no file; CommandError where it cannot be kept there."""
    if path.exists():
        cache = HybridState.load(path, model, of=weights)
        if cache.batch != 1:
            raise mistake(COMMAND, "--session", "one sequence", f"{cache.batch} in {path}", "use another file")
        return cache
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise mistake(COMMAND, "--session", "a folder to write to", str(path.parent), "name another place")
    return HybridState()


def _tokens(
    options: argparse.Namespace, model: Any, ids: torch.Tensor, temperature: float, cache: HybridState | None
) -> Iterator[torch.Tensor]:
    """Yield the new tokens; those of beams all at the end."""
    if options.beams > 1:
        found = model.generate(ids, options.tokens, num_beams=options.beams, cache=cache)
        return iter(found[0, ids.shape[1] :])
    return stream_tokens(
        model,
        ids,
        options.tokens,
        temperature=temperature,
        seed=options.seed,
        speculative=options.speculative,
        cache=cache,
    )
