"""What a judge's training found: how well its features rank unseen mismatches, and what its threshold lets through."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from precedent_research.judge import HIDDEN, widths_of
from precedent_research.judge_training.fitting import Examples, area_under_curve, cross_validated, fit, interval_of_area
from precedent_research.judge_training.judge_training import JudgeRecipe, TrainedOn

ALL, ROWS = "all", "all of rows"


def report_of(trained: TrainedOn, recipe: JudgeRecipe) -> dict[str, Any]:
    """The report, ready for JSON. An outcome is `changed` or not; `areas` says how well features tell which."""
    judge, pieces = trained.judge, trained.pieces
    return {
        "target": judge.target, "draft": judge.draft, "outcome": judge.outcome,
        "runs": len(pieces),
        "failed_runs": sum(piece.failed for piece in pieces),
        "tokens": sum(piece.tokens for piece in pieces),
        "mismatches": sum(piece.mismatches for piece in pieces),
        "labelling_seconds": round(sum(piece.seconds for piece in pieces), 1),
        "learned": _counts(trained.learned),
        "held_out": {**_counts(trained.held_out), **let_through(trained)},
        "threshold": judge.threshold,
        "strength": trained.strength,
        "areas": [{"features": name, **_areas(trained, columns, recipe)} for name, columns in _groups(trained)],
        "recipe": asdict(recipe),
    }  # fmt: skip


def _counts(examples: Examples) -> dict[str, int]:
    return {
        "tasks": len(set(examples.tasks.tolist())),
        "labels": len(examples.labels),
        "changed": int(examples.labels.sum()),
    }


def let_through(trained: TrainedOn) -> dict[str, list[int]]:
    """How many of the held-out mismatches that leave the outcome as it is the judge overrules, and of the others."""
    examples, judge = trained.held_out, trained.judge
    overruled = np.array([judge.probability(values) < judge.threshold for values in examples.features.tolist()])
    kinds = {"overruled_unchanged": examples.labels == 0, "overruled_changed": examples.labels == 1}
    return {name: [int((overruled & kind).sum()), int(kind.sum())] for name, kind in kinds.items()}


def _groups(trained: TrainedOn) -> Iterator[tuple[str, list[int]]]:
    """Features to compare, by name, and their columns: all, all of rows, and each alone."""
    names, widths = trained.judge.features, widths_of(trained.judge.features, len(trained.judge.weights))
    ends = np.cumsum(widths).tolist()
    columns = {name: list(range(end - width, end)) for name, end, width in zip(names, ends, widths, strict=True)}
    if len(names) > 1:
        yield ALL, list(range(ends[-1]))
    if HIDDEN in names and len(names) > 2:
        yield ROWS, [column for name in names if name != HIDDEN for column in columns[name]]
    yield from columns.items()


def _areas(trained: TrainedOn, columns: Sequence[int], recipe: JudgeRecipe) -> dict[str, Any]:
    learned, held_out = (each.columns(columns) for each in (trained.learned, trained.held_out))
    crossed = cross_validated(learned, recipe.strength)
    unseen = fit(learned, crossed.strength).probabilities(held_out.features)
    return {
        "area": area_under_curve(unseen, held_out.labels),
        "interval": list(interval_of_area(unseen, held_out, recipe.seed)),
        "cross_validated": crossed.area,
        "strength": crossed.strength,
    }
