"""Compile a kernel file with g++ into a program that serves its kernels: plain, or with a sanitizer.

Programs are kept in a cache folder (``SDM_LITE_EMULATOR_CACHE``, else one in the temporary folder) under the digest of
all they are made of: the kernel file and what it includes, the emulator, the flags and the compiler.
"""

from __future__ import annotations

import functools
import getpass
import hashlib
import os
import pathlib
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence

import pytest

HERE = pathlib.Path(__file__).resolve().parent
KERNELS = HERE.parent.parent / "cuda_kernels"

#: fma and no contraction: a * b + c rounds twice, fmaf(a, b, c) once, as with -fmad=false on a GPU
_FLAGS = ["-std=c++17", "-ffp-contract=off", "-fno-strict-aliasing", "-pthread", "-DSIMT_CPU"]
_FLAGS += ["-Wall", "-Wextra", "-Wno-unknown-pragmas", "-Wno-tsan"]
_FLAGS += ["-mfma"] if platform.machine() in ("x86_64", "AMD64") else []
#: low optimisation: tests compile more than they compute
BUILDS = {
    "plain": ["-O1"],
    "asan": ["-O0", "-g1", "-fsanitize=address,bounds,alignment,shift", "-fno-sanitize-recover=all"],
    "tsan": ["-O1", "-g1", "-fsanitize=thread"],
}
#: what a sanitized program is told: leaks of fibers are no finding; a race ends with an exit status of its own
ENVIRONMENT = {
    "ASAN_OPTIONS": "detect_leaks=0",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": "exitcode=66 halt_on_error=0 history_size=2",
}


class EmulationError(AssertionError):
    """A kernel that did not compile, or a launch that failed; the text holds the compiler's or sanitizer's report."""


@functools.cache
def compiler() -> str | None:
    """Return the g++ to use (CXX, else g++), or None."""
    return shutil.which(os.environ.get("CXX", "g++"))


@functools.cache
def _version() -> str:
    return subprocess.run([compiler(), "--version"], capture_output=True, text=True, check=True).stdout


@functools.cache
def missing(build: str) -> str | None:
    """Return why programs of this build cannot run here, or None."""
    if compiler() is None:
        return "no g++ on this machine"
    with tempfile.TemporaryDirectory() as folder:
        source, program = pathlib.Path(folder, "probe.cpp"), pathlib.Path(folder, "probe")
        source.write_text("int main() { return 0; }\n")
        command = [compiler(), *_FLAGS, *BUILDS[build], source, "-o", program]
        if subprocess.run(command, capture_output=True).returncode:
            return f"g++ has no {build} build here"
        if subprocess.run([program], capture_output=True).returncode:
            return f"programs of the {build} build do not run here"
    return None


def needs(build: str):
    """Mark a test as one that needs this build; it is skipped, with the reason, where that does not exist."""
    reason = missing(build)
    return pytest.mark.skipif(reason is not None, reason=reason or "")


def _cache() -> pathlib.Path:
    default = pathlib.Path(tempfile.gettempdir(), f"sdm_lite_emulated_cuda_{getpass.getuser()}")
    folder = pathlib.Path(os.environ.get("SDM_LITE_EMULATOR_CACHE", default))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _with_includes(path: pathlib.Path, seen: dict[pathlib.Path, bytes]) -> dict[pathlib.Path, bytes]:
    """Add the file and all it includes by quotes to `seen`."""
    if path in seen:
        return seen
    seen[path] = path.read_bytes()
    for name in re.findall(rb'#include "([^"]+)"', seen[path]):
        for folder in (path.parent, KERNELS, HERE):
            if (folder / name.decode()).is_file():
                _with_includes(folder / name.decode(), seen)
                break
    return seen


def program(source: str | pathlib.Path, kernels: Sequence[str], build: str = "plain", defines: Sequence[str] = ()):
    """Return the path of a program that serves `kernels` (expressions such as ``"copy<float, 4>"``) of a file.

    `source` is a name in `cuda_kernels/` or a path; `defines` are ``"NAME=value"``.
    """
    path = KERNELS / source
    flags = [*_FLAGS, *BUILDS[build], *(f"-D{define}" for define in defines), f"-I{KERNELS}", f"-I{HERE}"]
    main = f'#include "{path}"\n#include "serve.h"\nint main(int, char** argv) {{ return simt::serve(argv, '
    main += ", ".join(f"&{kernel}" for kernel in kernels) + "); }\n"
    digest = hashlib.sha256("\0".join([compiler(), _version(), main, *flags]).encode())
    files = _with_includes(HERE / "serve.h", _with_includes(path, {}))
    for content in files.values():
        digest.update(hashlib.sha256(content).digest())
    target = _cache() / f"{path.stem}-{build}-{digest.hexdigest()[:24]}"
    if not target.exists():
        _compile(main, flags, target)
    return target


def _compile(main: str, flags: list[str], target: pathlib.Path) -> None:
    """Compile into a name of this process, then rename: another process never runs half a program."""
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        source, result = pathlib.Path(folder, "main.cpp"), pathlib.Path(folder, "program")
        source.write_text(main)
        done = subprocess.run([compiler(), *flags, source, "-o", result], capture_output=True, text=True)
        if done.returncode:
            raise EmulationError(f"g++ refused the kernel:\n{done.stderr}")
        result.replace(target)
