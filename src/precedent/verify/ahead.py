"""Verification on a GPU with one read: every number that a walk may ask for is on its way before the host waits.

Also the token that would be drawn at every node, were the walk to end there: coins that are uniform numbers by (node,
purpose) are known beforehand. Sequences whose rows become laws alike are computed together, in as many operations as
one of them would take, and a step reads the numbers of all of them at once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from precedent.runtime.placing import placed
from precedent.sampling.coupling import chosen
from precedent.sampling.probabilities import Coins, KnownCoins, categorical_rows
from precedent.tree import ROOT, CandidateTree, Drawn
from precedent.verify.batched import BatchedWeights
from precedent.verify.matching import matching
from precedent.verify.verdict import Verdict
from precedent.verify.walk import NEXT, walk
from precedent.verify.weighing import Weighing

LAZY = {"traversal": True, "topdown": False}
"""Modes that can be weighed ahead, and whether their coins are lazy."""

GREEDY, COUPLED = "greedy", "coupled"

MOST_AT_ONCE = 1 << 24
"""Probabilities that are computed together, at most: with their cumulative sums in float64 about 0.4 GB."""

COPIES = 4
"""Rows that a draw takes while it is weighed: its law, and what was there, is honoured and is left."""


class Unread(Protocol):
    """Numbers on a device that the host will ask for."""

    def unread(self) -> Tensor:
        """All of them, `[count]` in float64, which holds every token id exactly; nothing is waited for."""

    def take(self, numbers: Sequence[float]) -> None:
        """The same numbers on the host."""


class RowsAhead(Protocol):
    """A tree's rows, to be computed and read together with those of others (`TargetRows`)."""

    @property
    def law(self) -> Hashable:
        """What makes a law of a row: rows of two sequences with the same can be computed together."""

    @property
    def vocab_size(self) -> int:
        """Numbers in a row."""

    def logits_of_all(self) -> Tensor:
        """The constrained logits, `[num_nodes + 1, vocab_size]`."""

    def law_of(self, logits: Tensor, /) -> Tensor:
        """Probabilities of any logits `[..., vocab_size]`, made as these rows' are."""

    def noise_keys(self) -> list[int]:
        """The key of the seed's noise after the root and after every node."""

    def take(self, numbers: Sequence[float], /) -> None:
        """The largest logit of every row, then their ids."""

    def check(self, node: int, /) -> None:
        """Raise GenerationError if the row after `node` cannot be sampled."""

    def argmax(self, node: int, /) -> int:
        """The greedy token after `node`."""


@dataclass(slots=True, eq=False)
class Scored:
    """A scored tree in one of the modes above; `VerdictsAhead` brings what its verdict needs."""

    tree: CandidateTree
    rows: RowsAhead
    coins: KnownCoins
    mode: str
    decide: Callable[[Coins], Verdict] | None = None

    @property
    def size(self) -> int:
        """How many rows it has."""
        return len(self.tree) + 1

    @property
    def num_draws(self) -> int:
        """How many draws of a draft model it has."""
        return sum(isinstance(draw.law, Drawn) for draw in self.tree.draws)

    @property
    def numbers(self) -> int:
        """How many numbers are computed of it: rows, and for every draw its law and what its rejection leaves."""
        return (self.size + COPIES * self.num_draws) * self.rows.vocab_size

    def verdict(self) -> Verdict:
        """Throw the coins, once all numbers were read. Raises GenerationError for a row on the way without a law."""
        assert self.decide is not None, "its numbers were not read"
        return self.decide(self.coins)


def computed_alike(scored: Sequence[Scored]) -> Iterator[list[Scored]]:
    """Those whose rows become laws in the same way, at most `MOST_AT_ONCE` numbers together."""
    groups: dict[object, list[Scored]] = {}
    for each in scored:
        kind = None if each.mode == GREEDY else (each.rows.law, each.mode == COUPLED)
        groups.setdefault(kind, []).append(each)
    for group in groups.values():
        together, numbers = list[Scored](), 0
        for each in group:
            numbers += each.numbers
            if together and numbers > MOST_AT_ONCE:
                yield together
                together, numbers = [], each.numbers
            together.append(each)
        yield together


