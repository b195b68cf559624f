"""A draft model beside a memory: used where it saves time that the memory would not have saved a step later."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from precedent.drafters.base import Candidates, DrawSource
from precedent.planning.calibration import Trust
from precedent.planning.costs import CostCurve
from precedent.planning.gate import FIRST_AFTER, LONG_PROMPT, Gate
from precedent.planning.planner import Limits, Planner
from precedent.tree import ROOT

STEP = {1: 100.0, 8: 115.0, 16: 150.0, 32: 200.0}
DRAW, MISSED = 20.0, 0.4
"""Milliseconds of a draw, and of each token that the draft model has to catch up on."""
PROMPT, WRONG = 500, 5


@dataclass(frozen=True)
class Answer:
    """Token `i` is `10 + i`. The memory knows it if `known[i]`, the draft model if `drafted[i]`."""

    known: Sequence[bool]
    drafted: Sequence[bool]


def answers(number: int, known_after: int, drafted: float, seed: int = 1) -> list[Answer]:
    """Answers of 60 tokens in pieces of 12, of which the memory knows all but the first `known_after` tokens."""
    choose = random.Random(seed)
    return [
        Answer([place % 12 >= known_after for place in range(60)], [choose.random() < drafted for _ in range(60)])
        for _ in range(number)
    ]


KNOWN, UNKNOWN = answers(40, 1, 0.8), answers(40, 12, 0.8)
TEXTS = {
    "the memory knows": KNOWN,
    "the draft model knows": UNKNOWN,
    "nobody knows": answers(40, 12, 0.05),
    "they alternate": [*KNOWN[:10], *UNKNOWN[:10], *KNOWN[10:20], *UNKNOWN[10:20]],
    "the memory knows half of it": answers(40, 6, 0.7),
    "the memory comes back soon": answers(40, 3, 0.8),
    "short answers": [Answer(each.known[:30], each.drafted[:30]) for each in answers(60, 2, 0.7)],
}


def milliseconds(texts: Sequence[Answer], *, memory: bool, draft: bool) -> float:
    """The time that one engine takes for all answers."""
    planner = Planner(CostCurve.through(STEP))
    return sum(_request(planner, text, memory=memory, draft=draft) for text in texts)


def _request(planner: Planner, text: Answer, *, memory: bool, draft: bool) -> float:
    spent, at, computed = 0.0, 0, 0
    trust, end = Trust(), len(text.known)
    while at < end:
        limits = Limits(32, 6, end - at - 1, frozenset(), trust=trust)
        behind = at + PROMPT - computed
        plan = planner.plan(
            [_remembered(text, at)] if memory else [], {"draft": DrawSource(behind)} if draft else {}, limits
        )
        number, node = plan.draws.get("draft", 0), ROOT
        for place in range(at, at + number):
            node = plan.builder.add_fixed(node, 10 + place if text.drafted[place] else WRONG, "draft")
        if number:
            drawing = DRAW * number + MISSED * max(0, behind - 1)
            planner.observe_draws("draft", number, behind, drawing)
            spent, computed = spent + drawing, at + PROMPT
        tree = plan.builder.build()
        path: list[int] = []
        for node, (parent, token) in enumerate(zip(tree.parents, tree.token_ids, strict=True)):
            if parent == (path[-1] if path else ROOT) and token == 10 + at + len(path):
                path.append(node)
        forward = planner.cost.milliseconds(len(tree) + 1)
        planner.observe_forward(len(tree) + 1, forward)
        planner.observe(plan, tree, path)
        spent, at = spent + forward, at + len(path) + 1
    return spent


def _remembered(text: Answer, at: int) -> Candidates:
    """The tokens that the memory knows to follow."""
    nodes: list[tuple[int, int, float, int]] = []
    while at + len(nodes) < len(text.known) and text.known[at + len(nodes)]:
        nodes.append((10 + at + len(nodes), len(nodes) - 1 if nodes else ROOT, 0.9, 1))
    return Candidates.of("memory", nodes)


@pytest.mark.parametrize("texts", TEXTS.values(), ids=TEXTS)
def test_both_together_take_at_most_two_percent_longer_than_the_better_one(texts: list[Answer]) -> None:
    both = milliseconds(texts, memory=True, draft=True)
    alone = milliseconds(texts, memory=True, draft=False), milliseconds(texts, memory=False, draft=True)
    assert both <= 1.02 * min(alone)


@pytest.mark.parametrize("name", ["the memory knows", "the memory comes back soon", "short answers"])
def test_a_memory_that_mostly_knows_is_not_held_up_by_the_first_probe(name: str) -> None:
    first = TEXTS[name][:8]
    assert milliseconds(first, memory=True, draft=True) <= 1.01 * milliseconds(first, memory=True, draft=False)


@pytest.mark.parametrize(
    ("behind", "open_mass", "beside", "steps"),
    [
        (LONG_PROMPT + 1, 0.6, True, FIRST_AFTER), (LONG_PROMPT + 1, 1.0, True, 27), (LONG_PROMPT, 0.6, True, 0),
        (10_000, 1.0, False, 0),
    ],
)  # fmt: skip
def test_the_first_probe_waits_only_behind_a_long_prompt_and_not_for_ever(
    behind: int, open_mass: float, beside: bool, steps: int
) -> None:
    gate = Gate(behind=behind)
    waited = next(step for step in range(2 * FIRST_AFTER) if gate.decide(0, open_mass, beside=beside))
    assert waited == steps


def test_probes_in_vain_become_rarer_and_still_find_a_draft_model_that_begins_to_know() -> None:
    in_vain = TEXTS["nobody knows"] * 4
    begun, plain = (milliseconds(in_vain, memory=memory, draft=memory) for memory in (True, False))
    assert plain < begun <= 1.004 * plain
    drafted = milliseconds(UNKNOWN, memory=False, draft=True)
    assert milliseconds([*in_vain, *UNKNOWN], memory=True, draft=True) - begun <= 1.6 * drafted


def test_a_draft_model_is_used_for_what_the_memory_does_not_know() -> None:
    """The control: together they are faster than either, where each knows another part."""
    both = milliseconds(TEXTS["they alternate"], memory=True, draft=True)
    assert both <= 0.8 * milliseconds(TEXTS["they alternate"], memory=True, draft=False)
    assert both <= 0.8 * milliseconds(TEXTS["they alternate"], memory=False, draft=True)
