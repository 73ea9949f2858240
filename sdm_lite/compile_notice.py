"""What is said when kernels are being compiled: a first call on a machine would be silent for seconds otherwise.

The line goes to the logger "sdm_lite" at level INFO, once a process, and only where a kernel is not yet kept on disk
(cpu/compile.py). A library prints nothing by itself: ``logging.basicConfig(level=logging.INFO)`` shows it, and the
command line does.
"""

from __future__ import annotations

import logging

TEXT = "compiling kernels (once per machine)..."
LOGGER = logging.getLogger("sdm_lite")