class VerdictsAhead:
    """All that the walks through some trees, which are `computed_alike`, may ask for.

    The verdicts are those of the same coins without it. A tree of points alone is verified by drawing the token after
    every node and going where it leads; the draws of all others are weighed together.
    """

    def __init__(self, scored: Sequence[Scored]) -> None:
        self._scored = scored
        self._weighing: Weighing | None = None
        logits = _joined([each.rows.logits_of_all() for each in scored])
        self._by_row = [*logits.max(-1)]
        self._weights: dict[Scored, BatchedWeights] = {}
        if scored[0].mode != GREEDY:
            probs = scored[0].rows.law_of(logits)
            self._by_row.append(self._chosen(probs) if scored[0].mode == COUPLED else self._drawn(probs))
        weights = list[Tensor]() if self._weighing is None else [self._weighing.unread()]
        self._unread = torch.cat([*weights, *(numbers.double() for numbers in self._by_row)])

    def _chosen(self, probs: Tensor) -> Tensor:
        """The token that its seed's noise chooses after every row, `[rows]`."""
        return chosen(probs, [key for each in self._scored for key in each.rows.noise_keys()])

    def _drawn(self, probs: Tensor) -> Tensor:
        """The token after every row if its walk ended there, `[rows]`; `probs` become what is left of them by then."""
        uniforms = [each.coins.uniforms(range(ROOT, len(each.tree)), NEXT) for each in self._scored]
        first_rows = accumulate((each.size for each in self._scored), initial=0)
        drawn = {each: row for each, row in zip(self._scored, first_rows, strict=False) if each.num_draws}
        for each in drawn:
            lazy, check = LAZY[each.mode], each.rows.check
            own = probs[drawn[each] : drawn[each] + each.size]
            self._weights[each] = BatchedWeights(each.tree, own, lazy=lazy, check=check, ahead=True)
        if drawn:
            self._weighing = Weighing(list(self._weights.values()), probs, list(drawn.values()))
        tokens = categorical_rows(probs, placed(np.concatenate(uniforms), probs.device))
        for weights in self._weights.values():
            weights.forget_laws()
        return tokens

    def unread(self) -> Tensor:
        """Weights of the trees that have draws, then of all rows the largest numbers, their ids, and tokens."""
        return self._unread

    def take(self, numbers: Sequence[float]) -> None:
        """Hand each sequence its own."""
        count = 0 if self._weighing is None else self._weighing.count
        if self._weighing is not None:
            self._weighing.take(numbers[:count])
        by_row = np.reshape(numbers[count:], (len(self._by_row), -1))
        ends = accumulate((each.size for each in self._scored), initial=0)
        for each, (first, end) in zip(self._scored, pairwise(ends), strict=True):
            values, ids, *tokens = by_row[:, first:end].tolist()
            each.rows.take([*values, *ids])
            each.decide = self._decision(each, [int(token) for token in tokens[0]]) if tokens else _greedy(each)

    def _decision(self, each: Scored, token_after: Sequence[int]) -> Callable[[Coins], Verdict]:
        check = each.rows.check  # not `each`, which keeps what this returns: in a circle they would outlive their step

        def drawn(node: int) -> int:
            check(node)
            return token_after[node + 1]

        weights = self._weights.get(each)
        if weights is not None:
            return lambda coins: walk(weights, _Foreseen(coins, drawn))
        return matching(each.tree, drawn)


def _greedy(each: Scored) -> Callable[[Coins], Verdict]:
    return matching(each.tree, each.rows.argmax)


@dataclass(frozen=True, slots=True)
class _Foreseen:
    """Coins whose draws are known beforehand: the token `drawn` after each node."""

    coins: Coins
    drawn: Callable[[int], int]

    def bernoulli(self, probability: float, node: int, purpose: str) -> bool:
        """The coins' own."""
        return self.coins.bernoulli(probability, node, purpose)

    def categorical(self, weights: Tensor, node: int, purpose: str) -> int:
        """What the coins' own uniform number drew from these weights. Raises GenerationError if they are no law."""
        return self.drawn(node)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def read_together(pending: Sequence[Unread]) -> None:
    """Read the numbers of all in one copy: the one time that a step waits for the device."""
    if not pending:
        return
    parts = [each.unread() for each in pending]
    numbers: list[float] = _joined(parts).tolist()
    start = 0
    for each, part in zip(pending, parts, strict=True):
        each.take(numbers[start : start + part.numel()])
        start += part.numel()
