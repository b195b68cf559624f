"""Work done before the first request, so that no answer waits for it: compile inner loops, time forwards.

Step costs are kept in the user's cache folder, and a later process begins with them. A file holds a few numbers per
number of threads, none of them about texts. It is only a start, which an engine corrects as it runs. So whatever is
wrong with a file, it is discarded, and the costs are measured anew.
"""

from __future__ import annotations

import hashlib
import json
import logging
from functools import cache

import torch
from platformdirs import user_cache_path

from precedent.cache.files import new_file, read_own
from precedent.planning.costs import START_UP_WIDTHS, CostCurve, StepCosts
from precedent.planning.warm_up import compile_drafting
from precedent.runtime.fence import Fence
from precedent.runtime.instructions import FEATURES
from precedent.runtime.machine_load import processor
from precedent.runtime.recomputable import sealed, unsealed
from precedent.sampling.coupling import coupled_choice
from precedent.target import Target

log = logging.getLogger(__name__)

REMEMBERED = "remembered costs"
"""The file of remembered costs among the aids of an engine."""

FEWEST_STEPS = 200
"""Steps that a process must have made before its costs are worth remembering."""

VERSION = "step costs 3"
"""Increase it when the numbers mean something else, or kernels change."""


MOST_BYTES = 1 << 20
"""Largest file that is read."""


class RememberedCosts:
    """The file of one processor, model, torch and way of computing. Reading and writing never raise."""

    def __init__(self, target: Target, model_fingerprint: str) -> None:
        machine = [processor(), FEATURES.flatten(), torch.get_num_threads(), torch.__version__, str(target.device)]
        identity = json.dumps([*machine, model_fingerprint, target.capabilities.bitwise, target.arena_bytes > 0])
        name = hashlib.sha256(identity.encode()).hexdigest()[:32]
        self._file = user_cache_path("precedent") / "step-costs" / f"{name}.json"

    def read(self) -> StepCosts | None:
        """The remembered costs; None if there are none, or if the file is not sound."""
        try:
            return StepCosts.from_known(json.loads(unsealed(read_own(self._file, MOST_BYTES), VERSION)))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as problem:
            log.info("measuring step costs anew: %s cannot be used: %s", self._file, problem)
            return None

    def write(self, costs: CostCurve) -> None:
        """Remember learned costs, unless they come from few steps or the folder cannot be written."""
        if not isinstance(costs, StepCosts) or costs.num_steps < FEWEST_STEPS:
            return
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with new_file(self._file) as file:
                file.write(sealed(json.dumps(costs.known, allow_nan=False).encode(), VERSION))
        except (OSError, ValueError) as problem:
            log.info("step costs are not remembered: %s", problem)


def costs_of(target: Target, remembered: RememberedCosts, fence: Fence) -> StepCosts:
    """The cost curve of a target: remembered, and confirmed by a step of each width, or else measured for a second."""

    def confirmed() -> StepCosts | None:
        costs = remembered.read()
        if costs is not None:
            if not isinstance(costs, StepCosts):
                raise TypeError(f"expected step costs, got {type(costs).__name__}")
            for width in START_UP_WIDTHS:
                costs.observe(width, target.measure_costs(width), 0, target.threads)
        return costs

    costs = fence.run(confirmed, None)
    if costs is None:
        costs = StepCosts()
        costs.measure(target.measure_costs, lambda: target.threads)
    return costs


@cache
def compile_inner_loops() -> None:
    """Run every compiled function, once per process: about half a minute on a new machine, a second later on."""
    compile_drafting()
    coupled_choice(torch.ones(2), 0, 0)
