"""The documentation is run: blocks of the pages, docstrings, examples; and links lead somewhere."""

from __future__ import annotations

import contextlib
import doctest
import importlib
import io
import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
PACKAGES = {"sdm_lite": "sdm_lite", "cuda_kernels": "sdm_lite.cuda_kernels", "autograd": "sdm_lite.autograd"}
# a fenced block and, where the very next block is ```text, what it prints
BLOCK = re.compile(r"^```python\n(.*?)^```$(?:\s*^```text\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)


def page_id(path: pathlib.Path) -> str:
    return path.relative_to(ROOT).as_posix()


def run_blocks(text: str) -> list[tuple[str, str]]:
    """Run the python blocks of a page, in order and in one namespace; return (printed, promised) pairs."""
    namespace: dict[str, object] = {"__name__": "page"}
    pairs = []
    for code, promised in BLOCK.findall(text):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(code, "page", "exec"), namespace)
        if promised:
            pairs.append((out.getvalue(), promised))
    return pairs


def test_the_block_runner_notices():
    page = "```python\nx = 2\n```\n\n```python\nprint(x)\n```\n\n```text\n3\n```\n"
    assert run_blocks(page) == [("2\n", "3\n")]
    with pytest.raises(ZeroDivisionError):
        run_blocks("```python\n1 / 0\n```\n")


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_blocks_of_a_page_run_and_print_what_they_say(page):
    for printed, promised in run_blocks(page.read_text()):
        assert printed == promised


def test_the_readme_shows_a_result():
    readme = (ROOT / "README.md").read_text()
    first = BLOCK.search(readme)
    assert first and first.group(2), "the first block of README.md prints a result, shown in a text block"
    # a ten-line example on the first screen
    assert len([line for line in first.group(1).splitlines() if line.strip()]) <= 12
    for command in ("make demo", "make test"):
        assert command in readme


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_lead_to_files(page):
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
    broken = [t for t in targets if "://" not in t and not (page.parent / t).exists()]
    assert not broken


def test_presets_are_those_of_the_commands():
    from sdm_lite.app import needle, settings

    page = (ROOT / "docs" / "command-line.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+) --preset` \|.*\n\|[-|]+\n((?:\|.*\n)+)", page, re.MULTILINE))
    presets = {"train": settings.train_presets(), "recall": settings.recall_presets(), "needle": needle.presets()}
    found = {
        command: dict(re.findall(r"^\| `(\w+)`(?: \(default\))? \| ([^|]+?) \|", table, re.MULTILINE))
        for command, table in rows.items()
    }
    assert found == presets
    epilogs = {verb: cli_parser(verb).epilog for verb in ("train", "recall")}
    for verb, epilog in epilogs.items():
        assert all(f"{name}: {text}." in epilog for name, text in presets[verb].items())


def cli_parser(verb):
    from sdm_lite.app import cli

    (verbs,) = (action for action in cli.parser()._actions if action.dest == "command")
    return verbs.choices[verb]


def test_targets_named_in_pages_exist():
    makefile = (ROOT / "Makefile").read_text()
    named = {name for page in PAGES for name in re.findall(r"`make ([a-z-]+)", page.read_text())}
    assert named
    assert not {name for name in named if not re.search(rf"^{name}:", makefile, re.MULTILINE)}


def module_names() -> list[str]:
    names = []
    for folder, package in PACKAGES.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            name = ".".join((package, *parts)).removesuffix(".__init__")
            if ">>>" in path.read_text() and parts[-1] != "__main__":
                names.append(name)
    return names


@pytest.mark.parametrize("name", module_names())
def test_docstrings_of(name):
    module = importlib.import_module(name)
    failed, tried = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    assert tried, "the file has examples, but none was found: is a decorator hiding them?"
    assert not failed


PUBLIC_OPS = (
    "product_key_topk",
    "hash_slots",
    "sparse_delta_rule",
    "sparse_delta_rule_",
    "idw_product_key_topk",
    "product_key_lookup",
    "embedding_bag",
    "embedding_bag_gradient",
    "fwpkm",
    "backends",
)


@pytest.mark.parametrize("name", PUBLIC_OPS)
def test_public_ops_are_documented(name):
    import sdm_lite

    text = getattr(sdm_lite, name).__doc__
    assert text and ">>>" in text
    if name != "backends":
        for heading in ("Parameters", "Returns", "Raises"):
            assert re.search(rf"^\s*{heading}\n\s*-+$", text, re.MULTILINE), heading


@pytest.mark.parametrize("example", EXAMPLES, ids=page_id)
def test_example_runs(example, tmp_path):
    assert len(example.read_text().splitlines()) <= 60
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}
    command = [sys.executable, str(example)]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip(), "an example says what it found"


def test_there_are_examples():
    assert EXAMPLES
