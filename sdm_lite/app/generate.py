"""``sdm-lite generate``: stream text from a checkpoint."""

from __future__ import annotations

import argparse
import codecs
import sys
from pathlib import Path
from typing import TextIO

import torch

from ..nn import stream_tokens
from . import models
from .mistakes import mistake
from .tasks import BYTES

COMMAND = "generate"


def run(options: argparse.Namespace, output: TextIO | None = None) -> int:
    """Print the prompt and its continuation as it comes; return the exit code."""
    output = output or sys.stdout
    prompt = options.prompt.encode("utf-8", errors="surrogateescape")
    if not prompt:
        raise mistake(COMMAND, "--prompt", "at least one byte", "an empty prompt", "pass some text")
    models.use_threads(options.threads)
    model, _ = models.from_checkpoint(COMMAND, Path(options.checkpoint))
    if model.config["vocab_size"] != BYTES:
        got = f"a vocabulary of {model.config['vocab_size']}"
        raise mistake(COMMAND, "--checkpoint", "a model of bytes", got, "use one that sdm-lite train made")
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    ids = torch.tensor([list(prompt)], dtype=torch.int64)
    try:
        output.write(decoder.decode(prompt))
        output.flush()
        stream = stream_tokens(model, ids, options.tokens, temperature=options.temperature, seed=options.seed)
        for token in stream:
            output.write(decoder.decode(bytes([int(token)])))
            output.flush()
        output.write(decoder.decode(b"", final=True) + "\n")
        output.flush()
    except KeyboardInterrupt:
        output.write("\n")
        return 130
    return 0
