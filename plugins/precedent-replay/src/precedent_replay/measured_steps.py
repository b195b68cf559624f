"""Times a model's steps on this machine, so that a replay can estimate the speed-up."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from precedent.planning.costs import WIDTHS
from precedent.runtime.machine_load import OtherPrograms
from precedent.target import TargetModel
from precedent_replay.settings import MeasuredSteps

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ROUNDS = 4
"""Every round times each width, and the best time counts, because the first forward passes of a process are slower."""


def measured_steps(
    model: PreTrainedModel, name: str, most_nodes: int, progress: Callable[[int, int], None] = lambda *_: None
) -> MeasuredSteps:
    """Time forward passes from 1 token up to a tree of `most_nodes`; `progress(done, total)` counts rounds."""
    target, others, best = TargetModel(model), OtherPrograms(), dict[int, float]()
    for number in range(ROUNDS):
        progress(number, ROUNDS)
        for width in widths_up_to(most_nodes + 1):
            best[width] = min(best.get(width, float("inf")), target.measure_costs(width))
    dtype = str(model.dtype).removeprefix("torch.")
    threads = f", {torch.get_num_threads()} threads" if model.device.type == "cpu" else ""
    return MeasuredSteps(f"{name} ({dtype}, {model.device}{threads})", best, others.share())


def widths_up_to(widest: int) -> list[int]:
    """The widths to measure: the buckets of a cost curve up to the one that holds `widest`."""
    narrower = [width for width in WIDTHS if width < widest]
    return [*narrower, *WIDTHS[len(narrower) : len(narrower) + 1]]
