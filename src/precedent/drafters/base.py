"""The drafter protocol: `begin` once per request, then `match / draw / committed` every step, `end` at last.

A drafter is engine-wide and may share indexes between requests; what it knows about one request lives in the `Drafting`
that `begin` returns. Points (`match`) may be merged and pruned by the planner; draws (`draw`) are made only after the
shape of the tree is fixed, and none is ever removed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from precedent.config import SamplingParams
from precedent.sampling import Coins, RowShaper
from precedent.tree import TreeBuilder


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """What a drafter learns about a request when it begins.

    `query` is the text that recall embeds; `mode` is how its tokens are verified; `shape` is what the target does to a
    row of logits before it samples, and a draft model must do the same.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    tenant: str = "default"
    query: str = ""
    workflow_step: str = ""
    mode: str = "greedy"
    shape: RowShaper | None = None
    end_token_ids: frozenset[int] = frozenset()


@dataclass(slots=True)
class Candidates:
    """Scored point candidates of one drafter: a trie in topological order (`ROOT` = -1 is the last committed token).

    `estimates[i]` guesses the probability that node i is accepted once its parent is, in (0, 1]; `features[i]` is the
    small tuple of ints (match length bin, vote share bin, …) under which the planner calibrates that guess.
    """

    source: str
    token_ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    estimates: list[float] = field(default_factory=list)
    features: list[tuple[int, ...]] = field(default_factory=list)

    def add(self, parent: int, token_id: int, estimate: float, feature: tuple[int, ...]) -> int:
        """Append a node and return its index."""
        self.token_ids.append(token_id)
        self.parents.append(parent)
        self.estimates.append(estimate)
        self.features.append(feature)
        return len(self.token_ids) - 1

    def __len__(self) -> int:
        return len(self.token_ids)


class Drafting(Protocol):
    """One drafter at work on one request.

    `behind` counts the committed tokens that a drafter's own model would have to compute before its first draw; 0 for
    drafters without a model.
    """

    @property
    def behind(self) -> int:
        """Tokens to catch up on before a draw."""

    def match(self, budget: int) -> Candidates:
        """At most `budget` point candidates that may follow the committed text; cheap (well under a millisecond)."""

    def draw(self, builder: TreeBuilder, num_draws: int, coins: Coins) -> None:
        """Add up to `num_draws` sequential draws to a tree whose points are fixed, excluding cached siblings."""

    def committed(self, token_ids: Sequence[int]) -> None:
        """The target model committed these tokens (accepted ones and the one it chose itself)."""

    def end(self) -> None:
        """The request is over, normally or not; release everything."""


class Drafter(Protocol):
    """Proposes continuations. Register one under the entry-point group `precedent.drafters`.

    `draws` says whether `Drafting.draw` does anything, that is whether this drafter costs sequential model steps.
    """

    name: str
    draws: bool

    def begin(self, request: DraftRequest) -> Drafting:
        """Start drafting for a request."""

    def close(self) -> None:
        """Release what all requests shared."""
