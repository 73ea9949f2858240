"""The rules of docs/architecture.md, checked on the source: who imports whom, and that the doors do not drift."""

from __future__ import annotations

import ast
import importlib
import inspect
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGES = {"sdm_lite": "sdm_lite", "cuda_kernels": "sdm_lite.cuda_kernels", "autograd": "sdm_lite.autograd"}
ROOMS = ("sdm_lite.reference", "sdm_lite.cpu", "sdm_lite.cuda_kernels")
DOORS = (
    "product_key_topk_forward",
    "product_key_topk_backward",
    "hash_slots_forward",
    "values_are_fine",
    "sparse_delta_forward",
    "sparse_delta_update",
    "sparse_delta_backward",
    "idw_product_key_topk_forward",
    "distances_backward",
    "key_step_forward",
    "key_step_backward",
    "embedding_bag_forward",
    "embedding_bag_backward",
    "embedding_bag_weights_backward",
    "number_slots",
)


def module_name(path: pathlib.Path) -> str:
    """Dotted name under which the source file at `path` imports."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    name = ".".join((PACKAGES[parts[0]], *parts[1:]))
    return name.removesuffix(".__init__")


def imports_of(source: str, name: str, *, is_package: bool) -> set[str]:
    """Absolute names of every module that `source` imports, at any depth of nesting.

    ``from a import b`` counts as both `a` and `a.b`, since b may be a module.
    """
    found = set()
    package = name.split(".") if is_package else name.split(".")[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            target = ".".join([*base, *([node.module] if node.module else [])])
            found.add(target)
            found.update(f"{target}.{alias.name}" for alias in node.names)
    return found


SOURCES = sorted(path for folder in PACKAGES for path in (ROOT / folder).rglob("*.py"))
IMPORTS = {
    module_name(path): imports_of(path.read_text(), module_name(path), is_package=path.name == "__init__.py")
    for path in SOURCES
}


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def importers_of(package: str) -> set[str]:
    return {module for module, names in IMPORTS.items() if any(within(name, package) for name in names)}


def test_the_import_finder_finds():
    # a checker that finds nothing would pass everything below
    source = "def f():\n    import numba.cuda\nfrom ..cpu import pool\nfrom . import delta\n"
    found = imports_of(source, "sdm_lite.reference.chunked", is_package=False)
    assert {"numba.cuda", "sdm_lite.cpu", "sdm_lite.cpu.pool", "sdm_lite.reference.delta"} <= found
    assert "sdm_lite.reference.delta" in imports_of("from .delta import f", "sdm_lite.reference", is_package=True)
    assert importers_of("numba"), "the cpu room imports numba"


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_never_import_each_other(room):
    others = [other for other in ROOMS if other != room]
    wrong = {
        (module, name)
        for module, names in IMPORTS.items()
        if within(module, room)
        for name in names
        if any(within(name, other) for other in others)
    }
    assert not wrong


def test_rooms_know_nothing_of_what_stands_on_them():
    above = ("sdm_lite.ops", "sdm_lite.autograd", "sdm_lite.torch_bridge", "sdm_lite.nn", "sdm_lite.app")
    wrong = {
        (module, name)
        for module, names in IMPORTS.items()
        if any(within(module, room) for room in ROOMS)
        for name in names
        if any(within(name, package) for package in above)
    }
    assert not wrong


def test_numba_is_imported_in_the_cpu_room_and_numba_files_only():
    wrong = {m for m in importers_of("numba") if not within(m, "sdm_lite.cpu") and not m.endswith("_numba")}
    assert not wrong


def test_torch_is_imported_in_the_bridge_layers_and_app_only():
    wrong = {
        module
        for module in importers_of("torch")
        if not (module.startswith("sdm_lite.torch_") or within(module, "sdm_lite.nn") or within(module, "sdm_lite.app"))
    }
    assert not wrong


def test_cupy_is_imported_in_the_cuda_room_only():
    assert not {module for module in importers_of("cupy") if not within(module, "sdm_lite.cuda_kernels")}


def test_only_the_app_imports_the_app():
    assert not {module for module in importers_of("sdm_lite.app") if not within(module, "sdm_lite.app")}


def signature_of(function) -> list[tuple[str, object, object]]:
    """Names, kinds and defaults; annotations may differ, since each room has its own arrays."""
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


def room_modules():
    return {name: importlib.import_module(name) for name in ROOMS}


@pytest.mark.parametrize("door", DOORS)
def test_every_room_has_the_same_doors(door):
    modules = room_modules()
    expected = signature_of(getattr(modules["sdm_lite.reference"], door))
    for name, module in modules.items():
        function = getattr(module, door, None)
        if function is None:
            assert module.unavailable(), f"{name} says that it is ready but has no {door}"
        else:
            assert signature_of(function) == expected, name


def test_doors_are_those_of_the_rooms_page():
    documented = set(re.findall(r"^    (\w+)\(", importlib.import_module("sdm_lite.rooms").__doc__, re.MULTILINE))
    assert documented == set(DOORS)


def test_a_room_that_is_not_ready_says_why():
    import sdm_lite
    from sdm_lite import errors, rooms

    for name, state in sdm_lite.backends().items():
        assert state
        if state != "ready":
            with pytest.raises(errors.BackendError, match=re.escape(state)):
                rooms.room(name, "sparse_delta_rule")


def test_every_module_has_a_docstring():
    assert not [path for path in SOURCES if not ast.get_docstring(ast.parse(path.read_text()))]


TEXT_FILES = sorted(
    path
    for pattern in ("*.md", "*.toml", "*.yaml", "*.txt", "Makefile", ".ci/run", "docs/**/*.md", "benchmarks/**/*.*")
    for path in ROOT.glob(pattern)
    if path.is_file() and path.suffix not in {".pyc", ".png", ".so"} and "egg-info" not in str(path)
)
ALL_TEXT = [
    *SOURCES,
    *sorted((ROOT / "tests").rglob("*.py")),
    *sorted((ROOT / "examples").rglob("*.py")),
    *TEXT_FILES,
]


# written in two halves, so that this file passes its own test
@pytest.mark.parametrize("word", ["TO" + "DO", "FIX" + "ME", "/ho" + "me/", "/ro" + "ot/", "/wo" + "rk/"])
def test_no_leftovers(word):
    assert not [str(path.relative_to(ROOT)) for path in ALL_TEXT if word in path.read_text(encoding="utf-8")]


def test_no_history_in_file_names():
    names = [path.stem for path in ALL_TEXT]
    assert not [name for name in names if re.search(r"(^|_)(new|old|v\d+|fast|tmp|final)($|_)", name)]
