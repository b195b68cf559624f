"""The drafter protocol: `begin` once per request, then `match`, `draw` and `committed` in every step, finally `end`.

A drafter belongs to the whole engine and may share indexes between requests; the session that `begin` returns holds the
state of one request. The planner may merge and prune fixed candidates (`match`). Samples (`draw`) are taken only after
the shape of the tree is decided, and none is ever removed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from precedent.drafters.request import Request
from precedent.tree import TreeBuilder

if TYPE_CHECKING:
    from precedent.sampling.rng import Rng

NODE = np.dtype([("token_id", "i4"), ("parent", "i4"), ("estimate", "f8"), ("bin", "i8")])
"""One candidate. `parent` is the index of an earlier node or `ROOT` (-1), the last committed token. `estimate` is the
estimated probability in (0, 1] that the node is accepted once its parent is. `bin` is a small number, computed from
features such as match length or vote share, under which the planner calibrates the estimate; only its last 13 bits
count."""

Nodes = NDArray[np.void]


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """Fixed candidates of one drafter: a trie of `NODE` records in topological order, `[num_candidates]`."""

    source: str
    nodes: Nodes = field(default_factory=lambda: np.empty(0, NODE))

    @classmethod
    def of(cls, source: str, nodes: Iterable[tuple[int, int, float, int]]) -> Candidates:
        """Build candidates from `(token id, parent, estimate, bin)` tuples, one per node."""
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

    __hash__ = None  # type: ignore[assignment]  # arrays are mutable


class DraftSession(Protocol):
    """One drafter at work on one request."""

    def match(self, budget: int) -> Candidates:
        """Return at most `budget` fixed candidates after the committed text; takes well under a millisecond."""

    def committed(self, token_ids: Sequence[int]) -> None:
        """Called when the target model committed these tokens (accepted ones and the one it chose itself)."""

    def end(self) -> None:
        """Release everything: the request has ended, normally or not."""


class ModelSession(ABC):
    """A session that runs a model: the planner lets it only where that pays. Sessions of a `group` run together."""

    @property
    def group(self) -> object:
        """Key shared by the sessions that run together; by default each runs alone."""
        return self

    @property
    @abstractmethod
    def behind(self) -> int:
        """Committed tokens that its model must compute first."""

    @abstractmethod
    def committed(self, token_ids: Sequence[int]) -> None:
        """Called when the target model committed these tokens."""

    @abstractmethod
    def end(self) -> None:
        """Release everything: the request has ended, normally or not."""


@dataclass(slots=True, eq=False)
class Asked:
    """A request's wish for candidates that cost a forward, and the outcome."""

    session: ForwardSession
    budget: int
    candidates: Candidates = field(default_factory=lambda: Candidates(""))
    error: Exception | None = None


class ForwardSession(ModelSession):
    """A session whose fixed candidates cost a forward of its model."""

    def match(self, budget: int) -> Candidates:
        """Return at most `budget` fixed candidates after the committed text."""
        asked = Asked(self, budget)
        self.match_together([asked])
        if asked.error is not None:
            raise asked.error
        return asked.candidates

    @abstractmethod
    def match_together(self, asked: Sequence[Asked]) -> None:
        """Find the candidates of several sessions of one group, including this one; each may fail alone."""


@dataclass(slots=True, eq=False)
class Draw:
    """One session's draw in a step: how many tokens to sample into which tree, and the outcome.

    `seconds` is its share of work done for several sessions together.
    """

    session: DrawSession
    builder: TreeBuilder
    number: int
    rng: Rng
    seconds: float = 0.0
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class DrawSource:
    """What the planner knows of a session that can sample in this step.

    It has `behind` tokens to catch up on first. With `runners_up` it can name a second token beside each sample.
    """

    behind: int = 0
    runners_up: bool = False


class DrawSession(ModelSession):
    """A session that samples from its model; each draw costs sequential forwards.

    With `names_runners_up` it can name a second token beside each of its last draws, from rows that it has already
    computed.
    """

    names_runners_up: bool = False

    def source(self) -> DrawSource:
        """Return what the planner needs to know before this step's draws."""
        return DrawSource(self.behind, self.names_runners_up)

    def match(self, budget: int) -> Candidates:
        """Return no fixed candidates: a model proposes only after the shape of the tree is decided."""
        return Candidates("")

    @abstractmethod
    def draw(self, builder: TreeBuilder, number: int, rng: Rng) -> None:
        """Add up to `number` sequential samples to a tree with its fixed candidates, excluding cached siblings."""

    def draw_together(self, draws: Sequence[Draw]) -> None:
        """Draw for several sessions of one group, including this one; record the seconds and error of each."""
        for draw in draws:
            started = perf_counter()
            try:
                draw.session.draw(draw.builder, draw.number, draw.rng)
            except Exception as error:
                draw.error = error
            draw.seconds = perf_counter() - started

    def draw_runners_up(self, builder: TreeBuilder, number: int, rng: Rng) -> None:
        """Add one more token beside each of the first `number` of the last draw, and to `builder.runners_up`."""
        raise NotImplementedError(f"{type(self).__name__} names no runners-up")


class Drafter(Protocol):
    """Proposes continuations. Register one under the entry-point group `precedent.drafters`.

    Between two steps the engine's thread calls `begin`, for which all running requests wait: it must take well under a
    millisecond. A drafter that has more to do, such as indexing the prompt, sets `begins_early = True`: its `begin` is
    then called on the caller's thread before the request is queued. It must be safe on any thread, and its request has
    no `target_slot`. One whose requests take memory of their own has a method
    `request_bytes(prompt_tokens, answer_tokens, speculation)`, the most bytes that a request takes.
    """

    name: str

    def begin(self, request: Request) -> DraftSession | DrawSession | ForwardSession:
        """Start drafting for a request."""

    def close(self) -> None:
        """Release everything shared between requests; nothing by default."""
        return


Session = DraftSession | DrawSession | ForwardSession
