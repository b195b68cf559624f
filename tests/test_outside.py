"""The package in `examples/outside`: written with public names alone, found by its entry points, it answers."""

from __future__ import annotations

import ast
import importlib
import runpy
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from precedent.drafters import Drafter
from precedent.target import Target
from precedent.target.support import installed
from precedent_testing.drafter_contract import DrafterContract
from precedent_testing.scripted_model import fixed_cost
from precedent_testing.target_contract import TargetContract

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "examples" / "outside"


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """The package as if it were installed."""
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    folder = tmp_path_factory.mktemp("site-packages")
    written = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    written.mkdir()
    (written / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    groups = project["entry-points"].items()
    lines = [line for group, entries in groups for line in (f"[{group}]", *(f"{a} = {b}" for a, b in entries.items()))]
    (written / "entry_points.txt").write_text("\n".join(lines))
    with pytest.MonkeyPatch.context() as patch:
        for path in (folder, PACKAGE):
            patch.syspath_prepend(str(path))
        installed.cache_clear()
        yield importlib.import_module("bigram_desk")
    installed.cache_clear()


def test_it_answers_on_its_back_end_with_drafts_of_its_drafter(
    package: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("precedent.engine.engine.costs_of", lambda *_: fixed_cost())  # no step is timed
    assert package.main() == {"phrases": 6}
    assert package.ANSWER in capsys.readouterr().out


class TestItsTarget(TargetContract):
    @pytest.fixture
    def target(self, package: ModuleType) -> Target:
        table = torch.randn(self.num_tokens, self.num_tokens, generator=torch.Generator().manual_seed(0))
        return package.Bigrams(table)


class TestItsDrafter(DrafterContract):
    @pytest.fixture(autouse=True)
    def of_the_package(self, package: ModuleType) -> None:
        self.package = package

    def make_drafter(self) -> Drafter:
        return self.package.Phrases([self.output[:5]])


def test_it_imports_public_names_alone() -> None:
    modules = runpy.run_path(str(ROOT / ".ci" / "reference.py"))["MODULES"]
    nodes = ast.walk(ast.parse((PACKAGE / "bigram_desk.py").read_text(encoding="utf-8")))
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom) and str(node.module).startswith("precedent")]
    assert {node.module for node in imports} <= set(modules)
    for node in imports:
        module = importlib.import_module(str(node.module))
        assert {alias.name for alias in node.names} <= set(getattr(module, "__all__", dir(module)))
