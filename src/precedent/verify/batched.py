"""The weights of a whole tree at once, on any device, without waiting for it until the walk reads one small tensor.

The formulas are those of `precedent.verify.recursion`, which stays the reference and the default on a CPU: there,
asking only for what a walk visits costs less. Here all nodes whose weight is known are updated together, one sibling
rank after the other. An eager node starts at a = 1, so it waits for nothing; a lazy one waits for its parent. Nodes
with nothing but points below gain nothing from lazy coins, so they are eager in either mode: a chain of fifty cached
tokens is one round, not fifty.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from precedent.placing import placed
from precedent.tree import NULL, ROOT, CandidateTree, Draw, Drawn
from precedent.verify.recursion import trials_and_points


@dataclass(slots=True)
class _Round:
    """Trials that are weighed together: one per parent, all of draws or all of points."""

    numbers: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    live: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    laws: list[int] = field(default_factory=list)

    @property
    def columns(self) -> tuple[list[int], ...]:
        """Everything but the laws, which points do not have."""
        return self.numbers, self.rows, self.tokens, self.live, self.waiting


class BatchedWeights:
    """Every w, a and B of a tree; `target_probs` is `[num_nodes + 1, vocab_size]`, row 0 for the root.

    Nothing is read back from the device before the first question of a walk, and then once: w and a of all trials.
    `check` is called with each node that the walk comes to, and raises where the node's row is not to be believed: a
    row behind a token that a grammar forbids may hold anything, and nobody gets there.

    Every point is a trial here, so that a walk draws one token. With `ahead` the token after every node is drawn
    before the walk begins: then points are left to that draw, as `recursion.Weights` does, `target_probs` is written
    to, and becomes the laws that are left (`leftover`).
    """

    def __init__(
        self,
        tree: CandidateTree,
        target_probs: Tensor,
        *,
        lazy: bool,
        check: Callable[[int], None] | None = None,
        ahead: bool = False,
    ) -> None:
        self.tree, self.lazy, self._target_probs, self._check = tree, lazy, target_probs, check
        self._number: dict[tuple[int, int], int] = {}
        self._ordinals: dict[int, int] = {}
        self._trials: dict[int, tuple[Draw, ...]] = {}
        self._points: dict[int, dict[int, int]] = {}
        for node, draws in tree.draws_at.items():
            self._sort(node, draws, ahead)
        self._worth = target_probs.new_zeros(len(self._number))
        self._accept = target_probs.new_ones(len(tree) + 2)  # of the root, of every node, and a place for nobody
        self._left = target_probs if ahead or not self._number else target_probs.clone()
        self._read: Sequence[float] | None = None
        self._weigh()

    def _sort(self, node: int, draws: tuple[Draw, ...], ahead: bool) -> None:
        self._trials[node], self._points[node] = trials_and_points(self.tree, draws) if ahead else (draws, {})
        for ordinal, draw in enumerate(self._trials[node]):
            self._number[node, ordinal] = len(self._number)
            self._ordinals.setdefault(draw.child, ordinal)

    def trials(self, node: int) -> tuple[Draw, ...]:
        """The draws below `node` that are tried one after the other, in verification order."""
        if self._check is not None:
            self._check(node)
        return self._trials.get(node, ())

    def point_children(self, node: int) -> Mapping[int, int]:
        """Token id to child node, for the points that are left to the draw of the token."""
        return self._points.get(node, {})

    def ordinal(self, node: int) -> int:
        """Which trial of its parent brought `node` in first."""
        return self._ordinals[node]

    def defers(self, node: int) -> bool:
        """Whether the coin of `node` is thrown after its subtree (lazily), not before it."""
        return self.lazy and node != ROOT and not self.tree.all_points_below[node]

    def worth(self, node: int, ordinal: int) -> float:
        """The weight w of a trial below `node` once all earlier ones were rejected."""
        return self._numbers[self._number[node, ordinal]]

    def accept(self, node: int) -> float:
        """The weight a of `node` once all its trials were rejected."""
        return self._numbers[len(self._worth) + node + 1]

    def leftover(self, node: int) -> Tensor:
        """The law B at `node` once all its trials were rejected, `[vocab_size]`."""
        return self._left[node + 1]

    def row(self, node: int) -> Tensor:
        """Target probabilities after `node`, `[vocab_size]`."""
        return self._target_probs[node + 1]

    def forget_laws(self) -> None:
        """Keep the weights alone, for a walk whose last token is known beforehand."""
        self._left = self._target_probs = self._left.new_empty((len(self.tree) + 1, 0))

    def unread(self) -> Tensor:
        """What a walk asks for: w of all trials, then a of the root and of all nodes, in float64, unread."""
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

    def _weigh(self) -> None:
        rounds, laws = self._rounds()
        if not rounds:
            return
        device = self._left.device
        columns = [list(chain(*parts)) for parts in zip(*(each.columns for each in rounds), strict=True)]
        table = placed(np.array(columns, dtype=np.int64), device)
        law_rows = placed(np.array([row for each in rounds for row in each.laws], dtype=np.int64), device)
        draft_probs = torch.stack([law.probs().to(self._left) for law in laws]) if laws else None
        start = law_start = 0
        for each in rounds:
            end, law_end = start + len(each.numbers), law_start + len(each.laws)
            law = draft_probs[law_rows[law_start:law_end]] if draft_probs is not None and each.laws else None
            self._weigh_round(table[:, start:end], law)
            start, law_start = end, law_end

    def _weigh_round(self, table: Tensor, law: Tensor | None) -> None:
        """One trial at each of several nodes: its w, then a and B after its rejection; `law` None for points."""
        numbers, rows, tokens, live, waiting = table
        accept, left, tokens = self._accept[rows, None], self._left[rows], tokens[:, None]
        honoured = accept * left.gather(1, tokens)
        law_prob = torch.ones_like(honoured) if law is None else law.gather(1, tokens)
        worth = torch.where(law_prob > 0.0, honoured / law_prob, 0.0).clamp(max=1.0) * live[:, None]
        self._worth[numbers] = worth[:, 0]
        self._accept[waiting] = worth[:, 0]
        left = (accept * left).scatter(1, tokens, 0.0) if law is None else (accept * left - law).clamp_(min=0.0)
        mass = left.sum(1, keepdim=True)
        some = mass > torch.finfo(mass.dtype).tiny  # else nothing is left, at a = 1 by rounding alone: B stays
        self._left[rows] = torch.where(some, left / mass, self._left[rows])
        self._accept[rows] = torch.where(some, mass / (mass + (1.0 - accept)), (accept == 1.0).to(mass))[:, 0]

    def _rounds(self) -> tuple[list[_Round], list[Drawn]]:
        """The trials by (level, rank among siblings, kind), in an order in which they can be weighed; the laws."""
        rounds: dict[tuple[int, int, bool], _Round] = {}
        laws: dict[int, tuple[int, Drawn]] = {}
        levels = self._levels()
        for node, draws in self._trials.items():
            for ordinal, draw in enumerate(draws):
                is_drawn = isinstance(draw.law, Drawn)
                each = rounds.setdefault((levels[node], ordinal, is_drawn), _Round())
                self._add(each, draw, self._number[node, ordinal], self._ordinals[draw.child] == ordinal)
                if isinstance(draw.law, Drawn):
                    each.laws.append(laws.setdefault(id(draw.law), (len(laws), draw.law))[0])
        return [rounds[key] for key in sorted(rounds)], [law for _, law in laws.values()]

    def _add(self, to: _Round, draw: Draw, number: int, is_first: bool) -> None:
        is_live = draw.child != NULL and is_first
        to.numbers.append(number)
        to.rows.append(draw.parent + 1)
        to.tokens.append(self.tree.token_ids[draw.child] if draw.child != NULL else 0)
        to.live.append(int(is_live))
        to.waiting.append(draw.child + 1 if is_live and self.defers(draw.child) else len(self.tree) + 1)

    def _levels(self) -> dict[int, int]:
        """How many lazy nodes stand above the weight of each node, itself included."""
        levels = {ROOT: 0}
        for node, parent in enumerate(self.tree.parents):
            levels[node] = levels[parent] + 1 if self.defers(node) else 0
        return levels
