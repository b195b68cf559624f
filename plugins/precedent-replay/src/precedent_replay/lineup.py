"""Lists who takes part in a replay: baselines, Precedent's drafters alone and together, and ablations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from precedent.planning.planner import Planner
from precedent_replay.ablation import PLANNERS, DrafterShelf, check
from precedent_replay.baselines import PromptLookup, SuffixDecoding, SuffixTree
from precedent_replay.contenders import Contender, Drafted
from precedent_replay.pool import Pool
from precedent_replay.settings import FURTHER_BASELINES, Settings


@dataclass(frozen=True, slots=True)
class Entry:
    """One contender: its budget in nodes, the cost curve it plans for, and the idea it leaves out.

    `whole` marks all drafters together with nothing left out.
    """

    name: str
    contender: Contender
    budget: int | None = None
    curve: str = ""
    without: str = ""
    whole: bool = False

    @property
    def baseline(self) -> bool:
        """Whether the contender is a baseline."""
        return not isinstance(self.contender, Drafted)


def lineup(pool: Pool, settings: Settings, end_id: int) -> list[Entry]:
    """All entries, baselines first. Raises ConfigError for an unknown drafter or idea."""
    check(settings.ablate, settings.drafters)
    entries, shelf = _baselines(pool, settings), DrafterShelf(pool)
    for budget in settings.budgets:
        for names in [(name,) for name in settings.drafters if len(settings.drafters) > 1]:
            entries += _ours(shelf, settings, end_id, budget, names=names)
        for curve in settings.curves:
            entries += _ours(shelf, settings, end_id, budget, curve=curve)
    for budget in settings.budgets:
        for idea in settings.ablate:
            entries += _ours(shelf, settings, end_id, budget, without=idea)
    return entries


def _baselines(pool: Pool, settings: Settings) -> list[Entry]:
    wanted = FURTHER_BASELINES if settings.baselines is None else settings.baselines
    entries = [Entry(PromptLookup.name, PromptLookup())]
    for budget in settings.budgets:
        found: list[Contender] = [SuffixDecoding(pool, alpha, budget) for alpha in settings.alphas]
        if "suffix-tree" in wanted:
            found.append(SuffixTree(pool, budget))
        entries += [Entry(_label(each.name, settings, budget), each, budget) for each in found]
    return entries


def _ours(
    shelf: DrafterShelf,
    settings: Settings,
    end_id: int,
    budget: int,
    *,
    names: Sequence[str] | None = None,
    curve: str = "",
    without: str = "",
) -> list[Entry]:
    """One contender of ours, or none if no drafter is left."""
    curve, whole = curve or settings.curves[0], names is None and not without
    drafters = shelf.take(names or settings.drafters, without)
    if not drafters:
        return []
    planner = PLANNERS.get(without, Planner)(settings.cost_curve(curve))
    name = f"without {without}" if without else "+".join(drafter.name for drafter in drafters)
    label = _label(name, settings, budget, curve)
    return [Entry(label, Drafted(label, drafters, planner, budget, end_id), budget, curve, without, whole)]


def _label(name: str, settings: Settings, budget: int, curve: str = "") -> str:
    """The name, with budget and curve if they distinguish it from others in the replay."""
    at = f" @{budget}" if len(settings.budgets) > 1 else ""
    return f"{name}{at} ({curve})" if curve not in ("", settings.curves[0]) else f"{name}{at}"
