"""Commands of the application, run in this process, and what a run holds."""

from __future__ import annotations

from sdm_lite.app import checkpoint, cli

TINY = ["--preset", "tiny", "--threads", "1"]


def run(*arguments):
    """Exit code of a command, however it ends."""
    try:
        return cli.main([str(argument) for argument in arguments])
    except SystemExit as end:
        return end.code


def digests(folder):
    """Digests of the arrays of a run's checkpoint."""
    files = checkpoint.load("test", folder).record["files"]
    return {part: files[part]["sha256"] for part in files}
