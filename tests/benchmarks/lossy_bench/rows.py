"""Rejections against total variation on real rows: every rule at every node that verification visits on the desk."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from lossy_bench.desk import DRAFT, WITH_CACHE, Desk
from precedent.config import has_judge
from precedent.decoding.verifiers import verifier_of
from precedent.sampling.rng import Rng
from precedent.sampling.target_rows import TargetRows
from precedent.tree import ROOT, CandidateTree, Sampled
from precedent.verify import Decide, Verdict, Verifier
from precedent.verify.lossy import RULES, judge_of
from precedent.verify.lossy.pareto import Point, least_rejections, point_of, point_of_judge
from precedent.verify.lossy.relaxed import Offer, offer_at

NEVER = "lossy_judge:name=order-desk,threshold=0"
"""Lossless, but drafters keep the draft's logits and the target its hidden states."""


@dataclass(slots=True)
class Sums:
    """Sums over nodes: the front's end, and each mode's rejections and total variation."""

    nodes: int = 0
    least: float = 0.0
    of_mode: dict[str, Point] = field(default_factory=dict)

    def add(self, mode: str, point: Point) -> None:
        """Add a node of a mode."""
        before = self.of_mode.get(mode, Point(0.0, 0.0))
        self.of_mode[mode] = Point(before.rejections + point.rejections, before.total_variation + point.total_variation)

    def as_dict(self) -> dict[str, Any]:
        """Means over the nodes; `above_front` is how much more a mode rejects than the best rule of its variation."""
        least = self.least / self.nodes
        points = [
            {
                "mode": mode,
                "rejections": sums.rejections / self.nodes,
                "total_variation": sums.total_variation / self.nodes,
                "above_front": (sums.rejections + sums.total_variation) / self.nodes - least,
            }
            for mode, sums in self.of_mode.items()
        ]
        return {"nodes": self.nodes, "least_rejections": least, "points": points}


def measure(desk: Desk, modes: Sequence[str], requests: int) -> dict[str, Any]:
    """The points of all modes at temperature 1, where the draft model proposes alone and beside the cache."""
    known = {mode: judgement_of(mode) for mode in modes}
    return {
        "draft": _measured(desk, known, requests, DRAFT),
        "draft and cache": _measured(desk, known, requests, WITH_CACHE),
    }


def _measured(desk: Desk, modes: Mapping[str, Any], requests: int, drafters: tuple[str, ...]) -> dict[str, Any]:
    sums = Sums()
    cache = desk.cache if drafters is WITH_CACHE else None
    with desk.engine(NEVER, drafters, cache) as (engine, _), _seeing(lambda *step: _add(sums, modes, *step)):
        desk.served(engine, 1.0, requests)
    return sums.as_dict()


def judgement_of(mode: str) -> Any:
    """The rule or the judge that a mode names."""
    if has_judge(mode):
        return judge_of(mode)
    name, _, text = mode.partition(":")
    return RULES[name](
        **{key: float(value) for key, _, value in (each.partition("=") for each in text.split(",") if each)}
    )


def _add(sums: Sums, modes: Mapping[str, Any], tree: CandidateTree, rows: TargetRows, verdict: Verdict) -> None:
    """Add the nodes of a step at which something was proposed, with one sample at most."""
    for node in (ROOT, *verdict.path):
        offer = offer_at(tree, rows, node)
        samples = [each for each in tree.candidates_at.get(node, ()) if isinstance(each.distribution, Sampled)]
        if offer is None or len(samples) > 1:
            continue
        sums.nodes += 1
        sums.least += least_rejections(offer)
        for mode, rule in modes.items():
            sums.add(mode, _point(rule, offer, tree, rows, samples[0].child if samples else None))


def _point(rule: Any, offer: Offer, tree: CandidateTree, rows: TargetRows, sampled: int | None) -> Point:
    if isinstance(rule, tuple(RULES.values())):
        return point_of(rule, offer)
    if sampled is None:
        return Point(least_rejections(offer), 0.0)
    return point_of_judge(offer, tree.token_ids[sampled], rule(tree, rows, sampled))


@contextmanager
def _seeing(see: Callable[[CandidateTree, TargetRows, Verdict], None]) -> Iterator[None]:
    """Show every tree with its rows and its verdict, before anything of it is committed."""

    def watched(mode: str) -> Verifier:
        verifier = verifier_of(mode)

        def prepare(tree: CandidateTree, rows: TargetRows) -> Decide:
            decide = verifier(tree, rows)

            def decided(rng: Rng) -> Verdict:
                verdict = decide(rng)
                see(tree, rows, verdict)
                return verdict

            return decided

        return prepare

    with patch("precedent.decoding.verification.verifier_of", watched):
        yield
