"""The drafter protocol: `begin` once per request, then `match / draw / committed` every step, `end` at last.

A drafter is engine-wide and may share indexes between requests; what it knows about one request lives in the `Drafting`
that `begin` returns. Points (`match`) may be merged and pruned by the planner; draws (`draw`) are made only after the
shape of the tree is fixed, and none is ever removed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, cast, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from precedent.config import SamplingParams
from precedent.sampling.constraints import RowShaper
from precedent.sampling.probabilities import Coins
from precedent.text.templates import Template
from precedent.tree import CandidateTree, TreeBuilder

if TYPE_CHECKING:
    from precedent.drafters.model.in_step import Drawer, Drawing
    from precedent.target import Slot


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """What a drafter learns about a request when it begins.

    `query` is the text that recall embeds; `workflow_step` and `tools` (a fingerprint of the bound tools) tell requests
    apart whose words are alike. `mode` is how its tokens are verified; the target cuts a row of logits after
    `num_tokens` (None: nowhere) and does `shape` to it before it samples, and a draft model must do the same.
    `prediction` is the caller's own guess of the answer, `templates` are premade responses and the forms of the tool
    calls that it may make. `target_slot` gives the request's place in the target model, for whoever drafts with the
    target's own keys and values: what is committed there must stay, rows behind it may be written.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    tenant: str = "default"
    query: str = ""
    workflow_step: str = ""
    tools: str = ""
    mode: str = "greedy"
    shape: RowShaper | None = None
    num_tokens: int | None = None
    end_token_ids: frozenset[int] = frozenset()
    prediction: tuple[int, ...] = ()
    templates: tuple[Template, ...] = ()
    target_slot: Callable[[], Slot] | None = None


NODE = np.dtype([("token_id", "i4"), ("parent", "i4"), ("estimate", "f8"), ("bin", "i8")])
"""One candidate. `parent` is the index of an earlier node or `ROOT` (-1), the last committed token. `estimate` guesses
the probability in (0, 1] that the node is accepted once its parent is; `bin` is a small number (match length, vote
share, …) under which the planner calibrates that guess; only its last 13 bits count."""

Nodes = NDArray[np.void]


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """Scored point candidates of one drafter: a trie of `NODE` records in topological order, `[num_candidates]`."""

    source: str
    nodes: Nodes = field(default_factory=lambda: np.empty(0, NODE))

    @classmethod
    def of(cls, source: str, nodes: Iterable[tuple[int, int, float, int]]) -> Candidates:
        """Candidates from `(token id, parent, estimate, bin)` of each node."""
        return cls(source, np.array(list(nodes), dtype=NODE))

    @property
    def token_ids(self) -> list[int]:
        """The nodes' tokens."""
        return cast(list[int], self.nodes["token_id"].tolist())

    @property
    def parents(self) -> list[int]:
        """The nodes' parents."""
        return cast(list[int], self.nodes["parent"].tolist())

    @property
    def estimates(self) -> list[float]:
        """The nodes' estimates."""
        return cast(list[float], self.nodes["estimate"].tolist())

    def __len__(self) -> int:
        return self.nodes.size

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Candidates) and self.source == other.source and np.array_equal(self.nodes, other.nodes)

    __hash__ = None  # type: ignore[assignment]  # arrays can be changed


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


class DrawsTogether(Drafting, Protocol):
    """A drafting whose draws go on in step with those of other requests: `draw_together` is the same for all of them.

    What `drawing` yields is between the two; run to its end it has done what `draw` does.
    """

    @property
    def draw_together(self) -> Callable[[Sequence[Drawing]], Sequence[Drawer]]:
        """Runs drawings of several requests to their ends, and says of each what it took and what it failed of."""

    def drawing(self, builder: TreeBuilder, num_draws: int, coins: Coins) -> Drawing:
        """`draw`, not yet begun."""


@runtime_checkable
class DrawsRunnersUp(Drafting, Protocol):
    """A drafting that can name a second token beside each of its last draws, from rows that it has computed anyway."""

    def draw_runners_up(self, builder: TreeBuilder, number: int, coins: Coins) -> None:
        """Beside each of the first `number` tokens of the last `draw` one more, noted in `builder.runners_up`."""


@runtime_checkable
class DraftsAhead(Drafting, Protocol):
    """A drafting that can go on drawing behind its part of the tree while the target scores it (`decoding.pearl`).

    It may then run on another thread than the target, and never at once with anything else that the drafter does.
    """

    @property
    def at_hand(self) -> int:
        """Draws behind the committed text that no tree has held yet; `draw` takes these before it makes others."""

    def draw_ahead(self, coins: Coins) -> bool:
        """Draw one token more behind everything drawn so far; False when nothing may follow."""

    def hung_below(self, tree: CandidateTree) -> CandidateTree:
        """The tree that was scored, with those of the draws at hand that its rows can judge; at most one new node."""


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
