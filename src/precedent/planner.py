"""Which candidates are worth verifying: the shape of the tree, decided before anything is drawn.

Every candidate gets one calibrated probability of being accepted along its whole path; the tree takes them in that
order for as long as the expected tokens per millisecond grow, by the cost curve measured on this machine. Zero nodes
is a legal answer: plain decoding. A draft model costs sequential steps, so its draws compete in the same currency.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from precedent.calibration import Calibration
from precedent.cost_curve import CostCurve
from precedent.drafters.base import Candidates
from precedent.draw_gate import DrawGate
from precedent.tree import ROOT, CandidateTree, TreeBuilder

MARGIN = 1.02
"""By how much draws must seem to pay before they are made: estimates err, and the steps they cost do not."""

DRAFT_PRIOR = 0.6
"""Acceptance assumed of a draft model that has never been asked."""

Key = tuple[Hashable, ...]


@dataclass(frozen=True, slots=True)
class Limits:
    """What one sequence allows in this step: nodes, draws, tokens until its end, and the tokens that end it.

    `rows_beside` and `tokens_beside` are the rows of the other sequences of the step and the tokens expected of them:
    a node pays when it raises the rate of all of them together, for all of them wait for it.
    """

    max_nodes: int
    max_draws: int
    max_depth: int
    end_token_ids: frozenset[int]
    rows_beside: int = 0
    tokens_beside: float = 0.0


@dataclass(slots=True)
class Plan:
    """Points already in the builder, draws still to be made, why each node was chosen, and the tokens expected."""

    builder: TreeBuilder = field(default_factory=TreeBuilder)
    draws: dict[str, int] = field(default_factory=dict)
    evidence: dict[int, list[Key]] = field(default_factory=dict)
    expected_tokens: float = 1.0


@dataclass(slots=True)
class _Pooled:
    """One merged candidate: its place, and every source's key and calibrated estimate."""

    parent: int
    token_id: int
    depth: int
    support: list[tuple[float, str, Key]] = field(default_factory=list)
    path_probability: float = 0.0


