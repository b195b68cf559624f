"""Measures what the documentation shows, one command after the other, and writes `docs/figures` and the tables.

    python .ci/measure.py [NAME …] [--busy] [--traces FOLDER]

NAME is one of `figure_commands.COMMANDS`; without any, all are measured. Commands whose environment, traces or device
is not there are skipped and named. What a command prints is kept in `build/figures`. Let nothing else run meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import figures
from figure_cells import QUIET as BUSY
from figure_cells import FigureError, read_one
from figure_commands import COMMANDS, TRACES, Command

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "tests" / "benchmarks"))

# they are found in the folder above
from measurement import CLASSES, Measurement, as_text, machine_of  # noqa: E402

from precedent.runtime.instructions import KERNELS  # noqa: E402

QUIET = 0.5
"""Load above which nothing is measured."""

PATIENCE = 300.0
"""Seconds that a measurement waits for the load that the one before has left."""


class Refused(Exception):
    """Why something is not measured."""


class Absent(Refused):
    """What it needs is not on this machine."""


@dataclass(frozen=True)
class Run:
    """One command on this machine, or with the kernels of a lesser one."""

    name: str
    command: Command
    traces: Path | None
    kernels: str | None = None

    @property
    def python(self) -> Path:
        """The interpreter of its environment."""
        return ROOT / self.command.environment[0] / "bin" / "python"

    @property
    def words(self) -> list[str]:
        """The command line."""
        words = [word.replace(TRACES, str(self.traces)) for word in self.command.words.split()]
        if words[0] == "precedent":
            return [str(self.python.with_name("precedent")), *words[1:]]
        if words[0] == "python":
            return [str(self.python), *words[1:]]
        return words if words[0].endswith(".sh") else [str(self.python), *words]

    @property
    def shown(self) -> str:
        """The command as a page shows it, if it does not say so itself."""
        kernels = f"{KERNELS}={self.kernels} " if self.kernels else ""
        return kernels + self.command.words.replace(f"{TRACES}/", "")

    def check(self) -> None:
        """Raise Absent if it cannot run here."""
        folder, make = self.command.environment
        if not self.python.exists():
            raise Absent(f"needs {folder}, which {make} sets up")
        package = self.command.package
        if package and subprocess.run([self.python, "-m", "pip", "show", "-q", package], check=False).returncode:
            raise Absent(f"needs {package} in {folder}")
        if self.command.needs_traces:
            self._check_traces()

    def _check_traces(self) -> None:
        if self.traces is None:
            raise Absent("needs recorded runs: --traces FOLDER")
        lacking = [word for word in self.words if word.startswith(str(self.traces)) and not Path(word).exists()]
        if lacking:
            raise Absent(f"needs {', '.join(Path(word).name for word in lacking)} in the folder of --traces")

    def measure(self, folder: Path) -> dict[str, Any]:
        """What it found, with command, date and machine. Raises Refused if it fails."""
        found, log = folder / f"{self.name}.json", folder / f"{self.name}.log"
        found.unlink(missing_ok=True)
        ours = Measurement(self.shown, kernels=self.kernels)
        environment = os.environ | ({KERNELS: self.kernels} if self.kernels else {})
        with log.open("w", encoding="utf-8") as output:
            done = subprocess.run(
                [*self.words, "--json", str(found)],
                cwd=ROOT,
                env=environment,
                stdout=output,
                stderr=output,
                check=False,
            )
        if done.returncode or not found.exists():
            raise Refused(f"failed: see {log.relative_to(ROOT)}")
        told = json.loads(found.read_text(encoding="utf-8"))
        if self.command.words.startswith(("precedent ", "python ")):  # other programs say so themselves
            told = ours.as_dict(told)
        return told

    def file(self, found: Mapping[str, Any]) -> str:
        """The name of its file: with the machine's class, and what is special, where each machine has one."""
        if not self.command.by_machine:
            return self.name
        machine = found["machine"]
        limited, busy = machine.get("limited"), machine["load_before"] > BUSY
        return "-".join([self.name, machine["class"], *["limited"] * bool(limited), *["busy"] * busy])


def runs(names: Sequence[str], traces: Path | None) -> Iterator[Run]:
    """The commands, each with this machine's kernels first. Raises Refused for a name that does not exist."""
    for name in names or COMMANDS:
        if name not in COMMANDS:
            raise Refused(f"there is no {name!r}; choose from {', '.join(COMMANDS)}")
        yield Run(name, COMMANDS[name], traces)
        for kernels in COMMANDS[name].limits:
            if kernels in lesser():
                yield Run(name, COMMANDS[name], traces, kernels)


def lesser() -> list[str]:
    """The kernels of lesser processors that this one can run."""
    order, here = list(CLASSES), machine_of()["class"]
    return order[order.index(here) + 1 :] if here in order else []


def wait_until_quiet(patience: float = 0.0) -> None:
    """Wait until the load is low. Raises Refused after so many seconds."""
    until = time.monotonic() + patience
    while (load := os.getloadavg()[0]) > QUIET:
        if time.monotonic() > until:
            raise Refused(f"the load is {load:.2f}: let nothing else run, or add --busy")
        time.sleep(5)


def measured(run: Run, files: Path, folder: Path) -> str:
    """Measure, and write the file and the tables, if all others are there; says what was written."""
    begun = time.monotonic()
    found = run.measure(folder)
    file = files / f"{run.file(found)}.json"
    before = file.read_text(encoding="utf-8") if file.exists() else None
    file.write_text(as_text(found), encoding="utf-8")
    try:
        figures.check(read_one(file))
    except FigureError:
        file.unlink() if before is None else file.write_text(before, encoding="utf-8")
        raise
    with suppress(FigureError):  # of another file: the check at the end names it
        figures.write(figures.Site(ROOT))
    return f"{(time.monotonic() - begun) / 60:.1f} minutes, docs/figures/{file.name}"


def tried(run: Run, files: Path, folder: Path, *, busy: bool) -> bool:
    """Measure with one line of progress; False if it failed."""
    print(f"== {run.name}: {run.shown} (about {run.command.minutes:g} minutes) …", end=" ", flush=True)
    try:
        run.check()
        if not busy:
            wait_until_quiet(PATIENCE)
        print(measured(run, files, folder), flush=True)
    except Absent as reason:
        print(f"skipped: {reason}", flush=True)
    except (Refused, FigureError) as reason:
        print(f"error: {reason}", flush=True)
        return False
    return True


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all that was asked for; returns the exit status."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("names", nargs="*", metavar="NAME")
    options.add_argument("--busy", action="store_true", help="measure although other programs run")
    options.add_argument("--traces", type=Path, default=os.environ.get("PRECEDENT_TRACES"), help="recorded runs")
    asked = options.parse_args(arguments)
    folder, files = ROOT / "build" / "figures", ROOT / "docs" / "figures"
    for each in (folder, files):
        each.mkdir(parents=True, exist_ok=True)
    try:
        wanted = list(runs(asked.names, asked.traces and asked.traces.resolve()))
        if not asked.busy:
            wait_until_quiet()
    except Refused as reason:
        print(f"error: {reason}", file=sys.stderr)
        return 2
    print(f"== on {machine_of()['processor']}, {machine_of()['instructions']}", flush=True)
    failed = [run for run in wanted if not tried(run, files, folder, busy=asked.busy)]
    return 1 if failed else figures.main(["--check"], figures.Site(ROOT))


if __name__ == "__main__":
    sys.exit(main())
