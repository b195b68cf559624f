"""What a benchmark found, with its command, the date and the machine: the JSON that `--json FILE` writes.

`docs/figures/` holds such files; `.ci/figures.py` makes the documentation's tables of them.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from precedent.runtime.instructions import KERNELS, features_for
from precedent.runtime.processor import processor

ROOT = Path(__file__).parents[2]
GPU, NATIVE = "gpu", "native"

CLASSES = {
    "amx": ("amx-bf16", "AMX"),
    "avx512-bf16": ("avx512bf16", "AVX-512 with bfloat16"),
    "avx512": ("avx512f", "AVX-512"),
    "avx2": ("avx2", "AVX2"),
}
"""Of processors, best first: LLVM's name of the feature that makes the class, and how a page calls it."""


class Measurement:
    """One run of a command. Make it before anything is measured, for it notes the load.

    - `command`: as it was typed; this process's without one.
    - `gpu`: the name of the GPU that is measured, if one is.
    - `kernels`: those that the command uses; this process's without any (`PRECEDENT_CPU_KERNELS`).
    - `load`: where a measurement that has ended began with it.
    """

    def __init__(
        self,
        command: str | None = None,
        *,
        gpu: str | None = None,
        kernels: str | None = None,
        load: float | None = None,
    ) -> None:
        self._command, self._gpu = command or typed(sys.argv), gpu
        self._kernels = kernels or os.environ.get(KERNELS, NATIVE)
        self._load = os.getloadavg()[0] if load is None else load

    def write(self, file: Path | None, figures: Any) -> None:
        """Write the figures; nothing without a file."""
        if file is not None:
            file.write_text(as_text(self.as_dict(figures)), encoding="utf-8")

    def as_dict(self, figures: Any) -> dict[str, Any]:
        """The figures and how they came about, every number in four digits."""
        load = {"load_before": self._load, "load_after": os.getloadavg()[0]}
        machine = machine_of(self._kernels, self._gpu) | {name: round(value, 2) for name, value in load.items()}
        return {
            "source": "measured",
            "command": self._command,
            "date": time.strftime("%Y-%m-%d"),
            "machine": machine,
            "figures": in_four_digits(figures),
        }


def as_text(found: Mapping[str, Any]) -> str:
    """The JSON document."""
    return json.dumps(found, indent=1, ensure_ascii=False) + "\n"


def json_option(parser: ArgumentParser) -> None:
    """Add `--json`."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON")


def machine_of(kernels: str = NATIVE, gpu: str | None = None) -> dict[str, Any]:
    """Class, processor or GPU, and cores; `limited` with kernels of a lesser class than the processor's."""
    name = machine_class(features_for(kernels))
    found: dict[str, Any] = {"class": name, "processor": processor(), "instructions": in_words(name)}
    if name != machine_class(features_for(NATIVE)):
        found["limited"] = True
    if gpu is not None:
        found |= {"class": GPU, "processor": gpu, "instructions": "GPU"}
    return found | {"cores": os.cpu_count()}


def machine_class(features: Mapping[str, bool]) -> str:
    """The best class whose feature is there; `other` for a processor without any of them."""
    return next((name for name, (feature, _) in CLASSES.items() if features.get(feature)), "other")


def in_words(name: str) -> str:
    """A class of processors as a page calls it."""
    return CLASSES[name][1] if name in CLASSES else "other instructions"


def typed(arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> str:
    """The command as a reader types it: files by their names alone, and without `--json FILE`."""
    script, *given = arguments
    kernels = f"{KERNELS}={environment[KERNELS]} " if environment.get(KERNELS, NATIVE) != NATIVE else ""
    place = Path(script).resolve()
    name = place.relative_to(ROOT).as_posix() if place.is_relative_to(ROOT) else place.name
    return " ".join([kernels + interpreter(), name, *without_json(given)])


def interpreter(prefix: Path = Path(sys.prefix)) -> str:
    """`python`, or its path in an environment that a `make` command sets up beside `.venv`."""
    return f"{prefix.name}/bin/python" if prefix.parent == ROOT and prefix.name != ".venv" else "python"


def without_json(given: Sequence[str]) -> list[str]:
    """The arguments that say what is measured."""
    kept: list[str] = []
    rest = iter(given)
    for argument in rest:
        if argument == "--json":
            next(rest, None)
        elif not argument.startswith("--json="):
            kept.append(Path(argument).name if os.sep in argument and Path(argument).exists() else argument)
    return kept


def in_four_digits(found: Any) -> Any:
    """The same with every float in four significant digits, for a page shows no more; null for what is not finite."""
    if isinstance(found, float):
        return float(f"{found:.4g}") if math.isfinite(found) else None
    if isinstance(found, Mapping):
        return {name: in_four_digits(value) for name, value in found.items()}
    return [in_four_digits(value) for value in found] if isinstance(found, (list, tuple)) else found
