"""Runs a notebook from its first cell to its last and writes it back with its outputs; warnings are left out.

`python .ci/notebook.py examples/one_step.ipynb`
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient


def executed(path: Path, folder: Path) -> nbformat.NotebookNode:
    """The notebook with its outputs, run in `folder`. Raises CellExecutionError."""
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(
        notebook, timeout=900, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    ).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    return notebook


if __name__ == "__main__":
    place = Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as empty:
        nbformat.write(executed(place, Path(empty)), place)
