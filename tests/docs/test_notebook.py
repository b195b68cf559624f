"""The notebook runs from its first cell to its last, and says what it says."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples" / "one_step.ipynb"


def outputs_of(cells: list[Any]) -> str:
    return json.dumps([output for cell in cells for output in cell.get("outputs", ())])


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.enable_socket
@pytest.mark.filterwarnings("ignore")  # of the kernel's own transport
def test_the_notebook_runs(tmp_path: Path) -> None:
    pytest.importorskip("nbclient", reason="the group `docs` is not installed")
    sys.path.insert(0, str(ROOT / ".ci"))
    try:
        done = importlib.import_module("notebook").executed(NOTEBOOK, tmp_path)
    finally:
        sys.path.remove(str(ROOT / ".ci"))
    shown = outputs_of(done.cells)
    assert "and the target's own token" in shown
    assert "background: #a7dfbb" in shown  # recalled
    assert "written [0.2" in shown
