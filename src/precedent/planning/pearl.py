"""Planning for a draft model that draws during the target's forwards (PEARL, docs/decisions/0017)."""

from __future__ import annotations

from precedent.planning.gate import FAR_BEHIND, Gate
from precedent.planning.plan import DrawSource, Limits
from precedent.planning.planner import MARGIN, Planner, Step


class PearlPlanner(Planner):
    """A planner that also weighs samples drawn ahead, and whether to wait for more."""

    def _num_draws(self, name: str, source: DrawSource, step: Step, requests: int) -> int:
        """Show samples at hand, or draw some now if that is worth the wait.

        The number shown must not depend on how many are at hand, since that reveals whether an end token was sampled.
        """
        if source.at_hand is None:
            return super()._num_draws(name, source, step, requests)
        gate = self.gates.setdefault(name, Gate())
        if source.at_hand:
            return min(source.at_hand, self._best_number(name, step, lambda number: 0.0))
        if source.behind > FAR_BEHIND or not gate.measured:
            return 0
        gate.behind = source.behind
        time_of = self._time_of_draws(gate)
        number = self._best_number(name, step, time_of)
        return number if number and self._pays_to_wait(name, number, step.width, time_of(number)) else 0

    def _pays_to_wait(self, name: str, number: int, width: int, milliseconds: float) -> bool:
        """Whether waiting for `number` draws beats a forward with nothing at hand.

        Both ways lead to the same steps with a tree: `runs` of them until the text leaves the chain. Before the first,
        one way waits for the draws; the other makes steps over its pending token until a sample drawn during one of
        them is accepted.
        """
        reaches = self._reaches(name, number + 1)
        tokens, runs = 1.0 + sum(reaches[:-1]), 1.0 / (1.0 - reaches[-1])
        alone, wide = self.checked.milliseconds(width), self.checked.milliseconds(width + number)
        steps_before = 1.0 / reaches[0]
        waiting = runs * tokens / (runs * wide + milliseconds)
        return waiting > (steps_before + runs * tokens) / (steps_before * alone + runs * wide)

    def num_draws_ahead(self, name: str, behind: int, limits: Limits) -> int:
        """How many samples a source may have at hand: one to verify at once, and those of the next tree.

        0 if recent steps waited for it longer than its samples save; it is tried again now and then.
        """
        if not limits.max_draws:
            return 0
        gate = self.gates.setdefault(_waiting_for(name), Gate())
        gate.behind, most = behind, limits.max_draws + 1
        reaches = self._reaches(name, limits.max_draws)
        alone, waited = self.checked.milliseconds(limits.rows_beside + 1), self._time_of_draws(gate)(1)
        pays = reaches[0] * sum(reaches) * alone > (MARGIN - 1.0) * alone + waited
        return most if gate.decide(most if pays else 0) else 0

    def observe_wait(self, name: str, behind: int, milliseconds: float) -> None:
        """Learn how long a step waited for a source that drew during its forward, `behind` by so many tokens."""
        self.gates.setdefault(_waiting_for(name), Gate()).observe(1, behind, milliseconds / self.checked.load)


def _waiting_for(name: str) -> str:
    """The name under which waits for a source are recorded, apart from its draws."""
    return f"waiting for {name}"
