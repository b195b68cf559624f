"""The planner: the tree that gives most tokens per millisecond, from calibrated estimates and measured cost."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
import torch

from precedent.drafters.base import Candidates, DrawSource
from precedent.planning.calibration import MOST_TENANTS, Calibrations, Trust
from precedent.planning.costs import CostCurve
from precedent.planning.gate import PROBE_DRAWS, PROBE_STEPS, Allowance
from precedent.planning.planner import Limits, Planner
from precedent.tree import ROOT, CandidateTree, Sampled
from precedent_testing.trees import check_tree


def roomy() -> Trust:
    """The trust of a new request whose trees may lose whatever they like."""
    return Trust(Allowance(1e6, 1e6))


ROOMY = Limits(32, max_draws=6, max_depth=40, end_token_ids=frozenset(), trust=roomy())


def curve(**milliseconds: float) -> CostCurve:
    """A cost curve through the given points, written w8=12.0."""
    return CostCurve.through({int(width[1:]): value for width, value in milliseconds.items()})


def candidates(*nodes: tuple[int, int, float], source: str = "memory") -> Candidates:
    """A proposal from (parent, token, estimate) triples."""
    return Candidates.of(source, [(token, parent, estimate, token) for parent, token, estimate in nodes])


def chosen(planner: Planner, *proposals: Candidates, limits: Limits = ROOMY) -> CandidateTree:
    """The tree of fixed candidates that the planner builds."""
    tree = planner.plan(proposals, {}, limits).builder.build()
    check_tree(tree)
    return tree


def test_free_width_takes_everything_and_dear_width_nothing() -> None:
    """Zero nodes is a legal answer."""
    proposal = candidates((ROOT, 1, 0.5), (0, 2, 0.5), (ROOT, 3, 0.2))
    assert len(chosen(Planner(curve(w1=10.0, w32=10.0)), proposal)) == 3
    assert len(chosen(Planner(curve(w1=10.0, w2=100.0)), proposal)) == 0


def test_a_certain_chain_is_taken_to_the_end_where_rows_are_free() -> None:
    """However deep it is: 32 nodes are the limit."""
    certain = candidates(*((token - 1 if token else ROOT, token, 0.99) for token in range(40)))
    depths = chosen(Planner(curve(w1=10.0, w64=10.0)), certain).depths
    assert max(depths) == 32, "the planner no longer goes as deep as pays"


def test_the_choice_is_the_best_of_all_prefixes_of_the_ranking() -> None:
    """Against brute force over all subtrees: no other set of nodes has a higher rate of expected tokens."""
    choose = random.Random(3)
    for _ in range(60):
        nodes: list[tuple[int, int, float]] = []
        for token in range(6):
            parent = choose.choice([ROOT, *range(len(nodes))])
            siblings = sum(estimate for above, _, estimate in nodes if above == parent)
            nodes.append((parent, token, round(choose.uniform(0.05, 0.95) * (1 - siblings), 6)))
        proposal = candidates(*nodes)
        planner = Planner(curve(w1=10.0, w4=choose.uniform(10, 20), w8=choose.uniform(20, 40)))
        tree = chosen(planner, proposal)
        best = max(_rate(planner, proposal, kept) for kept in _closed_subsets(proposal))
        assert _rate(planner, proposal, set(tree.token_ids)) == pytest.approx(best)


def test_the_sequences_of_a_step_share_its_width() -> None:
    """Beside 7 others in a compute-bound step, a node must raise the rate of all 8 together, not that of one alone."""
    planner = Planner(curve(w1=10.0, w8=10.0, w16=20.0))
    proposal = candidates((ROOT, 1, 0.9), (0, 2, 0.9), (1, 3, 0.3))
    beside = replace(ROOMY, rows_beside=7, tokens_beside=7.0)
    assert len(chosen(planner, proposal)) == 3
    assert len(chosen(planner, proposal, limits=beside)) == 0
    assert len(chosen(planner, proposal, limits=replace(beside, tokens_beside=1.0))) == 2
    assert len(chosen(planner, proposal, limits=replace(beside, rows_beside=3, tokens_beside=3.0))) == 3


def _closed_subsets(proposal: Candidates) -> list[set[int]]:
    """All sets of nodes that contain every member's parent."""
    subsets = itertools.chain.from_iterable(itertools.combinations(range(len(proposal)), k) for k in range(7))
    return [set(s) for s in subsets if all(proposal.parents[i] in {ROOT, *s} for i in s)]


def _rate(planner: Planner, proposal: Candidates, kept: set[int]) -> float:
    """Expected tokens per millisecond of verifying exactly these nodes (node i carries token i)."""
    expected = 1.0
    for node in kept:
        probability, at = 1.0, node
        while at != ROOT:
            probability *= proposal.estimates[at]
            at = proposal.parents[at]
        expected += probability
    return expected / planner.cost.milliseconds(len(kept) + 1)


def test_proposals_of_several_drafters_become_one_tree() -> None:
    """A shared prefix is one node; both drafters are named, the more confident one first."""
    tree = chosen(
        Planner(curve(w1=10.0, w32=10.0)),
        candidates((ROOT, 1, 0.4), (0, 2, 0.5), source="prompt"),
        candidates((ROOT, 1, 0.6), (0, 3, 0.5), source="recall"),
    )
    assert sorted(tree.token_ids) == [1, 2, 3]
    assert tree.sources[tree.token_ids.index(1)] == ("recall", "prompt")


