"""Says that kernels are being compiled: a first call on a machine would be silent for seconds otherwise.

The line goes to the logger "sdm_lite" at level INFO, once a process, and only where a kernel is not yet kept on disk.
A library prints nothing by itself: ``logging.basicConfig(level=logging.INFO)`` shows it, and the command line does.
"""

from __future__ import annotations

import logging
from typing import Any

TEXT = "compiling kernels (once per machine)..."
LOGGER = logging.getLogger("sdm_lite")

_listening = False


def listen() -> None:
    """Log, from now on, when Numba begins to compile a kernel of this package; to be called before the first one."""
    global _listening
    if _listening:
        return
    _listening = True
    from .cpu.compile import event  # Numba is the cpu room's to import

    class Notice(event.Listener):
        """Logs the first compilation of a kernel of ours."""

        told = False

        def on_start(self, started: Any) -> None:
            module = started.data["dispatcher"].py_func.__module__
            if not self.told and module.startswith("sdm_lite."):
                self.told = True
                LOGGER.info(TEXT)

        def on_end(self, ended: Any) -> None:
            """Say nothing more."""

    event.register("numba:compile", Notice())
