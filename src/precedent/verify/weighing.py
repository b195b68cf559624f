"""Every w, a and B of several trees in few operations: launching is what small ones cost on a GPU.

So the work is cut by what depends on what. The law B of a node is the target's own until one of its trials was
rejected, whatever became of the nodes above it. Hence a chain of draws, lazy or not, is one *stage*: its w and a follow
from one another as single numbers, level by level, and what rejections leave of all its rows is computed together.
Another stage comes with each further trial of a node. Trees share their stages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from precedent.runtime.placing import placed
from precedent.tree import NULL, SMALLEST_MASS, CandidateTree, Draw, Drawn


class Weighable(Protocol):
    """A tree that can be weighed (`precedent.verify.batched.BatchedWeights`)."""

    @property
    def tree(self) -> CandidateTree:
        """The tree."""

    def all_trials(self) -> Mapping[int, tuple[Draw, ...]]:
        """The draws below each node that are tried one after the other."""

    def ordinal(self, node: int) -> int:
        """Which trial of its parent brought `node` in first."""

    def defers(self, node: int) -> bool:
        """Whether the coin of `node` is thrown after its subtree."""

    def weighed_by(self, weighing: Weighing, first_row: int, numbers: Mapping[tuple[int, int], int]) -> None:
        """Hear what weighs it: where its rows begin there, and which number each (node, ordinal) has."""


@dataclass(frozen=True, slots=True)
class _Trial:
    """A trial at its time: in this stage after the trials of lower levels.

    `row` is the row of its node, `waits` that of a child whose coin is thrown lazily, or None; `law` is None for a
    point. One that is not `is_live` was swallowed, or drawn before.
    """

    stage: int
    level: int
    tree: Weighable
    place: tuple[int, int]
    row: int
    token: int
    is_live: bool
    waits: int | None
    law: Drawn | None

    def numbers(self, law_rows: Mapping[int, int], *, nobody: int) -> tuple[int, ...]:
        """What a device is told of it, the row of its law among all laws included."""
        waits = nobody if self.waits is None else self.waits
        return self.row, self.token, law_rows[id(self.law)], self.is_live, waits


class Weighing:
    """The weights of trees whose rows lie in `left` `[rows, vocab_size]`, each from its own of `first_rows` on.

    `left` holds the target's probabilities, is written to, and holds the laws that are left in the end; it is not kept.
    Nothing is read back from its device before the first question.
    """

    def __init__(self, trees: Sequence[Weighable], left: Tensor, first_rows: Sequence[int] = (0,)) -> None:
        found = [trial for each in zip(trees, first_rows, strict=True) for trial in _scheduled(*each)]
        trials = sorted(found, key=attrgetter("stage", "level"))
        self._worth = left.new_zeros(len(trials))
        self._accept = left.new_ones(len(left) + 1)  # and a place for nobody
        self._read: Sequence[float] | None = None
        numbers: dict[int, dict[tuple[int, int], int]] = {id(tree): {} for tree in trees}
        for number, trial in enumerate(trials):
            numbers[id(trial.tree)][trial.place] = number
        for tree, first_row in zip(trees, first_rows, strict=True):
            tree.weighed_by(self, first_row, numbers[id(tree)])
        if trials:
            self._weigh(trials, left)

    def worth(self, number: int) -> float:
        """The weight w of a trial once all earlier ones of its node were rejected."""
        return self._numbers[number]

    def accept(self, row: int) -> float:
        """The weight a of the node of a row once all its trials were rejected."""
        return self._numbers[len(self._worth) + row]

    def unread(self) -> Tensor:
        """What walks ask for: w of all trials, then a of all rows, in float64, unread."""
        return torch.cat([self._worth, self._accept]).double()

    @property
    def count(self) -> int:
        """How many numbers `unread` gives."""
        return len(self._worth) + len(self._accept)

    def take(self, numbers: Sequence[float]) -> None:
        """What `unread` gave, on the host: nothing more is read."""
        self._read = numbers

    @property
    def _numbers(self) -> Sequence[float]:
        if self._read is None:
            self._read = self.unread().tolist()
        return self._read

    def _weigh(self, trials: Sequence[_Trial], left: Tensor) -> None:
        laws = list({id(trial.law): trial.law for trial in trials if trial.law is not None}.values())
        probs = _probs(laws, left, with_points=any(trial.law is None for trial in trials))
        law_rows = {id(law): row for row, law in enumerate([*laws, None])}
        by_kind = sorted(trials, key=lambda trial: (trial.stage, trial.law is None))
        numbers = [[trial.numbers(law_rows, nobody=len(left)) for trial in order] for order in (trials, by_kind)]
        table, kinds = _placed(numbers, left).transpose(1, 2)
        start = 0
        for _, group in groupby(trials, attrgetter("stage")):
            stage = list(group)
            end = start + len(stage)
            self._try(stage, table[:, start:end], probs, left, self._worth[start:end])
            self._reject(sum(trial.law is not None for trial in stage), kinds[:, start:end], probs, left)
            start = end

    def _try(self, stage: Sequence[_Trial], table: Tensor, probs: Tensor, left: Tensor, worth: Tensor) -> None:
        """The w of all trials of a stage, and with which weight their children are entered, level by level."""
        rows, tokens, law_rows, live, waiting = table
        law_prob = probs[law_rows, tokens]
        ratio = torch.where(law_prob > 0.0, left[rows, tokens] / law_prob, 0.0)
        ratio = ratio.clamp_(max=torch.finfo(ratio.dtype).max) * live
        start = 0
        for _, group in groupby(stage, attrgetter("level")):
            level = list(group)
            at = slice(start, start + len(level))
            torch.clamp(self._accept[rows[at]] * ratio[at], max=1.0, out=worth[at])
            if any(trial.waits is not None for trial in level):
                self._accept[waiting[at]] = worth[at]
            start = at.stop

    def _reject(self, num_draws: int, kinds: Tensor, probs: Tensor, left: Tensor) -> None:
        """What a and B of the nodes of a stage become once its trials, those of draws first, were rejected."""
        rows, tokens, law_rows, _, _ = kinds
        accept, before = self._accept[rows, None], left[rows]
        rest = accept * before
        if num_draws:
            rest[:num_draws].sub_(probs[law_rows[:num_draws]]).clamp_(min=0.0)
        if num_draws < len(rows):
            rest[num_draws:].scatter_(1, tokens[num_draws:, None], 0.0)
        mass = rest.sum(1, keepdim=True)
        # Nothing is left at a = 1 by rounding alone: such a draw is never rejected, and B stays.
        self._accept[rows] = (mass / (mass + (1.0 - accept))).nan_to_num_(nan=1.0)[:, 0]
        is_some = mass > torch.finfo(mass.dtype).tiny
        left[rows] = torch.where(is_some, rest.div_(mass), before, out=rest)


def _scheduled(tree: Weighable, first_row: int) -> Iterator[_Trial]:
    """The trials of a tree, each in the first stage and level in which all that it needs is known."""
    known: dict[int, tuple[int, int]] = {}
    for node, draws in sorted(tree.all_trials().items()):
        stage, level = known.get(node, (0, 0))  # an eager node waits for nobody
        for ordinal, draw in enumerate(draws):
            when = (stage + ordinal, 0 if ordinal else level)
            is_live = draw.child != NULL and tree.ordinal(draw.child) == ordinal
            waits = first_row + draw.child + 1 if is_live and tree.defers(draw.child) else None
            if waits is not None:
                known[draw.child] = (when[0], when[1] + 1)
            token = tree.tree.token_ids[draw.child] if draw.child != NULL else 0
            law = draw.law if isinstance(draw.law, Drawn) else None
            yield _Trial(*when, tree, (node, ordinal), first_row + node + 1, token, is_live, waits, law)


def _probs(laws: Sequence[Drawn], like: Tensor, *, with_points: bool) -> Tensor:
    """`Drawn.probs` of all laws, `[laws, vocab_size]`, and last a row of ones for whatever points there are."""
    rows = torch.stack([*(law.row.to(like) for law in laws), *([torch.ones_like(like[0])] if with_points else [])])
    size = rows.shape[1]
    if any(not 0 <= token < size for law in laws for token in law.excluded):
        raise IndexError(f"a draw's law excludes a token that is not among the {size} there are")
    places = [row * size + token for row, law in enumerate(laws) for token in law.excluded]
    if places:
        rows.view(-1).index_fill_(0, _placed(places, like), 0.0)
        shortened = _placed([row for row, law in enumerate(laws) if law.excluded], like)
        rows[shortened] /= rows[shortened].sum(1, keepdim=True).clamp_(min=SMALLEST_MASS)
    for row, law in enumerate(laws):
        if law.keep_mask is not None:
            rows[row].mul_(law.keep_mask.to(like.device))
    return rows


def _placed(numbers: Sequence[object], beside: Tensor) -> Tensor:
    return placed(np.array(numbers, dtype=np.int64), beside.device)
