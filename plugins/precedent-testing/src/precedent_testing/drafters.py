"""Drafters without model or cache: one that proposes nothing, an oracle (the upper bound), and an adversary."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from precedent.drafters.base import Candidates
from precedent.drafters.request import Request
from precedent.tree import ROOT


class _Session:
    """A session that only matches: what it proposes is a function of the output so far and the budget."""

    def __init__(self, name: str, propose: Callable[[list[int], int], Candidates]) -> None:
        self.name, self._propose = name, propose
        self.output: list[int] = []
        self.ended = False

    def match(self, budget: int) -> Candidates:
        """Propose candidates; nothing after the end."""
        return Candidates(self.name) if self.ended else self._propose(self.output, budget)

    def committed(self, token_ids: Sequence[int]) -> None:
        """Remember the output."""
        if not self.ended:
            self.output.extend(token_ids)

    def end(self) -> None:
        """Note that the request is over."""
        self.ended = True


class NullDrafter:
    """Proposes nothing, to measure the engine's own overhead."""

    name = "null"

    def begin(self, request: Request) -> _Session:
        """Begin a session."""
        return _Session(self.name, self._propose)

    def close(self) -> None:
        """Do nothing; there is nothing to release."""

    def _propose(self, output: list[int], budget: int) -> Candidates:
        return Candidates(self.name)


class OracleDrafter(NullDrafter):
    """Knows the answer and proposes the rest of it as one chain: an upper bound on the speed of any drafter."""

    name = "oracle"

    def __init__(self, answer: Sequence[int]) -> None:
        self._answer = list(answer)

    def _propose(self, output: list[int], budget: int) -> Candidates:
        rest = self._answer[len(output) :][:budget]
        return Candidates.of(self.name, [(token, node - 1, 0.99, 0) for node, token in enumerate(rest)])


class RandomDrafter(NullDrafter):
    """Proposes random trees with near-certain estimates, the same for the same output; no output may change."""

    name = "random"

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
        self._vocab_size, self._seed = vocab_size, seed

    def _propose(self, output: list[int], budget: int) -> Candidates:
        choose = random.Random(f"{self._seed} {output}")
        edges: list[tuple[int, int]] = []
        for _ in range(choose.randrange(budget + 1)):
            edge = (choose.randrange(self._vocab_size), choose.randrange(ROOT, len(edges)))
            if edge not in edges:
                edges.append(edge)
        return Candidates.of(self.name, [(token, parent, 0.97, 0) for token, parent in edges])
