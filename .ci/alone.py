"""Test each package alone: with core, precedent-cpu, precedent-testing and what it declares, and nothing else of ours.

    python .ci/alone.py FOLDER [core precedent-ray ...]

The environments in FOLDER begin as hard links of one with core, the test tools and the pinned versions.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
PLUGINS = {path.parent.name: path.parent for path in sorted(ROOT.glob("plugins/*/pyproject.toml"))}
ALWAYS = {"precedent-cpu", "precedent-testing"}
WITHOUT_RAY = {"precedent-ray"}  # its decisions are tested without the forty packages that Ray brings


def declared(name: str) -> set[str]:
    """A plugin and those that it depends on."""
    project = tomllib.loads((PLUGINS[name] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = {re.split(r"[^\w-]", one)[0] for one in project["dependencies"]} & PLUGINS.keys()
    return {name}.union(*map(declared, names))


def install(environment: Path, what: str, packages: set[str], *options: str) -> None:
    """Install plugins, editable, with the pinned versions."""
    editable = [option for name in sorted(packages) for option in ("-e", PLUGINS[name])]
    python = environment / "bin" / "python"
    command = (python, ROOT / ".ci" / "install.py", what, "-c", "constraints.txt", *options, *editable)
    subprocess.run(command, cwd=ROOT, check=True)


def prepared(name: str, folder: Path) -> Path:
    """Return the Python of a package's own environment."""
    base, own = folder / "base", folder / name
    if not base.exists():
        venv.create(base, with_pip=True)
        install(base, "renewing pip", set(), "--upgrade", "pip>=25.1", "hatchling>=1.27", "editables")
        install(base, "installing core and the test tools: minutes", ALWAYS, "--group", "test", "-e", ".")
    if not own.exists():
        subprocess.run(("cp", "-al", base, own), check=True)
    packages = declared(name) - ALWAYS if name in PLUGINS else set()
    for wanted, options in ((packages - WITHOUT_RAY, ()), (packages & WITHOUT_RAY, ("--no-deps",))):
        if wanted:
            install(own, f"installing {', '.join(sorted(wanted))}", wanted, "--no-build-isolation", *options)
    return own / "bin" / "python"


def main(folder: Path, *names: str) -> int:
    """Test; returns 0 if all passed, otherwise 1."""
    failed = []
    for name in names or ("core", *PLUGINS):
        tests = PLUGINS[name] / "tests" if name in PLUGINS else ROOT / "tests"
        print(f"== {name}", flush=True)
        if subprocess.call((prepared(name, folder), "-m", "pytest", "-q", tests), cwd=ROOT):
            failed.append(name)
    print(f"failed: {', '.join(failed)}" if failed else "each passed alone")
    return len(failed) > 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve(), *sys.argv[2:]))
