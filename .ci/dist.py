"""Builds a wheel and an sdist of Precedent and of every plugin, checks them, and tries them in empty environments.

    python .ci/dist.py dist [--python python3.12 …] [--only core sdist serve all …]

Tries core alone, the sdist, examples/outside, each extra alone, and all wheels together, with this Python or with
others. Packages find each other in the folder, as they would on an index. The environments are hard links of one with
what core depends on, which is kept in build/dist.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
ENVIRONMENTS = ROOT / "build" / "dist"
CONSTRAINTS = ROOT / "constraints.txt"
LICENCE = "LICENSE"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = tuple(PROJECT["optional-dependencies"])

WARM = "import langchain_core.language_models, numba, sentence_transformers, torch, transformers, typer"
"""Imports what takes long to compile, once for all environments."""

REFUSED = """
import contextlib, io
import precedent
from precedent import ConfigError, SpeculationConfig
from precedent.cli.app import main
from precedent.drafters.registry import check_known
from precedent.errors import PrecedentError
from precedent.grammar import check_installed

def refusal(action):
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            action()
        except PrecedentError as error:
            return str(error)
        except SystemExit:
            return said.getvalue()

asked = {(lambda name=name: getattr(precedent, name)): extra for name, (_, extra) in precedent.PLUGINS.items()}
asked |= {(lambda name=name: main([name])): extra for name, extra in precedent.COMMANDS.items()}
asked |= {(lambda name=name: check_known([name])): extra for name, extra in precedent.DRAFTERS.items()}
asked |= {check_installed: "grammar", (lambda: SpeculationConfig(mode="lossy_judge:x")): "research"}
for action, extra in asked.items():
    said = refusal(action)
    assert f"pip install 'precedent-llm[{extra}]'" in (said or ""), (extra, said)
print(len(asked), "missing parts are refused by name")
"""
"""A program for core alone: whatever is not installed says which extra brings it."""

ANSWERS = """
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

PROMISED = """
import contextlib, io, sys
from importlib import import_module
from importlib.metadata import entry_points

import precedent
from precedent.cli.app import main

def promised(table):
    return [name for name, extra in table.items() if sys.argv[1] in (extra, "all")]

names = promised({name: extra for name, (_, extra) in precedent.PLUGINS.items()})
for name in names:
    getattr(precedent, name)
commands = promised(precedent.COMMANDS)
for command in commands:
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            main([command, "--help"])
        except SystemExit as ended:
            assert not ended.code, command
groups = [group for group in entry_points().groups if group.startswith("precedent.")]
loaded = [entry.load() for group in groups for entry in entry_points(group=group)]
drafters = promised(precedent.DRAFTERS)
assert set(drafters) <= {entry.name for entry in entry_points(group="precedent.drafters")}
modules = {"agents": ["precedent.langchain.middleware"], "grammar": ["llguidance"], "cuda": ["precedent_cuda"]}
modules |= {"llama-cpp": ["precedent_llama_cpp"], "models": ["precedent_models"], "testing": ["precedent_testing"]}
others = ["precedent_engines", "precedent_ray", "precedent_sglang", "precedent_vllm"]
modules["all"] = [*sum(modules.values(), []), *others]
for module in modules.get(sys.argv[1], []):
    import_module(module)
print(sys.argv[1], "brings", ", ".join([*names, *commands, *drafters, *modules.get(sys.argv[1], [])]))
"""
"""A program that uses what an extra promises, and loads everything that its packages announce."""

ANSWERS_OUTSIDE = """
import bigram_desk

assert bigram_desk.main()["phrases"] > 0  # how many depends on measured times
"""
"""A program that answers on the back end, and with the drafter, of examples/outside."""

WITHOUT_DEPENDENCIES = "precedent_ray"
"""A wheel that is installed alone: Ray brings some forty packages that nothing here calls."""


def run(*command: str | Path, folder: Path = ROOT) -> None:
    """Run a command, which must succeed, without what this checkout puts on Python's path."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([str(part) for part in command], cwd=folder, env=environment, check=True)


def build(out: Path) -> list[Path]:
    """Build the sdists, and from each its wheel, with the licence in every one; returns the wheels."""
    shutil.rmtree(out, ignore_errors=True)
    for project in (ROOT, *(path.parent for path in sorted(ROOT.glob("plugins/*/pyproject.toml")))):
        print(f"== building {project.name if project != ROOT else PROJECT['name']}", flush=True)
        with _licensed(project):
            run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, project)
    return sorted(out.glob("*.whl"))


@contextmanager
def _licensed(project: Path) -> Iterator[None]:
    """Lay the licence into a plugin's folder meanwhile: the build takes what lies there."""
    if (licence := project / LICENCE).exists():
        yield
        return
    try:
        shutil.copyfile(ROOT / LICENCE, licence)
        yield
    finally:
        licence.unlink(missing_ok=True)


