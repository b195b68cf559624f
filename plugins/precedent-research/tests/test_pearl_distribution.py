"""PEARL keeps the target's distribution exactly: every branch of drawing ahead and verifying, through the real loop."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from helpers import known_weights
from helpers.enumeration import RngOfAStep
from helpers.pearl import PlannerOfAllCandidates, in_place, run, start
from helpers.random_trees import toy_model
from helpers.tabled_model import TabledModel
from torch import Tensor

from precedent import verify
from precedent.config import SamplingParams
from precedent.drafters.base import Drafter, DrawSource
from precedent.drafters.model.distribution import DraftedToken
from precedent.planning.planner import Limits, Plan
from precedent.sampling.rng import Rng
from precedent.sampling.row_shaper import RowShaper
from precedent_research.pearl import PearlDrafter, PearlSession
from precedent_testing.drafters import OracleDrafter
from precedent_testing.replay_rng import enumerate_outcomes

EXACT = 1e-12


def toy(name: str) -> TabledModel:
    """A random model of two tokens, behind a prompt of one."""
    distribution = toy_model(name, 2, plain=True)
    return TabledModel(lambda token_ids: distribution(token_ids[1:]).log())


def toy_draft(name: str = "draft") -> Drafter:
    return PearlDrafter(toy(name))  # type: ignore[arg-type]  # shaped like a TargetModel


def answer_distribution(
    drafters: Callable[[], Sequence[Drafter]],
    mode: str,
    *,
    length: int,
    most_ahead: int,
    target_name: str = "target",
    ends: frozenset[int] = frozenset(),
    planner: type[PlannerOfAllCandidates] = PlannerOfAllCandidates,
    shape: RowShaper | None = None,
) -> dict[tuple[int, ...], float]:
    """The exact distribution of whole answers through the real loop: every branch of drafting and verifying."""
    target, found = toy(target_name), defaultdict(float)

    def answer(rng: Rng) -> tuple[int, ...]:
        sequence = start(
            target, drafters(), SamplingParams(temperature=1.0, max_tokens=length), prompt=(0,), mode=mode,
            rng_of=lambda number: RngOfAStep(rng, number), ends=ends, shape=shape,
        )  # fmt: skip
        return run(target, sequence, in_place(target, planner(most_ahead)))

    with torch.inference_mode():
        for probability, output in enumerate_outcomes(answer):
            found[output] += probability
    return found


def target_distribution(length: int, name: str = "target") -> dict[tuple[int, ...], float]:
    distribution, expected = toy_model(name, 2, plain=True), {}
    for string in itertools.product(range(2), repeat=length):
        expected[string] = 1.0
        for place, token in enumerate(string):
            expected[string] *= float(distribution(string[:place])[token])
    return expected


def until_the_end(distribution: Mapping[tuple[int, ...], float], end: int) -> dict[tuple[int, ...], float]:
    """The same distribution of answers that stop at their first end token."""
    cut: dict[tuple[int, ...], float] = defaultdict(float)
    for string, mass in distribution.items():
        cut[string[: string.index(end) + 1] if end in string else string] += mass
    return cut


def distance(distribution: Mapping[tuple[int, ...], float], expected: Mapping[tuple[int, ...], float]) -> float:
    return 0.5 * sum(abs(distribution.get(string, 0.0) - mass) for string, mass in expected.items())


MEMORY = {"alone": (), "beside a path": (1, 0, 1, 1), "beside another": (0, 0, 1, 0)}


@pytest.mark.parametrize("memory", MEMORY.values(), ids=MEMORY)
@pytest.mark.parametrize("mode", ["traversal", "topdown"])
def test_whole_answers_have_the_targets_distribution_exactly(mode: str, memory: tuple[int, ...]) -> None:
    """All answers of three tokens, over every branch: lookaheads used, dropped and met by fixed candidates."""

    def drafters() -> list[Drafter]:
        return [OracleDrafter(memory), toy_draft()]

    distribution = answer_distribution(drafters, mode, length=3, most_ahead=2)
    assert sum(distribution.values()) == pytest.approx(1.0, abs=EXACT)
    assert distance(distribution, target_distribution(3)) < EXACT


def test_four_tokens_and_a_longer_lookahead_keep_the_distribution() -> None:
    """Samples that serve more than one step, and lazy tests that reject a subtree whose token comes back."""
    distribution = answer_distribution(lambda: [toy_draft()], "traversal", length=4, most_ahead=3)
    assert distance(distribution, target_distribution(4)) < EXACT


class PlannerThatPeeks(PlannerOfAllCandidates):
    """The tempting mistake: a lookahead is shown whole where it has come to an end, and kept back where it has not."""

    def plan(self, candidates: Sequence, draw_sources: Mapping[str, DrawSource], limits: Limits) -> Plan:
        plan = super().plan(candidates, draw_sources, limits)
        plan.draws = {source: number * (number < self._most_ahead - 1) for source, number in plan.draws.items()}
        return plan


@pytest.mark.parametrize(("planner", "exact"), [(PlannerOfAllCandidates, True), (PlannerThatPeeks, False)])
def test_answers_that_end_have_the_distribution_if_nobody_peeks(
    planner: type[PlannerOfAllCandidates], exact: bool
) -> None:
    """How many samples are at hand tells whether an end token is among them: what is shown must not depend on it."""
    distribution = answer_distribution(
        lambda: [toy_draft("draft 4")], "traversal", length=5, most_ahead=4,
        target_name="target 4", ends=frozenset({1}), planner=planner,
    )  # fmt: skip
    found = distance(distribution, until_the_end(target_distribution(5, "target 4"), 1))
    assert (found < EXACT) if exact else (found > 1e-2)


class EndsAfterThree:
    """A grammar that allows any three tokens, and must not be asked what follows them."""

    def __call__(self, output_ids: Sequence[int], row: Tensor) -> Tensor:
        assert len(output_ids) < 3, "the grammar has ended"
        return row


@pytest.mark.parametrize("together", [False, True], ids=["row by row", "all rows at once"])
@pytest.mark.parametrize("mode", ["traversal", "topdown"])
def test_a_grammar_may_end_at_the_leaf(mode: str, together: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The made-up row after the leaf is exempt from constraints, and its token is dropped."""
    if together:
        monkeypatch.setattr(verify, "verifier_of", lambda mode: known_weights.verifier_of(mode, "ahead"))
    distribution = answer_distribution(lambda: [toy_draft()], mode, length=3, most_ahead=2, shape=EndsAfterThree())
    assert distance(distribution, target_distribution(3)) < EXACT


