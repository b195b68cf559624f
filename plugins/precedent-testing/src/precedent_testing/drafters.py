"""Drafters without model or cache: one that proposes nothing, an oracle (the upper bound), and an adversary."""

from __future__ import annotations

import random
from collections.abc import Sequence

from precedent.drafters.base import Candidates
from precedent.drafters.request import Request
from precedent.tree import ROOT


class _FixedSession:
    """A session that only matches; remembers the output so far."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.output: list[int] = []
        self.ended = False

    def match(self, budget: int) -> Candidates:
        """Propose candidates; nothing after the end."""
        return Candidates(self.name) if self.ended else self._propose(budget)

    def _propose(self, budget: int) -> Candidates:
        return Candidates(self.name)

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

    def begin(self, request: Request) -> _FixedSession:
        """Begin a session without candidates."""
        return _FixedSession(self.name)

    def close(self) -> None:
        """Do nothing; there is nothing to release."""


class _OracleSession(_FixedSession):
    def __init__(self, name: str, answer: Sequence[int]) -> None:
        super().__init__(name)
        self._answer = list(answer)

    def _propose(self, budget: int) -> Candidates:
        """Propose the rest of the answer as one chain."""
        rest = self._answer[len(self.output) :][:budget]
        return Candidates.of(self.name, [(token, node - 1, 0.99, 0) for node, token in enumerate(rest)])


class OracleDrafter:
    """Knows the answer: an upper bound on the speed that any drafter can reach."""

    name = "oracle"

    def __init__(self, answer: Sequence[int]) -> None:
        self._answer = answer

    def begin(self, request: Request) -> _OracleSession:
        """Begin a session that proposes the known answer."""
        return _OracleSession(self.name, self._answer)

    def close(self) -> None:
        """Do nothing; there is nothing to release."""


class _RandomSession(_FixedSession):
    def __init__(self, name: str, vocab_size: int, seed: int) -> None:
        super().__init__(name)
        self._seed, self._vocab_size = seed, vocab_size

    def _propose(self, budget: int) -> Candidates:
        """Propose a random tree with near-certain estimates; the same tree for the same output."""
        choose = random.Random(f"{self._seed} {self.output}")
        edges: list[tuple[int, int]] = []
        for _ in range(choose.randrange(budget + 1)):
            edge = (choose.randrange(self._vocab_size), choose.randrange(ROOT, len(edges)))
            if edge not in edges:
                edges.append(edge)
        return Candidates.of(self.name, [(token, parent, 0.97, 0) for token, parent in edges])


class RandomDrafter:
    """Proposes nonsense with confidence; the output distribution must not change."""

    name = "random"

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
        self._vocab_size, self._seed = vocab_size, seed

    def begin(self, request: Request) -> _RandomSession:
        """Begin a session that proposes random trees."""
        return _RandomSession(self.name, self._vocab_size, self._seed)

    def close(self) -> None:
        """Do nothing; there is nothing to release."""
