"""Every benchmark starts: `--help` prints its options and ends. None measures here."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers import forked

FOLDER = Path(__file__).parents[1] / "benchmarks"
PROGRAMS = sorted(path for path in FOLDER.glob("*.py") if '__name__ == "__main__"' in path.read_text(encoding="utf-8"))


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.stem)
def test_a_benchmark_prints_its_options(program: Path) -> None:
    done = forked.run([program, "--help"])
    assert done.returncode == 0, done.stderr
    assert "usage:" in done.stdout
