"""What a sequence allows in a step, and the plan for it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from precedent.planning.choose import Choice
from precedent.planning.trust import Trust, outcomes_by_source
from precedent.runtime.compiled import Floats, Int32s, Int64s
from precedent.tree import TreeBuilder

_NONE = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Limits:
    """What one sequence allows in this step: nodes, draws, tokens until its limit, and the tokens that end it.

    `requests` counts the requests in the step, including this one. `rows_beside` and `tokens_beside` are the others'
    rows and expected tokens: all of them wait for a node, so it pays off only if it raises their common rate. `trust`
    is this request's experience with each source; `prefix` is the number of tokens that each node sees before the tree.
    `one_path` allows a single path, for an engine that verifies no trees.
    """

    max_nodes: int
    max_draws: int
    max_depth: int
    end_token_ids: frozenset[int]
    requests: int = 1
    rows_beside: int = 0
    tokens_beside: float = 0.0
    trust: Trust = field(default_factory=Trust)
    prefix: int = 0
    one_path: bool = False


@dataclass(slots=True)
class Plan:
    """A step's plan: fixed candidates already in the builder; draws and runners-up still to be made.

    `choice` records how the fixed candidates were chosen from those of the drafters `names`, of which drafter i
    proposed the next `counts[i]`; None if none were proposed. `expected_tokens` counts the fixed candidates and the
    target's own token; `trust` learns their outcomes.
    """

    builder: TreeBuilder = field(default_factory=TreeBuilder)
    draws: dict[str, int] = field(default_factory=dict)
    runners_up: dict[str, int] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    counts: Int64s = field(default_factory=lambda: _NONE)
    choice: Choice | None = None
    expected_tokens: float = 1.0
    trust: Trust = field(default_factory=Trust)

    def learn(self, parents: Int32s, verdict: Floats) -> None:
        """Update the request's trust with the outcomes of each drafter's candidates (see `learn_from_verdict`)."""
        if self.choice is not None:
            outcomes = outcomes_by_source(self.choice.believed, self.counts, self.choice.node_of, parents, verdict)
            self.trust.learn(self.names, outcomes)

    @property
    def estimates(self) -> Floats:
        """Probabilities that fixed candidates are accepted once their parents are, `[num_fixed]`."""
        return np.empty(0) if self.choice is None else self.choice.estimates
