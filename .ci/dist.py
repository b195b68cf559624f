"""Builds a wheel and an sdist of Precedent and a wheel of every plugin, and tries them in empty environments.

    python .ci/dist.py dist

Packages find each other in the folder, as they would on an index: the sdist with what it depends on
and the scripted model to try it with, then all wheels.
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
from precedent_testing.embedders import HashEmbedder
from precedent_testing.scripted_model import scripted_model_engine

assert "site-packages" in precedent.__file__, precedent.__file__
cache = SpeculationCache.open("cache", embedder=HashEmbedder())
llm = ChatPrecedent.from_engine(scripted_model_engine(["It is on its way."], cache=cache))
answer = llm.invoke("Where is order 1042?")
assert answer.text == "It is on its way.", answer
assert answer.response_metadata["speculation"]["lossless"]
llm.engine.close()

from precedent.target.support import installed

assert [type(one).__name__ for one in installed()][:1] == ["CpuSupport"], installed()
print("precedent", precedent.__version__, "answers")
"""
"""A program that loads the engine, the kernels, the cache and LangChain's side, without weights."""

ALL_TRIED = """
from importlib.metadata import entry_points

groups = [group for group in entry_points().groups if group.startswith("precedent.")]
loaded = [entry.load() for group in groups for entry in entry_points(group=group)]
print(len(loaded), "entry points of", ", ".join(sorted(groups)))
"""
"""A program that loads everything that the packages announce."""

WITHOUT_DEPENDENCIES = {"precedent_ray"}
"""Wheels that are installed alone: Ray brings some forty packages that nothing here calls."""


def run(*command: str | Path, folder: Path = ROOT) -> None:
    """Run a command, which must succeed, without what this checkout puts on Python's path."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([str(part) for part in command], cwd=folder, env=environment, check=True)


def build(out: Path) -> tuple[Path, list[Path]]:
    """The sdist, and all wheels: the one that is built from it, and those of the plugins."""
    shutil.rmtree(out, ignore_errors=True)
    run(sys.executable, "-m", "build", "--outdir", out, ROOT)
    for plugin in sorted(ROOT.glob("plugins/*/pyproject.toml")):
        run(sys.executable, "-m", "build", "--wheel", "--outdir", out, plugin.parent)
    (sdist,) = out.glob("*.tar.gz")
    return sdist, sorted(out.glob("*.whl"))


def tried(out: Path, what: str, archives: list[Path], *programs: str) -> None:
    """Install archives into an empty environment with the pinned versions, and use them from an empty folder."""
    alone = [archive for archive in archives if archive.name.split("-")[0] in WITHOUT_DEPENDENCIES]
    others = [archive for archive in archives if archive not in alone]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        venv.create(folder / "venv", with_pip=True)
        python = folder / "venv" / "bin" / "python"
        told = (ROOT / ".ci" / "install.py", f"installing {what} into an empty environment: a few minutes")
        run(python, *told, "-c", ROOT / "constraints.txt", "--find-links", out, *others, folder=folder)
        if alone:
            run(python, *told, "--no-deps", *alone, folder=folder)
        for program in programs:
            run(python, "-c", program, folder=folder)
        run(folder / "venv" / "bin" / "precedent", "--version", folder=folder)


def main(out: Path) -> None:
    """Build and try all."""
    sdist, wheels = build(out)
    testing = [wheel for wheel in wheels if wheel.name.startswith("precedent_testing-")]
    tried(out, sdist.name, [sdist, *testing], TRIED)
    tried(out, f"{len(wheels)} wheels", wheels, TRIED, ALL_TRIED)
    print("\n".join(str(path) for path in sorted(out.iterdir())))


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
