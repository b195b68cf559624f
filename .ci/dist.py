"""Builds a wheel and an sdist, and tries each in an empty environment.

`python .ci/dist.py dist`
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]

TRIED = """
import precedent
from precedent import ChatPrecedent, SpeculationCache
from precedent.testing.embedders import HashEmbedder
from precedent.testing.scripted_model import scripted_model_engine

assert "site-packages" in precedent.__file__, precedent.__file__
cache = SpeculationCache.open("cache", embedder=HashEmbedder())
llm = ChatPrecedent.from_engine(scripted_model_engine(["It is on its way."], cache=cache))
answer = llm.invoke("Where is order 1042?")
assert answer.text == "It is on its way.", answer
assert answer.response_metadata["speculation"]["lossless"]
llm.engine.close()
print("precedent", precedent.__version__, "answers")
"""
"""A program that loads the engine, the kernels, the cache and LangChain's side, without weights."""


def run(*command: str | Path, folder: Path = ROOT) -> None:
    """Run a command, which must succeed, without what this checkout puts on Python's path."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([str(part) for part in command], cwd=folder, env=environment, check=True)


def build(out: Path) -> list[Path]:
    """The sdist, and the wheel that is built from it."""
    shutil.rmtree(out, ignore_errors=True)
    run(sys.executable, "-m", "build", "--outdir", out, ROOT)
    return sorted(out.iterdir())


def tried(archive: Path) -> None:
    """Install an archive into an empty environment with the pinned versions, and use it from an empty folder."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        venv.create(folder / "venv", with_pip=True)
        python = folder / "venv" / "bin" / "python"
        told = (ROOT / ".ci" / "install.py", f"installing {archive.name} into an empty environment: a few minutes")
        run(python, *told, "-c", ROOT / "constraints.txt", archive, folder=folder)
        run(python, "-c", TRIED, folder=folder)
        run(folder / "venv" / "bin" / "precedent", "--version", folder=folder)


def main(out: Path) -> None:
    """Build and try both."""
    for archive in build(out):
        tried(archive)
    print("\n".join(str(path) for path in sorted(out.iterdir())))


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
