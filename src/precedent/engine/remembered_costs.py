"""What steps cost on this machine, remembered in the user's cache folder: a later process begins with it.

A file holds a few numbers per size of team, none of them about texts. It is only a start: an engine goes on learning.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress

import torch
from platformdirs import user_cache_path

from precedent.planning.costs import CostCurve
from precedent.planning.step_costs import NUM_PARAMETERS, StepCosts
from precedent.runtime.instructions import FEATURES
from precedent.runtime.plain_values import is_number
from precedent.runtime.processor import processor
from precedent.target import TargetModel

FEWEST_STEPS = 200
"""Steps that a process must have made before its costs are worth remembering."""

FORMAT = 1
"""Increase it when the parameters mean something else, or kernels change."""


class RememberedCosts:
    """The file of one processor, model, torch and way of computing."""

    def __init__(self, target: TargetModel, model_fingerprint: str) -> None:
        machine = [processor(), FEATURES.flatten(), torch.get_num_threads(), torch.__version__, str(target.device)]
        identity = json.dumps([FORMAT, *machine, model_fingerprint, target.bitwise, target.static is not None])
        name = hashlib.sha256(identity.encode()).hexdigest()[:32]
        self._file = user_cache_path("precedent") / "step-costs" / f"{name}.json"

    def read(self) -> StepCosts | None:
        """The remembered costs; None if there are none, or the file is damaged."""
        try:
            found = json.loads(self._file.read_text(encoding="utf-8"))
            known = {int(threads): [float(each) for each in values] for threads, values in found.items()}
        except (OSError, ValueError, TypeError, AttributeError):
            return None
        sound = known and all(
            len(values) == NUM_PARAMETERS and all(map(is_number, values)) for values in known.values()
        )
        return StepCosts(known) if sound else None

    def write(self, costs: CostCurve) -> None:
        """Remember learned costs, unless they come from few steps or the folder cannot be written."""
        if not isinstance(costs, StepCosts) or costs.num_steps < FEWEST_STEPS:
            return
        with suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            temporary = self._file.with_suffix(f".{os.getpid()}")
            temporary.write_text(json.dumps(costs.known), encoding="utf-8")
            temporary.replace(self._file)
