"""Verification on a GPU with one read: every number that a walk may ask for is on its way before the host waits.

So is the token that would follow every node, were the walk to end there: counter-based random numbers are known
beforehand. Sequences whose rows become probabilities in the same way are computed together, in as many operations as
one of them would take, and a step reads the numbers of all of them at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from precedent.runtime.placing import placed
from precedent.sampling.coupling import chosen
from precedent.sampling.rng import KeyedRng, Rng, categorical_rows
from precedent.sampling.target_rows import TargetRows
from precedent.tree import ROOT, Candidate, CandidateTree, Sampled
from precedent.verify.exact_match import exact_match
from precedent.verify.stages import Scheduled, in_stages, schedule, weigh
from precedent.verify.verdict import Verdict
from precedent.verify.walk import walk
from precedent.verify.weights import NEXT, Weights

LAZY = {"traversal": True, "topdown": False}
"""Rejection modes, and whether their tests are lazy."""

GREEDY, COUPLED = "greedy", "coupled"

MODES = (*LAZY, GREEDY, COUPLED)
"""Modes whose verdicts can be computed ahead."""

MOST_AT_ONCE = 1 << 24
"""Probabilities that are computed together, at most: with their cumulative sums in float64 about 0.4 GB."""

COPIES = 4
"""Rows that a sample takes while it is tested: its distribution, and what was there, is covered and is left."""


@dataclass(slots=True, eq=False)
class Scored:
    """A scored tree in one of `MODES`, its rows on a device with their constraints applied.

    `decide` is set by `Ahead` and gives the verdict without another read.
    """

    tree: CandidateTree
    rows: TargetRows
    rng: KeyedRng
    mode: str
    decide: Callable[[], Verdict] | None = None

    @property
    def num_numbers(self) -> int:
        """How many numbers are computed of it: its rows, and copies of them for every sampled candidate."""
        num_sampled = sum(isinstance(each.distribution, Sampled) for each in self.tree.candidates)
        return (len(self.rows) + COPIES * num_sampled) * self.rows.all_logits().shape[-1]

    def verdict(self) -> Verdict:
        """The verdict, once all numbers were read. Raises GenerationError for a row on the way that holds NaN."""
        assert self.decide is not None, "its numbers were not read"
        return self.decide()


def computed_alike(scored: Sequence[Scored]) -> Iterator[list[Scored]]:
    """Groups whose rows become probabilities in the same way, at most `MOST_AT_ONCE` numbers each."""
    groups: dict[object, list[Scored]] = {}
    for each in scored:
        kind = None if each.mode == GREEDY else (each.rows.warping, each.mode == COUPLED)
        groups.setdefault(kind, []).append(each)
    for group in groups.values():
        together, numbers = list[Scored](), 0
        for each in group:
            numbers += each.num_numbers
            if together and numbers > MOST_AT_ONCE:
                yield together
                together, numbers = [], each.num_numbers
            together.append(each)
        yield together


class KnownWeights(Weights):
    """Weights and next tokens of one tree that are numbers on the host."""

    def __init__(self, tree: CandidateTree, check: Callable[[int], None], *, lazy: bool) -> None:
        super().__init__(tree, lazy=lazy)
        self._check = check
        self._acceptance: dict[tuple[int, int], float] = {}
        self._remaining: Sequence[float] = ()
        self._tokens: Sequence[int] = ()

    def take(self, acceptance: dict[tuple[int, int], float], remaining: Sequence[float], tokens: Sequence[int]) -> None:
        """The w of each test by (node, ordinal), the a after the root and every node, and the token after every row."""
        self._acceptance, self._remaining, self._tokens = acceptance, remaining, tokens

    def tests(self, node: int) -> tuple[Candidate, ...]:
        """The candidates tested below `node`. Raises GenerationError where its row cannot be sampled."""
        if node < self.tree.num_scored:  # a row that the walk never reaches may hold anything
            self._check(node)
        return super().tests(node)

    def acceptance(self, node: int, ordinal: int) -> float:
        """Probability w that a test below `node` accepts, once all earlier ones rejected."""
        return self._acceptance[node, ordinal]

    def remaining(self, node: int) -> float:
        """The acceptance weight a of `node` once all tests below it rejected."""
        return self._remaining[node + 1]

    def next_token(self, node: int, rng: Rng) -> int:
        """The token that `rng` chooses after `node`, found on the device."""
        self._check(node)
        return self._tokens[node + 1]


class Ahead:
    """All that the walks through some trees, which are `computed_alike`, may ask for.

    The verdicts are those of the same random numbers without it.
    """

    def __init__(self, scored: Sequence[Scored]) -> None:
        self._scored, self._parts = scored, list[Tensor]()
        self._weights: list[KnownWeights] = []
        self._tests: list[tuple[Scheduled, int]] = []
        logits = _joined([each.rows.all_logits() for each in scored])
        largest, mode = logits.max(-1), scored[0].mode
        if mode == COUPLED:
            keys = [key for each in scored for key in each.rows.noise_keys()]
            tokens = [chosen(scored[0].rows.probs_of(logits), keys)]
        else:
            tokens = [] if mode == GREEDY else [self._weighed(scored[0].rows.probs_of(logits))]
        self._by_row = len(largest) + len(tokens)
        self.numbers = torch.cat([part.double() for part in (*self._parts, *largest, *tokens)])
        """What the host will ask for, on its device, in float64, which holds every token id exactly."""

    def _weighed(self, probs: Tensor) -> Tensor:
        """Compute all weights; returns the token after every row, were the walk to end there, `[rows]`."""
        self._weights = [KnownWeights(each.tree, each.rows.check, lazy=LAZY[each.mode]) for each in self._scored]
        rows, slots = self._first_rows(), self._first_slots()
        numbered = zip(self._weights, rows, slots, strict=False)
        found = {test: i for i, its in enumerate(numbered) for test in schedule(*its)}
        tests = in_stages(list(found))
        self._tests = [(test, found[test]) for test in tests]
        self._parts = [*weigh(tests, probs, slots[-1])]
        uniforms = [each.rng.uniforms(range(ROOT, len(each.rows) - 1), NEXT) for each in self._scored]
        return categorical_rows(probs, placed(np.concatenate(uniforms), probs.device))

    def _first_rows(self) -> list[int]:
        return list(accumulate((len(each.rows) for each in self._scored), initial=0))

    def _first_slots(self) -> list[int]:
        return list(accumulate((len(each.tree) + 1 for each in self._scored), initial=0))

    def take(self, numbers: Sequence[float]) -> None:
        """Give each sequence its share of `numbers`, which are on the host now."""
        count = sum(part.numel() for part in self._parts)
        by_row = np.reshape(numbers[count:], (self._by_row, -1))
        for i, (each, (first, end)) in enumerate(zip(self._scored, pairwise(self._first_rows()), strict=True)):
            values, ids, *tokens = by_row[:, first:end].tolist()
            each.rows.take_largest(list(zip(values, map(int, ids), strict=True)))
            each.decide = self._decision(i, [int(token) for token in tokens[0]] if tokens else [], numbers[:count])

    def _decision(self, i: int, tokens: list[int], numbers: Sequence[float]) -> Callable[[], Verdict]:
        # without `Scored`, which keeps what this returns: in a circle they would outlive their step
        tree, rows, rng, mode = self._scored[i].tree, self._scored[i].rows, self._scored[i].rng, self._scored[i].mode
        if mode == GREEDY:
            return lambda: exact_match(tree, rows.argmax)
        if mode == COUPLED:
            return lambda: exact_match(tree, _checked(tokens, rows.check))
        weights, slots = self._weights[i], self._first_slots()
        acceptance = {(t.node, t.ordinal): w for (t, of), w in zip(self._tests, numbers, strict=False) if of == i}
        remaining = numbers[len(self._tests) :][slots[i] : slots[i + 1]]
        weights.take(acceptance, remaining, tokens)
        return lambda: walk(weights, rng)


def _checked(tokens: Sequence[int], check: Callable[[int], None]) -> Callable[[int], int]:
    def token_after(node: int) -> int:
        check(node)
        return tokens[node + 1]

    return token_after


def read_together(pending: Sequence[Ahead]) -> None:
    """Read the numbers of all in one copy: the one time that a step waits for the device."""
    if not pending:
        return
    numbers: list[float] = _joined([each.numbers for each in pending]).tolist()
    start = 0
    for each in pending:
        end = start + each.numbers.numel()
        each.take(numbers[start:end])
        start = end


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
