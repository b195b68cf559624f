"""Verification on a GPU with a single read: computes every number that a walk may need before the host waits.

Counter-based random numbers are known in advance, so the token that would follow each node, if the walk ended there,
is computed as well. Sequences with the same warping (temperature, top-k, top-p, min-p) are batched, and each step reads
the numbers of all sequences at once.
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
"""The rejection modes, and whether each one's tests are lazy."""

GREEDY, COUPLED = "greedy", "coupled"

MODES = (*LAZY, GREEDY, COUPLED)
"""Modes whose verdicts can be computed in advance."""

MOST_AT_ONCE = 1 << 24
"""Most probabilities computed in one batch: about 0.4 GB together with their cumulative sums in float64."""

COPIES = 4
"""Extra rows per sampled candidate: its distribution, and its node's residual before, during and after the test."""


@dataclass(slots=True, eq=False)
class Scored:
    """A scored tree in one of `MODES`; its rows are on a device, with the constraints applied.

    `Ahead` sets `decide`, which returns the verdict without another read.
    """

    tree: CandidateTree
    rows: TargetRows
    rng: KeyedRng
    mode: str
    decide: Callable[[], Verdict] | None = None

    @property
    def num_numbers(self) -> int:
        """How many numbers it takes: its rows, and `COPIES` more for every sampled candidate."""
        num_sampled = sum(isinstance(each.distribution, Sampled) for each in self.tree.candidates)
        return (len(self.rows) + COPIES * num_sampled) * self.rows.all_logits().shape[-1]

    def verdict(self) -> Verdict:
        """The verdict, once the numbers have been read. Raises GenerationError if a visited row holds NaN."""
        assert self.decide is not None, "the numbers have not been read"
        return self.decide()


def computed_alike(scored: Sequence[Scored], *, most_at_once: int = MOST_AT_ONCE) -> Iterator[list[Scored]]:
    """Group the trees whose rows become probabilities in the same way, at most `most_at_once` numbers per group."""
    groups: dict[object, list[Scored]] = {}
    for each in scored:
        kind = None if each.mode == GREEDY else (each.rows.warping, each.mode == COUPLED)
        groups.setdefault(kind, []).append(each)
    for group in groups.values():
        together, numbers = list[Scored](), 0
        for each in group:
            numbers += each.num_numbers
            if together and numbers > most_at_once:
                yield together
                together, numbers = [], each.num_numbers
            together.append(each)
        yield together


class KnownWeights(Weights):
    """The weights and next tokens of one tree, as numbers on the host."""

    def __init__(self, tree: CandidateTree, check: Callable[[int], None], *, lazy: bool) -> None:
        super().__init__(tree, lazy=lazy)
        self._check = check
        self._acceptance: dict[tuple[int, int], float] = {}
        self._remaining: Sequence[float] = ()
        self._tokens: Sequence[int] = ()

    def take(self, acceptance: dict[tuple[int, int], float], remaining: Sequence[float], tokens: Sequence[int]) -> None:
        """Store the w of each test by (node, ordinal), the a of the root and every node, and the token after each."""
        self._acceptance, self._remaining, self._tokens = acceptance, remaining, tokens

    def tests(self, node: int) -> tuple[Candidate, ...]:
        """The candidates tested below `node`. Raises GenerationError if its row cannot be sampled from."""
        self._check(node)  # here: a row that the walk never reaches may hold anything
        return super().tests(node)

    def acceptance(self, node: int, ordinal: int) -> float:
        """Probability w that this test below `node` accepts, given that all earlier ones rejected."""
        return self._acceptance[node, ordinal]

    def remaining(self, node: int) -> float:
        """The acceptance weight a of `node` after all tests below it have rejected."""
        return self._remaining[node + 1]

    def next_token(self, node: int, rng: Rng) -> int:
        """The token that `rng` chooses after `node`, sampled on the device."""
        self._check(node)
        return self._tokens[node + 1]


class Ahead:
    """Computes all numbers that the walks through one group of `computed_alike` may need.

    The verdicts are the same as without it, given the same random numbers.
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
        """What the host is going to read, on the device, in float64, which holds every token id exactly."""

    def _weighed(self, probs: Tensor) -> Tensor:
        """Compute all weights; returns the token to add after each row if the walk ends there, `[rows]`."""
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
        """Give each sequence its share of `numbers`, which are now on the host."""
        count = sum(part.numel() for part in self._parts)
        by_row = np.reshape(numbers[count:], (self._by_row, -1))
        for i, (each, (first, end)) in enumerate(zip(self._scored, pairwise(self._first_rows()), strict=True)):
            values, ids, *tokens = by_row[:, first:end].tolist()
            each.rows.take_largest(list(zip(values, map(int, ids), strict=True)))
            each.decide = self._decision(i, [int(token) for token in tokens[0]] if tokens else [], numbers[:count])

    def _decision(self, i: int, tokens: list[int], numbers: Sequence[float]) -> Callable[[], Verdict]:
        # closes over the fields, not over `Scored`, which keeps the closure: a cycle would outlive its step
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
    """Read all numbers in one copy: the only time that a step waits for the device."""
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
