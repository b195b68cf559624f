"""Shared by all benchmarks: options, alternating runs, and figures written as JSON with command, date and machine.

`docs/figures/` holds such files; `.ci/figures.py` writes the documentation's tables from them.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from precedent.runtime.instructions import KERNELS, features_for
from precedent.runtime.machine_load import processor

ROOT = Path(__file__).parents[1]
NATIVE = "native"

CLASSES = {
    "amx": ("amx-bf16", "AMX"),
    "avx512-bf16": ("avx512bf16", "AVX-512 with bfloat16"),
    "avx512": ("avx512f", "AVX-512"),
    "avx2": ("avx2", "AVX2"),
}
"""Classes of processors, best first: the LLVM feature that makes the class, and its name on pages."""


def options(description: str | None, **defaults: Any) -> ArgumentParser:
    """Make a parser with `--json` and one option per default; a type in place of a default means None."""
    parser = ArgumentParser(description=description, formatter_class=RawDescriptionHelpFormatter)
    for name, default in defaults.items():
        option = f"--{name.replace('_', '-')}"
        if default is False:
            parser.add_argument(option, action="store_true")
        elif isinstance(default, type):
            parser.add_argument(option, type=default)
        elif isinstance(default, list):
            parser.add_argument(option, nargs="*", type=type(default[0]), default=default)
        else:
            parser.add_argument(option, type=type(default), default=default)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON")
    return parser


def run(parser: ArgumentParser, measure: Callable[[Namespace], Any]) -> None:
    """Parse the command line, measure, print the figures and write them to `--json`."""
    given = parser.parse_args()
    measurement = Measurement()
    figures = measure(given)
    print(json.dumps(in_four_digits(figures), indent=1, ensure_ascii=False))
    measurement.write(given.json, figures)


def seconds(action: Callable[[], object]) -> float:
    """Time one call."""
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def alternating(ways: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Time all ways once per round, so that other load on the machine affects them equally; seconds by way."""
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, action in ways.items():
            times[way].append(seconds(action))
    return times


def medians(ways: Mapping[str, Callable[[], object]], rounds: int, scale: float = 1e3) -> dict[str, float]:
    """Median time of each alternating way, in milliseconds unless `scale` says otherwise."""
    return {way: median(times) * scale for way, times in alternating(ways, rounds).items()}


class Measurement:
    """One run of a command. Create it before measuring starts: it records the load of the machine.

    Args:
        command: As typed; by default this process's command.
        gpu: Name of the GPU that is measured.
        kernels: `PRECEDENT_CPU_KERNELS` of the command; by default this process's.
        load: Load before the measurement, if it was recorded earlier.
    """

    def __init__(
        self, command: str | None = None, *, gpu: str | None = None, kernels: str | None = None, load: Any = None
    ) -> None:
        self._command, self._gpu = command or typed(sys.argv), gpu
        self._kernels = kernels or os.environ.get(KERNELS, NATIVE)
        self._load = os.getloadavg()[0] if load is None else load

    def write(self, file: Path | None, figures: Any) -> None:
        """Write the figures to a file, if there is one."""
        if file is not None:
            file.write_text(as_text(self.as_dict(figures)), encoding="utf-8")

    def as_dict(self, figures: Any) -> dict[str, Any]:
        """Return the figures in four digits, with command, date and machine."""
        load = {"load_before": round(self._load, 2), "load_after": round(os.getloadavg()[0], 2)}
        return {
            "source": "measured",
            "command": self._command,
            "date": time.strftime("%Y-%m-%d"),
            "machine": machine_of(self._kernels, self._gpu) | load,
            "figures": in_four_digits(figures),
        }


def as_text(found: Mapping[str, Any]) -> str:
    """Format a file of figures."""
    return json.dumps(found, indent=1, ensure_ascii=False) + "\n"


def machine_of(kernels: str = NATIVE, gpu: str | None = None) -> dict[str, Any]:
    """Describe the machine; `limited` marks kernels of a lesser class than the processor's own."""
    name = machine_class(features_for(kernels))
    found: dict[str, Any] = {"class": name, "processor": processor()}
    found["instructions"] = CLASSES[name][1] if name in CLASSES else "other instructions"
    if name != machine_class(features_for(NATIVE)):
        found["limited"] = True
    if gpu is not None:
        found |= {"class": "gpu", "processor": gpu, "instructions": "GPU"}
    return found | {"cores": os.cpu_count()}


def machine_class(features: Mapping[str, bool]) -> str:
    """Return the best class whose feature is present, `other` if none is."""
    return next((name for name, (feature, _) in CLASSES.items() if features.get(feature)), "other")


def typed(arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> str:
    """Return the command as a reader would type it: file names without folders, and without `--json FILE`."""
    script, *given = arguments
    kernels = f"{KERNELS}={environment[KERNELS]} " if environment.get(KERNELS, NATIVE) != NATIVE else ""
    prefix, place = Path(sys.prefix), Path(script).resolve()
    own = prefix.parent == ROOT and prefix.name != ".venv"
    name = place.relative_to(ROOT).as_posix() if place.is_relative_to(ROOT) else place.name
    kept, rest = list[str](), iter(given)
    for argument in rest:
        if argument == "--json":
            next(rest, None)
        elif not argument.startswith("--json="):
            kept.append(Path(argument).name if os.sep in argument and Path(argument).exists() else argument)
    return " ".join([kernels + (f"{prefix.name}/bin/python" if own else "python"), name, *kept])


def in_four_digits(found: Any) -> Any:
    """Round every float to four significant digits; null for what is not finite."""
    if isinstance(found, float):
        return float(f"{found:.4g}") if math.isfinite(found) else None
    if isinstance(found, Mapping):
        return {name: in_four_digits(value) for name, value in found.items()}
    return [in_four_digits(value) for value in found] if isinstance(found, (list, tuple)) else found
