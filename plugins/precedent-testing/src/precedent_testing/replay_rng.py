"""Random numbers that replay every branch: the exact distribution of any function of an `rng`.

    for probability, verdict in enumerate_outcomes(lambda rng: verify(tree, rows, "traversal", rng)): ...

Statistical tests detect a bias of a few per cent; this detects 1e-12. It also rejects code that asks for the same
number twice: counter-based generators would return equal numbers, and the joint distribution would be wrong although
each number is fair.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from torch import Tensor

from precedent.sampling.rng import Rng

T = TypeVar("T")

ROUNDING = 1e-9


@dataclass(slots=True)
class ReplayRng:
    """Random numbers that follow a script of choices, and take the first possible branch once the script ends.

    `branches[i]` lists the (value, probability) pairs possible for decision i; `taken[i]` indexes the one taken.
    """

    script: Sequence[int] = ()
    branches: list[list[tuple[int, float]]] = field(default_factory=list)
    taken: list[int] = field(default_factory=list)
    probability: float = 1.0
    _asked: set[tuple[int, str]] = field(default_factory=set)

    def bernoulli(self, probability: float, node: int, purpose: str) -> bool:
        """Branch into the outcomes that have mass. Raises AssertionError unless `probability` is in [0, 1]."""
        if not -ROUNDING <= probability <= 1.0 + ROUNDING:
            raise AssertionError(f"probability {probability} of {purpose} at node {node} is outside [0, 1]")
        probability = min(1.0, max(0.0, probability))
        return bool(self._choose([(1, probability), (0, 1.0 - probability)], node, purpose))

    def categorical(self, weights: Tensor, node: int, purpose: str) -> int:
        """Branch into every index that has mass. Raises AssertionError if none has, or if a weight is negative."""
        values = weights.tolist()
        total = sum(values)
        if not total > 0.0 or min(values) < 0.0:
            raise AssertionError(f"weights {values} of {purpose} at node {node} are not a distribution")
        return self._choose([(index, value / total) for index, value in enumerate(values)], node, purpose)

    def _choose(self, options: list[tuple[int, float]], node: int, purpose: str) -> int:
        if (node, purpose) in self._asked:
            raise AssertionError(f"the random number for {purpose} at node {node} was asked for twice")
        self._asked.add((node, purpose))
        possible = [option for option in options if option[1] > 0.0]
        position = len(self.taken)
        choice = self.script[position] if position < len(self.script) else 0
        self.branches.append(possible)
        self.taken.append(choice)
        value, probability = possible[choice]
        self.probability *= probability
        return value


def enumerate_outcomes(run: Callable[[Rng], T]) -> Iterator[tuple[float, T]]:
    """Every outcome of `run` with its exact probability; the probabilities sum to 1.

    `run` must be a function of its `rng` alone. An outcome may occur in several entries.
    """
    script: list[int] | None = []
    while script is not None:
        rng = ReplayRng(script)
        outcome = run(rng)
        yield rng.probability, outcome
        script = _next_script(rng)


def _next_script(rng: ReplayRng) -> list[int] | None:
    """The script of the next branch in depth-first order, None after the last one."""
    for position in reversed(range(len(rng.taken))):
        if rng.taken[position] + 1 < len(rng.branches[position]):
            return [*rng.taken[:position], rng.taken[position] + 1]
    return None