def outside() -> Path:
    """The wheel of examples/outside, which does not belong beside ours."""
    out = ENVIRONMENTS / "outside"
    shutil.rmtree(out, ignore_errors=True)
    run(sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", out, ROOT / "examples" / "outside")
    (wheel,) = out.glob("*.whl")
    return wheel


def check(out: Path, wheels: Sequence[Path]) -> None:
    """Check the metadata of all archives, and that the wheels hold what they should, the licence too."""
    run(sys.executable, "-m", "twine", "check", "--strict", *sorted(out.iterdir()))
    run(sys.executable, "-m", "check_wheel_contents", *wheels)
    without = [wheel.name for wheel in wheels if not _holds_licence(wheel)]
    if without:
        sys.exit(f"no {LICENCE} in {', '.join(without)}")


def _holds_licence(wheel: Path) -> bool:
    with zipfile.ZipFile(wheel) as archive:
        return any(name.endswith(f".dist-info/licenses/{LICENCE}") for name in archive.namelist())


@dataclass(frozen=True)
class Trial:
    """What is installed, and the programs that must run then; `beside` is added without its dependencies for `more`."""

    archives: Sequence[str | Path]
    programs: Sequence[str]
    beside: Path | None = None
    more: Sequence[str] = ()


class Environments:
    """Empty environments of one Python, all with the pinned versions of what core depends on."""

    def __init__(self, python: str, out: Path) -> None:
        told = subprocess.run((python, "--version"), check=True, capture_output=True, text=True).stdout
        self._name, self._out = told.split()[1], out
        self._base = ENVIRONMENTS / self._name
        wanted = [one for one in PROJECT["dependencies"] if not one.startswith("precedent-")]
        stamp, content = self._base / "stamp", "\n".join([*wanted, CONSTRAINTS.read_text(encoding="utf-8")])
        if not stamp.exists() or stamp.read_text(encoding="utf-8") != content:
            shutil.rmtree(self._base, ignore_errors=True)
            run(python, "-m", "venv", self._base)
            self._install(self._base, "what core depends on: minutes", *wanted)
            run(self._base / "bin" / "python", "-c", WARM)
            stamp.write_text(content, encoding="utf-8")

    def try_out(self, what: str, trial: Trial) -> None:
        """Install what is tried, and run its programs in an empty folder, given `what`."""
        folder = ENVIRONMENTS / f"{self._name}-{what}"
        shutil.rmtree(folder, ignore_errors=True)
        try:
            (empty := folder / "empty").mkdir(parents=True)
            run("cp", "-al", self._base, environment := folder / "environment")
            self._install(environment, what, *trial.archives)
            _run_all(environment, trial.programs, what, empty)
            if trial.beside is not None:
                self._install(environment, f"{trial.beside.name} beside it", "--no-deps", trial.beside)
                _run_all(environment, trial.more, what, empty)
            run(environment / "bin" / "precedent", "--version", folder=empty)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _install(self, environment: Path, what: str, *arguments: str | Path) -> None:
        told = f"Python {self._name}: installing {what}"
        options = ("-c", CONSTRAINTS, "--find-links", self._out)
        run(environment / "bin" / "python", ROOT / ".ci" / "install.py", told, *options, *arguments)


def _run_all(environment: Path, programs: Sequence[str], what: str, folder: Path) -> None:
    for program in programs:
        file = folder.with_name("program.py")
        file.write_text(program, encoding="utf-8")
        run(environment / "bin" / "python", file, what, folder=folder)


def main(arguments: Sequence[str] | None = None) -> None:
    """Build, check and try all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--python", nargs="+", default=[sys.executable], help="Pythons to try; default: this one")
    parser.add_argument("--only", nargs="+", choices=("core", "sdist", "outside", *EXTRAS, "all"), help="what to try")
    given = parser.parse_args(arguments)
    out = given.out.resolve()
    wheels = build(out)
    check(out, wheels)
    (core,) = out.glob("precedent_llm-*.whl")
    (sdist,) = out.glob("precedent_llm-*.tar.gz")
    (testing,) = out.glob("precedent_testing-*.whl")
    (ray,) = out.glob(f"{WITHOUT_DEPENDENCIES}-*.whl")
    others = [wheel for wheel in wheels if wheel not in (core, ray)]
    trials = {
        "core": Trial([core], [REFUSED], beside=testing, more=[ANSWERS]),
        "sdist": Trial([sdist], [REFUSED]),
        "outside": Trial([core, outside()], [ANSWERS_OUTSIDE]),
        **{extra: Trial([f"{core}[{extra}]"], [PROMISED]) for extra in EXTRAS},
        "all": Trial([f"{core}[{','.join(EXTRAS)}]", *others], [ANSWERS], beside=ray, more=[PROMISED]),
    }
    for python in given.python:
        environments = Environments(python, out)
        for what in given.only or trials:
            environments.try_out(what, trials[what])
    print("\n".join(str(path) for path in sorted(out.iterdir())))


if __name__ == "__main__":
    main()
