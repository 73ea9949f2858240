"""Compile kernels with NVRTC, without a GPU, and read what ptxas says of them: registers, spills, stack, shared memory.

    python tests/support/kernel_figures.py sparse_delta_forward.cu "sparse_delta_forward<float, 32, false>" --arch 90

prints one kernel's; ``--write`` puts the table of all into docs/kernels.md. Needs the extra `cuda-check`. What one text
of source gave for one architecture is kept in a temporary folder, since compiling all takes minutes.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import hashlib
import json
import os
import pathlib
import re
import tempfile
import time
from collections.abc import Sequence
from typing import NamedTuple

from sdm_lite.cuda_kernels import modules

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
ARCHITECTURES = (80, 90, 100, 120)
#: what a training step of a layer with a memory asks for: a bf16 state, rule "shared", a decay per head; a bag
DEFAULT = [
    (file, expression)
    for file, expressions in modules.INSTANCES.items()
    for expression in expressions
    if ("<bf16, 32, false>" in expression and not expression.startswith("decode"))
    or expression in ("sum_partials<float, false>", "decay_factors<float>", "undo_factors<float, false>")
    or expression.startswith(("plan_", "check_slots", "check_decays<float>"))
    or (expression.startswith(("product_key_topk", "embedding_bag")) and "<float" in expression)
]
#: the sparse memory's part: what one training layer asks for
LAYER = [(file, expression) for file, expression in DEFAULT if not expression.startswith("embedding_bag")]
#: the same as modules, the way that launches compile it
LAYER_MODULES = list(dict.fromkeys((file, modules.module_of(file, expression)) for file, expression in LAYER))
_CACHE = pathlib.Path(os.environ.get("SDM_LITE_EMULATOR_CACHE", tempfile.gettempdir()), "sdm_lite_kernel_figures")
_MARKS = ("<!-- figures -->\n", "<!-- end of figures -->")


class Figures(NamedTuple):
    """What ptxas says of one kernel; `seconds` of a processor are what compiling it alone took."""

    registers: int
    spill_bytes: int
    stack_bytes: int
    static_shared_bytes: int
    seconds: float


class CompileError(AssertionError):
    """A kernel that NVRTC refuses; the text is its log."""


def missing() -> str | None:
    """Return why nothing can be compiled here, or None."""
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:
        return f"no NVRTC ({error}): pip install 'sdm-lite[cuda-check]'"
    return None


def figures(file: str, expression: str, arch: int) -> Figures:
    """Return the figures of one instantiation for sm_<arch>."""
    from cuda.bindings import nvrtc

    version = _checked(nvrtc.nvrtcVersion())
    options = (*modules.OPTIONS, *modules.ADDED_BY_CUPY, f"-arch=sm_{arch}", "--ptxas-options=-v")
    key = json.dumps([modules.source(file), expression, options, list(version)])
    kept = _CACHE / f"{hashlib.sha256(key.encode()).hexdigest()}.json"
    if not kept.exists():
        found = _compile(file, expression, options)
        _CACHE.mkdir(parents=True, exist_ok=True)
        part = kept.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(found))
        part.replace(kept)
    return Figures(*json.loads(kept.read_text()))


def compile_layer(threads: int, arch: int = 90) -> tuple[float, float]:
    """Compile what one training layer asks for; return the seconds of a processor and by the clock."""
    started, busy = time.monotonic(), time.process_time()
    options = (*modules.OPTIONS, *modules.ADDED_BY_CUPY, f"-arch=sm_{arch}")
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        for job in [pool.submit(_compile, file, names, options) for file, names in LAYER_MODULES]:
            job.result()
    return time.process_time() - busy, time.monotonic() - started


def _compile(file: str, expressions: str | Sequence[str], options: tuple[str, ...]) -> Figures:
    from cuda.bindings import nvrtc

    expressions = [expressions] if isinstance(expressions, str) else expressions
    program = _checked(nvrtc.nvrtcCreateProgram(modules.source(file).encode(), file.encode(), 0, [], []))
    for expression in expressions:
        _checked(nvrtc.nvrtcAddNameExpression(program, expression.encode()))
    started = time.thread_time()
    result = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    seconds = time.thread_time() - started
    log = bytes(_checked(nvrtc.nvrtcGetProgramLogSize(program)))
    _checked(nvrtc.nvrtcGetProgramLog(program, log))
    if int(result[0]):
        raise CompileError(f"{file}: {', '.join(expressions)}, {' '.join(options)}:\n{log.decode()}")
    nvrtc.nvrtcDestroyProgram(program)
    text = log.decode()

    def number(pattern: str) -> int:
        return sum(int(found) for found in re.findall(pattern, text))

    spills = number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads")
    registers, stack = number(r"Used (\d+) registers"), number(r"(\d+) bytes stack frame")
    return Figures(registers, spills, stack, number(r"(\d+) bytes smem"), seconds)


def _checked(result: tuple):
    """Return what a call of cuda.bindings returns beside its error code."""
    if int(result[0]):
        raise RuntimeError(str(result[0]))
    return result[1] if len(result) == 2 else result[1:]


def all_figures(architectures=ARCHITECTURES) -> dict[tuple[str, str, int], Figures]:
    """Return the figures of every instantiation, two compilations at a time."""
    jobs = [(f, e, arch) for f, names in modules.INSTANCES.items() for e in names for arch in architectures]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        return dict(zip(jobs, pool.map(lambda job: figures(*job), jobs), strict=True))


def table(found: dict[tuple[str, str, int], Figures]) -> str:
    """Return the Markdown table: registers per thread for each architecture."""
    head = "| kernel | " + " | ".join(f"sm_{arch}" for arch in ARCHITECTURES) + " | static shared bytes |\n"
    lines = [head, "|---|" + "--:|" * (len(ARCHITECTURES) + 1) + "\n"]
    for file, names in modules.INSTANCES.items():
        for name in names:
            row = [found[file, name, arch] for arch in ARCHITECTURES]
            cells = [f"{f.registers}" + (f" ({f.spill_bytes} B spilled)" if f.spill_bytes else "") for f in row]
            lines.append(f"| `{name}` | " + " | ".join(cells) + f" | {max(f.static_shared_bytes for f in row)} |\n")
    alone = min(compile_layer(1)[0] for _ in range(3))
    together = min(compile_layer(len(LAYER_MODULES))[1] for _ in range(3))
    lines.append(
        f"\nWhat one training layer with a bf16 state asks for, {len(LAYER)} kernels in {len(LAYER_MODULES)} modules,"
        f" took {alone:.1f} s of a processor to compile for sm_90, once per machine, and side by side {together:.1f} s"
        f" by the clock on {os.cpu_count()} CPUs, the least of three, on a machine that did other work.\n"
    )
    return "".join(lines)


def write(page: pathlib.Path = ROOT / "docs" / "kernels.md") -> None:
    """Put the table between its marks in docs/kernels.md."""
    before, rest = page.read_text().split(_MARKS[0])
    _, after = rest.split(_MARKS[1])
    page.write_text(before + _MARKS[0] + table(all_figures()) + _MARKS[1] + after)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", nargs="?")
    parser.add_argument("expression", nargs="?")
    parser.add_argument("--arch", type=int, nargs="*", default=ARCHITECTURES)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    if arguments.write:
        write()
    else:
        for arch in arguments.arch:
            print(arch, figures(arguments.file, arguments.expression, arch))
