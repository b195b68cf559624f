"""`.ci/install.py`, by which `make` installs: it tells pip's stages, and hides nothing where pip fails."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TOOL = Path(__file__).parents[1] / ".ci" / "install.py"


@pytest.fixture(scope="module")
def install() -> Any:
    spec = importlib.util.spec_from_file_location("install_tool", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("Collecting torch>=2.11 (from precedent-llm==0.1.0)\n", "looking for torch"),
        ("Collecting langchain<2,>=1\n", "looking for langchain"),
        ("  Downloading torch-2.13.0-cp311-cp311-linux_x86_64.whl (196.4 MB)\n", "downloading torch (196.4 MB)"),
        ("  Downloading faiss_cpu-1.15.1-cp311-none-any.whl.metadata (7.1 kB)\n", "downloading faiss_cpu (7.1 kB)"),
        ("Building wheel for precedent-llm (pyproject.toml): started\n", "building precedent-llm"),
        ("Installing collected packages: mpmath, typing-extensions, torch\n", "writing 3 packages"),
        ("Requirement already satisfied: pip in ./.venv/lib\n", None),
    ],
)
def test_the_stages_of_pip_are_told(install: Any, line: str, said: str | None) -> None:
    assert install.stage(line) == said


def test_it_needs_no_more_than_python() -> None:
    script = f"import runpy; runpy.run_path({str(TOOL)!r}, run_name='imported')"
    subprocess.run([sys.executable, "-I", "-S", "-c", script], check=True)


def test_what_pip_says_is_shown_where_it_fails() -> None:
    arguments = ("installing nothing", "--no-index", "no-such-package-anywhere")
    done = subprocess.run([sys.executable, str(TOOL), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout == "== installing nothing\n"
    assert "No matching distribution found for no-such-package-anywhere" in done.stderr