def test_outcomes_teach_the_planner_which_drafter_to_believe() -> None:
    """A drafter that claims much and is always wrong is no longer verified where width costs."""
    planner = Planner(curve(w1=10.0, w2=12.0, w32=40.0))
    liar = candidates((ROOT, 1, 0.95), source="liar")
    assert len(chosen(planner, liar, limits=replace(ROOMY, trust=roomy()))) == 1
    for _ in range(60):  # each in a request of its own, which knows nothing of the others
        plan = planner.plan([liar], {}, replace(ROOMY, trust=roomy()))
        tree = plan.builder.build()
        planner.observe_forward(len(tree) + 1, 12.0 if len(tree) else 10.0)
        planner.observe(plan, tree, ())
    assert len(chosen(planner, liar, limits=replace(ROOMY, trust=roomy()))) == 0


def test_a_draft_model_that_does_not_pay_costs_hardly_anything() -> None:
    """Samples that cost as much as a step and are never accepted take at most a hundredth of the time after a few."""
    planner, spent = Planner(curve(w1=10.0, w32=11.0)), 0.0
    for step in range(5000):
        plan = planner.plan([], {"draft-model": DrawSource(0)}, ROOMY)
        number = plan.draws.get("draft-model", 0)
        if number:
            plan.builder.add_fixed(ROOT, 7, "draft-model")
            planner.observe_draws("draft-model", number, 0, 10.0 * number)
            spent += 10.0 * number if step >= PROBE_STEPS else 0.0
        planner.observe_forward(len(plan.builder) + 1, 10.0)
        planner.observe(plan, plan.builder.build(), ())
    assert PROBE_DRAWS * 10.0 < spent <= 0.011 * 5000 * 10.0


def test_catching_up_counts_before_anything_is_sampled() -> None:
    """A draft model that pays when it is in step is not asked when a long prompt would have to be computed first."""
    planner = Planner(curve(w1=10.0, w32=11.0))
    for _ in range(20):
        plan = planner.plan([], {"draft-model": DrawSource(0)}, ROOMY)
        node = plan.builder.add_fixed(ROOT, 1, "draft-model")
        planner.observe_draws("draft-model", 1, 0, 2.0)
        planner.observe_forward(len(plan.builder) + 1, 10.0)
        planner.observe(plan, plan.builder.build(), (node,))
    planner.observe_draws("draft-model", 1, 1000, 1002.0)
    assert planner.plan([], {"draft-model": DrawSource(5000)}, ROOMY).draws  # once may be a compilation
    planner.observe_draws("draft-model", 1, 1000, 1002.0)
    assert planner.plan([], {"draft-model": DrawSource(3)}, ROOMY).draws
    assert not planner.plan([], {"draft-model": DrawSource(5000)}, ROOMY).draws


def test_a_drafter_comes_back_when_it_begins_to_pay() -> None:
    """The gate re-opens: a probe that succeeds is followed by more."""
    planner = Planner(curve(w1=10.0, w32=10.5))
    for _ in range(300):
        _one_step(planner, accepted=False)
    counts = [_one_step(planner, accepted=True) for _ in range(4000)]
    assert sum(counts[-100:]) > 100


def _one_step(planner: Planner, *, accepted: bool, sampled: bool = False) -> int:
    """One step in which all proposals of a cheap draft model are accepted, or none; returns how many were made."""
    plan = planner.plan([], {"draft-model": DrawSource(0)}, ROOMY)
    number, node, path = plan.draws.get("draft-model", 0), ROOT, []
    for token in range(number):
        distribution = Sampled(torch.full((32,), 1 / 32))
        node = (
            plan.builder.add_sampled(node, token, distribution, "draft-model")
            if sampled
            else plan.builder.add_fixed(node, token, "draft-model")
        )
        path.append(node)
    if number:
        planner.observe_draws("draft-model", number, 0, 0.5 * number)
    planner.observe_forward(len(plan.builder) + 1, 10.0)
    planner.observe(plan, plan.builder.build(), path if accepted else ())
    return number


def test_outcomes_of_one_tenant_move_no_estimate_of_another() -> None:
    planner = Planner(CostCurve())
    proposal = candidates((ROOT, 5, 0.5))

    def estimate(tenant: str) -> float:
        return float(planner.plan([proposal], {}, replace(ROOMY, tenant=tenant)).estimates[0])

    for _ in range(50):
        plan = planner.plan([proposal], {}, replace(ROOMY, tenant="shop"))
        planner.observe(plan, plan.builder.build(), (0,))
    assert estimate("shop") > 0.9
    assert estimate("other shop") == 0.5


def test_only_the_calibrations_of_the_most_recent_tenants_are_held() -> None:
    held = Calibrations()
    for tenant in ("old", "recent"):
        held.of(tenant).observe("recall", 3, True)
    for number in range(MOST_TENANTS - 1):
        held.of("recent")
        held.of(str(number))
    assert held.of("recent").seen.sum() == 1.0
    assert held.of("old").seen.sum() == 0.0
