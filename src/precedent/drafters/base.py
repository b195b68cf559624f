"""The drafter protocol: `begin` once per request, then `match / draw / committed` every step, `end` at last.

A drafter is engine-wide and may share indexes between requests; what it knows of one request lives in the session that
`begin` returns. Fixed candidates (`match`) may be merged and pruned by the planner; samples (`draw`) are taken only
after the shape of the tree is fixed, and none is ever removed.
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
"""One candidate. `parent` is the index of an earlier node or `ROOT` (-1), the last committed token. `estimate` guesses
the probability in (0, 1] that the node is accepted once its parent is; `bin` is a small number (match length, vote
share, …) under which the planner calibrates that guess; only its last 13 bits count."""

Nodes = NDArray[np.void]


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """Fixed candidates of one drafter: a trie of `NODE` records in topological order, `[num_candidates]`."""

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


class DraftSession(Protocol):
    """One drafter at work on one request."""

    def match(self, budget: int) -> Candidates:
        """At most `budget` fixed candidates that may follow the committed text; well under a millisecond."""

    def committed(self, token_ids: Sequence[int]) -> None:
        """The target model committed these tokens (accepted ones and the one it chose itself)."""

    def end(self) -> None:
        """The request is over, normally or not; release everything."""


@dataclass(slots=True, eq=False)
class Draw:
    """What one session is asked to sample in a step: how many tokens, into which tree; and what came of it.

    `seconds` are its share of what was done for several sessions together.
    """

    session: DrawSession
    builder: TreeBuilder
    number: int
    rng: Rng
    seconds: float = 0.0
    error: Exception | None = None


class DrawSession(ABC):
    """A session of a drafter that samples from a model of its own; each draw costs sequential forwards of that model.

    Sessions with the same `group` draw together. With `names_runners_up` it can name a second token beside each of its
    last draws, from rows that it has computed anyway.
    """

    names_runners_up: bool = False

    @property
    def group(self) -> object:
        """What sessions have in common that draw together."""
        return self

    @property
    @abstractmethod
    def behind(self) -> int:
        """Committed tokens that its model would have to compute before the first draw."""

    def match(self, budget: int) -> Candidates:
        """Fixed candidates; a model has none to offer before the shape of the tree is decided."""
        return Candidates("")

    @abstractmethod
    def draw(self, builder: TreeBuilder, number: int, rng: Rng) -> None:
        """Add up to `number` sequential samples to a tree whose fixed candidates stand, excluding cached siblings."""

    def draw_together(self, draws: Sequence[Draw]) -> None:
        """Draw for several sessions of one group, this one among them; each notes its seconds and its failure."""
        for draw in draws:
            started = perf_counter()
            try:
                draw.session.draw(draw.builder, draw.number, draw.rng)
            except Exception as error:
                draw.error = error
            draw.seconds = perf_counter() - started

    def draw_runners_up(self, builder: TreeBuilder, number: int, rng: Rng) -> None:
        """Beside each of the first `number` tokens of the last draw add one more, noted in `builder.runners_up`."""
        raise NotImplementedError(f"{type(self).__name__} names no runners-up")

    @abstractmethod
    def committed(self, token_ids: Sequence[int]) -> None:
        """The target model committed these tokens."""

    @abstractmethod
    def end(self) -> None:
        """The request is over, normally or not; release everything."""


class Drafter(Protocol):
    """Proposes continuations. Register one under the entry-point group `precedent.drafters`."""

    name: str

    def begin(self, request: Request) -> DraftSession | DrawSession:
        """Start drafting for a request."""

    def close(self) -> None:
        """Release what all requests shared."""