class Planner:
    """Engine-wide: what was learned from one request serves the next."""

    def __init__(self, cost: CostCurve) -> None:
        self.cost = cost
        self.calibration = Calibration()
        self._gates: dict[str, DrawGate] = {}

    def plan(self, candidates: Sequence[Candidates], behind: Mapping[str, int], limits: Limits) -> Plan:
        """The points of the tree, and how many draws to make of each source that is `behind` by so many tokens."""
        pool = self._merge(candidates, limits)
        ranked = sorted(range(len(pool)), key=lambda i: (-pool[i].path_probability, i))[: limits.max_nodes]
        num_points, draws = self._best_shape([pool[i] for i in ranked], behind, limits)
        expected = 1.0 + sum(pool[i].path_probability for i in ranked[:num_points])
        plan = Plan(draws=draws, expected_tokens=expected)
        self._add_points(plan, pool, ranked[:num_points])
        return plan

    def _merge(self, candidates: Sequence[Candidates], limits: Limits) -> list[_Pooled]:
        """All drafters' tries as one, with calibrated path probabilities."""
        pool: list[_Pooled] = []
        index: dict[tuple[int, int], int] = {}
        for proposal in candidates:
            self._merge_one(proposal, pool, index, limits)
        self._set_path_probabilities(pool)
        return pool

    def _merge_one(
        self, proposal: Candidates, pool: list[_Pooled], index: dict[tuple[int, int], int], limits: Limits
    ) -> None:
        place: list[int | None] = []
        for token, parent, estimate, feature in zip(
            proposal.token_ids, proposal.parents, proposal.estimates, proposal.features, strict=True
        ):
            above = ROOT if parent == ROOT else place[parent]
            place.append(None if above is None else _find_or_add(pool, index, above, token, limits))
            at = place[-1]
            if at is not None:
                key: Key = (proposal.source, *feature)
                pool[at].support.append((self.calibration.probability(key, estimate), proposal.source, key))

    @staticmethod
    def _set_path_probabilities(pool: list[_Pooled]) -> None:
        """P(path) = product of the best estimates, siblings scaled down where together they exceed certainty."""
        best = [max(node.support)[0] for node in pool]
        total: dict[int, float] = {}
        for node, probability in zip(pool, best, strict=True):
            total[node.parent] = total.get(node.parent, 0.0) + probability
        for node, probability in zip(pool, best, strict=True):
            above = 1.0 if node.parent == ROOT else pool[node.parent].path_probability
            node.path_probability = above * probability / max(1.0, total[node.parent])

    def _best_shape(
        self, ranked: Sequence[_Pooled], behind: Mapping[str, int], limits: Limits
    ) -> tuple[int, dict[str, int]]:
        """How many of the ranked points, and how many draws, give the most tokens per millisecond."""
        width, expected, at_root, best_points = limits.rows_beside + 1, limits.tokens_beside + 1.0, 0.0, 0
        best_rate = expected / self.cost.milliseconds(width)
        best_expected, best_root = expected, at_root
        for count, node in enumerate(ranked, start=1):
            expected += node.path_probability
            at_root += node.path_probability if node.parent == ROOT else 0.0
            rate = expected / self.cost.milliseconds(width + count)
            if rate > best_rate:
                best_rate, best_points, best_expected, best_root = rate, count, expected, at_root
        draws = {}
        for source, missed in behind.items():
            gate = self._gates.setdefault(source, DrawGate())
            gate.behind = missed
            open_mass = 1.0 - min(best_root, 1.0)
            number = self._num_draws(source, gate, best_points, best_expected, open_mass, limits)
            if number:
                draws[source] = number
        return best_points, draws

    def _num_draws(
        self, source: str, gate: DrawGate, points: int, expected: float, open_mass: float, limits: Limits
    ) -> int:
        """Draws that pay for their sequential steps and for catching up, or those of a trial."""
        most, width = min(limits.max_draws, limits.max_depth), limits.rows_beside + points + 1
        best, best_rate, reach = 0, MARGIN * expected / self.cost.milliseconds(width), open_mass
        for number in range(1, most + 1):
            reach *= self.calibration.probability((source, min(number, 6)), DRAFT_PRIOR)
            expected += reach
            rate = expected / (self.cost.milliseconds(width + number) + gate.milliseconds(number))
            if rate > best_rate:
                best, best_rate = number, rate
        return min(gate.decide(best), most)

    @staticmethod
    def _add_points(plan: Plan, pool: Sequence[_Pooled], chosen: Sequence[int]) -> None:
        """Put the chosen points into the builder, parents first, the source with the best estimate first."""
        place = {ROOT: ROOT}
        for i in sorted(chosen):
            node = pool[i]
            for _, source, _ in sorted(node.support, reverse=True):
                place[i] = plan.builder.add_point(place[node.parent], node.token_id, source)
            plan.evidence[place[i]] = [key for _, _, key in node.support]

    def observe_draws(self, source: str, num_draws: int, behind: int, milliseconds: float) -> None:
        """Learn what draws of `source` cost, `behind` tokens of catching up included."""
        self._gates.setdefault(source, DrawGate()).observe(num_draws, behind, milliseconds)

    def observe_forward(self, width: int, milliseconds: float) -> None:
        """Learn from one forward over `width` tokens, all sequences of the step together."""
        self.cost.observe(width, milliseconds)
        for gate in self._gates.values():
            gate.elapsed += milliseconds

    def observe(self, plan: Plan, tree: CandidateTree, path: Sequence[int]) -> None:
        """Learn from a verdict: the outcome of every child of an accepted node is known."""
        accepted = {ROOT, *path}
        for node in range(len(tree)):
            if tree.parents[node] in accepted:
                for key in self._keys(plan, tree, node):
                    self.calibration.observe(key, node in accepted)

    @staticmethod
    def _keys(plan: Plan, tree: CandidateTree, node: int) -> list[Key]:
        drawn: list[Key] = [
            (source, min(int(tree.depths[node]), 6)) for source in tree.sources[node] if source in plan.draws
        ]
        return plan.evidence.get(node, []) + drawn


def _find_or_add(
    pool: list[_Pooled], index: dict[tuple[int, int], int], above: int, token: int, limits: Limits
) -> int | None:
    """The pooled node of `token` below `above`; None when it would hang below an end token or too deep."""
    found = index.get((above, token))
    if found is not None:
        return found
    depth = 1 if above == ROOT else pool[above].depth + 1
    if depth > limits.max_depth or (above != ROOT and pool[above].token_id in limits.end_token_ids):
        return None
    index[above, token] = len(pool)
    pool.append(_Pooled(above, token, depth))
    return len(pool) - 1
