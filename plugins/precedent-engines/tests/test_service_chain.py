"""The chain follows the likeliest token at each place, as far as it pays: against every path of random tries."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from precedent.drafters.base import Candidates
from precedent.planning.calibration import Trust
from precedent.planning.costs import CostCurve
from precedent.planning.gate import Allowance
from precedent.planning.planner import Limits, Plan, Planner
from precedent.tree import ROOT

LIMITS = Limits(8, 0, 40, frozenset(), trust=Trust(Allowance(1e6, 1e6)), one_path=True)
FREE = CostCurve.through({1: 10.0, 65: 10.0})
NOT_FREE = CostCurve.through({1: 10.0, 2: 12.5, 4: 13.0, 8: 30.0})
Path = tuple[int, ...]


def random_tries(choose: random.Random, number: int) -> list[Candidates]:
    """The proposals of one to three drafters, whose tries share tokens and overlap."""
    return [
        Candidates.of(f"drafter {source}", _random_trie(choose, choose.randint(1, 7)))
        for source in range(choose.randint(1, number))
    ]


def _random_trie(choose: random.Random, size: int) -> list[tuple[int, int, float, int]]:
    nodes: list[tuple[int, int, float, int]] = []
    while len(nodes) < size:
        parent, token = choose.choice([ROOT, *range(len(nodes))]), choose.randint(1, 4)
        if all((above, other) != (parent, token) for other, above, _, _ in nodes):
            nodes.append((token, parent, choose.uniform(0.05, 0.99), choose.randint(0, 50)))
    return nodes


def products(proposals: list[Candidates]) -> dict[Path, float]:
    """Every path that some drafter proposed, with its probability: computed from scratch, path by path.

    A token that several propose has the best estimate of theirs; siblings that claim more than 1 share it.
    """
    best: dict[Path, float] = {}
    for proposal in proposals:
        paths: list[Path] = []
        for token, parent, estimate in zip(proposal.token_ids, proposal.parents, proposal.estimates, strict=True):
            paths.append((*(() if parent == ROOT else paths[parent]), token))
            best[paths[-1]] = max(best.get(paths[-1], 0.0), estimate)
    claimed = {path: sum(best[other] for other in best if other[:-1] == path[:-1]) for path in best}
    shared = {path: best[path] / max(1.0, claimed[path]) for path in best}
    found: dict[Path, float] = {}
    for path in sorted(shared, key=len):
        found[path] = shared[path] * found.get(path[:-1], 1.0)
    return found


def gain(path: Path, of: dict[Path, float]) -> float:
    """The sum of the probabilities of a path's prefixes."""
    return sum(of[path[:length]] for length in range(1, len(path) + 1))


def likeliest(of: dict[Path, float]) -> list[Path]:
    """The beginnings of the path that goes on with the likeliest token at each place."""
    found: list[Path] = [()]
    while below := [path for path in of if path[:-1] == found[-1]]:
        found.append(max(below, key=of.__getitem__))
    return found


def chain(plan: Plan) -> Path:
    """The planned path, checked to be one."""
    if plan.choice is None:
        return ()
    assert plan.choice.parents.tolist() == list(range(-1, plan.choice.token_ids.size - 1))
    return tuple(plan.choice.token_ids.tolist())


@pytest.mark.parametrize("seed", range(40))
def test_where_width_is_free_the_chain_follows_the_likeliest_tokens_to_the_end(seed: int) -> None:
    proposals = random_tries(random.Random(seed), 3)
    assert chain(Planner(FREE).plan_fixed(proposals, LIMITS)) == likeliest(products(proposals))[-1]


@pytest.mark.parametrize("seed", range(40))
def test_where_width_costs_the_chain_is_cut_where_the_rate_is_best(seed: int) -> None:
    """No other length of this path has more tokens per millisecond."""
    choose = random.Random(1000 + seed)
    proposals, tokens = random_tries(choose, 3), choose.choice([0.0, 2.0])
    limits = replace(
        LIMITS, rows_beside=choose.choice([0, 3]), tokens_beside=tokens, max_nodes=choose.choice([1, 2, 8])
    )
    planner, known = Planner(NOT_FREE), products(proposals)
    plan = planner.plan_fixed(proposals, limits)
    found = chain(plan)

    def rate(path: Path) -> float:
        width = limits.rows_beside + 1 + len(path)
        return (1.0 + tokens + gain(path, known)) / NOT_FREE.milliseconds(width)

    allowed = [path for path in likeliest(known) if len(path) <= limits.max_nodes]
    assert found in allowed
    assert rate(found) == pytest.approx(max(map(rate, allowed)))
    assert plan.expected_tokens == pytest.approx(1.0 + gain(found, known))


def test_a_chain_ends_with_an_end_token_and_at_the_limits() -> None:
    proposal = Candidates.of("memory", [(1, ROOT, 0.9, 1), (2, 0, 0.9, 2), (3, 1, 0.9, 3)])
    planner = Planner(FREE)
    assert chain(planner.plan_fixed([proposal], LIMITS)) == (1, 2, 3)
    assert chain(planner.plan_fixed([proposal], replace(LIMITS, end_token_ids=frozenset({2})))) == (1, 2)
    assert chain(planner.plan_fixed([proposal], replace(LIMITS, max_depth=1))) == (1,)
    assert chain(planner.plan_fixed([proposal], replace(LIMITS, max_nodes=2))) == (1, 2)
    assert chain(planner.plan_fixed([proposal], replace(LIMITS, max_nodes=0))) == ()