class KeepsOnlyTheLikely(PearlSession):
    """The tempting mistake: an unseen sample is forgotten for what it is, and another one is taken in its place."""

    def unseen_after(self, token_ids: Sequence[int]) -> list[DraftedToken]:
        chain = super().unseen_after(token_ids)
        return list(itertools.takewhile(lambda each: float(each.distribution.probs()[each.token_id]) > 0.5, chain))


class BiasedDrafter(PearlDrafter):
    def session(self, *parts: Any) -> PearlSession:
        return KeepsOnlyTheLikely(self, *parts)


def test_a_lookahead_that_is_dropped_for_what_it_holds_is_seen() -> None:
    """The same enumeration finds the bias of showing likely samples only."""
    distribution = answer_distribution(lambda: [BiasedDrafter(toy("draft"))], "traversal", length=3, most_ahead=2)
    assert distance(distribution, target_distribution(3)) > 1e-3


@pytest.mark.parametrize("mode", ["traversal", "topdown"])
def test_weights_computed_ahead_verify_late_leaves_alike(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All weights before the walk, the made-up row among them: the same distribution."""
    monkeypatch.setattr(verify, "verifier_of", lambda mode: known_weights.verifier_of(mode, "ahead"))

    def drafters() -> list[Drafter]:
        return [OracleDrafter((1, 0, 1, 1)), toy_draft()]

    distribution = answer_distribution(drafters, mode, length=3, most_ahead=2)
    assert distance(distribution, target_distribution(3)) < EXACT
