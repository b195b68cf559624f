"""`.ci/install.py`, by which `make` installs: it hides nothing where pip fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).parents[1] / ".ci" / "install.py"


def test_it_needs_no_more_than_python() -> None:
    script = f"import runpy; runpy.run_path({str(TOOL)!r}, run_name='imported')"
    subprocess.run([sys.executable, "-I", "-S", "-c", script], check=True)


def test_what_pip_says_is_shown_where_it_fails() -> None:
    arguments = ("installing nothing", "--no-index", "no-such-package-anywhere")
    done = subprocess.run([sys.executable, str(TOOL), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout == "== installing nothing\n"
    assert "No matching distribution found for no-such-package-anywhere" in done.stderr
