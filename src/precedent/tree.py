"""The candidate tree: what was proposed, as flat arrays, and the law that each draw was drawn from.

Two ideas carry the whole library, and both live here (docs/decisions/0001):

* **A draw carries its law.** `Point()` is a deterministic candidate (cache, prompt, prediction): law = certainty.
  `Drawn(row, excluded)` is a sample from a draft model's distribution.
* **Nodes are shared, draws are never dropped.** A prefix proposed twice is one node, scored once by the target model;
  but every sampled draw stays in its parent's draw list, because verification needs the laws of all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

ROOT = -1
"""The parent of first-level nodes: the last committed token."""

NULL = -2
"""The child of a draw that proposed nothing (a sub-probability draw that its `keep_mask` swallowed)."""


SMALLEST_MASS = 1e-37  # a normal number of float32


@dataclass(frozen=True, slots=True)
class Point:
    """The law of a deterministic candidate: certainty."""


@dataclass(frozen=True, slots=True, eq=False)
class Drawn:
    """The law of a sample from a draft model.

    `row` is the draft model's distribution `[vocab_size]` after all processors (it sums to 1); `excluded` are token ids
    that could not be drawn (cached siblings, earlier draws without replacement); `keep_mask` `[vocab_size]` marks the
    tokens that would have been kept: with it the law is a sub-probability and the missing mass is the null event.
    """

    row: Tensor
    excluded: tuple[int, ...] = ()
    keep_mask: Tensor | None = None

    def probs(self) -> Tensor:
        """The law that was sampled, `[vocab_size]`; sums to 1, or to less with a `keep_mask`."""
        from precedent.runtime.placing import placed  # here: trees without draws need no torch

        law = self.row
        if self.excluded:
            law = law.index_fill(0, placed(np.array(self.excluded, dtype=np.int64), law.device), 0.0)
            law = law / law.sum().clamp(min=SMALLEST_MASS)  # where nothing could be drawn, the law is zero, not NaN
        return law if self.keep_mask is None else law * self.keep_mask


Law = Point | Drawn

_POINT = Point()


class Draw(NamedTuple):
    """One candidate at a node: `child` (a node index, or `NULL`) proposed below `parent` under `law`."""

    parent: int
    child: int
    law: Law


@dataclass(frozen=True)
class CandidateTree:
    """Candidates of one step in topological order; `ROOT` (-1) stands for the last committed token.

    `token_ids[i]` follows `parents[i] < i`; `draws` holds every draw, per parent in verification order: drawn ones in
    draw order, then points. `sources[i]` names the drafters that proposed node i, the credited one first.
    """

    token_ids: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    draws: tuple[Draw, ...] = ()
    sources: tuple[tuple[str, ...], ...] = ()

    def __len__(self) -> int:
        return len(self.token_ids)

    @cached_property
    def depths(self) -> NDArray[np.int64]:
        """Depth of each node, `[num_nodes]`; children of the root have depth 1."""
        return np.asarray(self.ancestors.sum(axis=1), dtype=np.int64)

    @cached_property
    def ancestors(self) -> NDArray[np.bool_]:
        """`[num_nodes, num_nodes]`, true where the column is the row's ancestor or the row itself.

        Built in the logarithm of the depth: after n rounds `mask` knows 2^n generations and `up` leads 2^n up.
        """
        count = len(self)
        mask = np.eye(count + 1, dtype=np.bool_)  # the last row stands for the root, its own parent
        mask[-1, -1] = False
        up = np.array((*self.parents, count))
        up[up == ROOT] = count
        while (up != count).any():
            mask |= mask[up]
            up = up[up]
        return mask[:count, :count]

    @cached_property
    def draws_at(self) -> dict[int, tuple[Draw, ...]]:
        """The draws below each parent in verification order; parents without draws are absent."""
        grouped: dict[int, list[Draw]] = {}
        for draw in self.draws:
            grouped.setdefault(draw.parent, []).append(draw)
        return {parent: tuple(draws) for parent, draws in grouped.items()}

    @cached_property
    def all_points_below(self) -> tuple[bool, ...]:
        """For each node: whether its whole subtree holds point draws only, `[num_nodes]`."""
        pure = [True] * len(self)
        for draw in reversed(self.draws_sorted_by_parent):
            if draw.parent != ROOT:
                below = draw.child == NULL or pure[draw.child]
                pure[draw.parent] &= below and isinstance(draw.law, Point)
        return tuple(pure)

    @cached_property
    def draws_sorted_by_parent(self) -> tuple[Draw, ...]:
        """All draws, parents in topological order."""
        return tuple(sorted(self.draws, key=lambda draw: draw.parent))

    def path_to(self, node: int) -> tuple[int, ...]:
        """Node indices from the root's child down to `node`, `()` for `ROOT`."""
        path: list[int] = []
        while node != ROOT:
            path.append(node)
            node = self.parents[node]
        return tuple(reversed(path))

    def tokens_to(self, node: int) -> tuple[int, ...]:
        """Token ids on the path from the root's child down to `node`, `()` for `ROOT`."""
        return tuple(self.token_ids[i] for i in self.path_to(node))

    def check(self) -> None:
        """Raise ValueError when an invariant of the tree is broken (called in tests and in debug mode)."""
        if not (len(self.token_ids) == len(self.parents) == len(self.sources)):
            raise ValueError("token_ids, parents and sources differ in length")
        if any(not ROOT <= parent < node for node, parent in enumerate(self.parents)):
            raise ValueError("a parent does not precede its child")
        if len(set(zip(self.parents, self.token_ids, strict=True))) != len(self):
            raise ValueError("two siblings carry the same token: a shared prefix must be one node")
        if {draw.child for draw in self.draws} - {NULL} != set(range(len(self))):
            raise ValueError("a node has no draw, or a draw has no node")
        for parent, draws in self.draws_at.items():
            self._check_draws(parent, draws)

    def _check_draws(self, parent: int, draws: tuple[Draw, ...]) -> None:
        if not ROOT <= parent < len(self):
            raise ValueError(f"a draw hangs below node {parent}, which does not exist")
        if any(draw.child != NULL and self.parents[draw.child] != parent for draw in draws):
            raise ValueError(f"a draw below node {parent} names a child of another node")
        kinds = [isinstance(draw.law, Point) for draw in draws]
        if kinds != sorted(kinds):
            raise ValueError(f"below node {parent} a point stands before a drawn sibling")
        points = [draw.child for draw in draws if isinstance(draw.law, Point)]
        if len(set(points)) != len(points) or any(d.child in points for d in draws if isinstance(d.law, Drawn)):
            raise ValueError(
                f"below node {parent} a token is listed twice; a point is listed once and never beside a draw"
            )
        for draw in draws:
            self._check_law(draw)

    def _check_law(self, draw: Draw) -> None:
        if isinstance(draw.law, Point):
            if draw.child == NULL:
                raise ValueError(f"a point below node {draw.parent} has no node")
        elif draw.child == NULL:
            if draw.law.keep_mask is None:
                raise ValueError(f"a draw below node {draw.parent} proposed nothing, but its law has no keep_mask")
        elif not float(draw.law.probs()[self.token_ids[draw.child]]) > 0.0:
            raise ValueError(f"below node {draw.parent} a token was drawn whose law gives it no probability")


EMPTY_TREE = CandidateTree()


@dataclass(slots=True)
class TreeBuilder:
    """Grows one candidate tree: points first (they may be matched, merged and pruned freely), then draws.

    Adding a point that is there already adds its source to the node. A drawn token that is also a cached sibling is one
    node, listed once, as drawn (its point would carry no weight after the draw was rejected). `runners_up` are the
    nodes that a draft model proposed beside its chain.
    """

    token_ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    sources: list[tuple[str, ...]] = field(default_factory=list)
    _edges: dict[tuple[int, int], int] | None = field(default_factory=dict)
    _drawn: list[Draw] = field(default_factory=list)
    _points: dict[int, Draw] = field(default_factory=dict)
    runners_up: set[int] = field(default_factory=set)

    @classmethod
    def reopened(cls, tree: CandidateTree) -> TreeBuilder:
        """A builder that holds a finished tree; its nodes keep their numbers, and its draws their order."""
        node_of = {edge: node for node, edge in enumerate(zip(tree.parents, tree.token_ids, strict=True))}
        drawn = [draw for draw in tree.draws if isinstance(draw.law, Drawn)]
        points = {draw.child: draw for draw in tree.draws if isinstance(draw.law, Point)}
        return cls(list(tree.token_ids), list(tree.parents), list(tree.sources), node_of, drawn, points)

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def _node_of(self) -> dict[tuple[int, int], int]:
        """(parent, token id) to node, made when it is asked for."""
        if self._edges is None:
            self._edges = {edge: node for node, edge in enumerate(zip(self.parents, self.token_ids, strict=True))}
        return self._edges

    def child(self, parent: int, token_id: int) -> int | None:
        """The node of `token_id` below `parent`, or None."""
        return self._node_of.get((parent, token_id))

    def children(self, parent: int) -> tuple[int, ...]:
        """Token ids of all nodes below `parent`, in the order of their making."""
        return tuple(token for (above, token) in self._node_of if above == parent)

    def add_point(self, parent: int, token_id: int, source: str) -> int:
        """Propose `token_id` below `parent` with certainty; returns its node."""
        node = self._node(parent, token_id, source)
        if all(draw.child != node for draw in self._drawn):
            self._points.setdefault(node, Draw(parent, node, _POINT))
        return node

    def add_points(self, token_ids: Sequence[int], parents: Sequence[int], sources: Sequence[tuple[str, ...]]) -> None:
        """Fill an empty builder with a trie of points in topological order, siblings distinct."""
        assert not self.token_ids
        self.token_ids, self.parents, self.sources = list(token_ids), list(parents), list(sources)
        self._edges = None  # most trees are finished with this, and nobody looks for a node
        self._points = {node: Draw(parent, node, _POINT) for node, parent in enumerate(parents)}

    def add_draw(self, parent: int, token_id: int, law: Drawn, source: str) -> int:
        """Record that `token_id` was drawn from `law` below `parent`; returns its node (or `NULL` when swallowed)."""
        if law.keep_mask is not None and not bool(law.keep_mask[token_id]):
            self._drawn.append(Draw(parent, NULL, law))
            return NULL
        node = self._node(parent, token_id, source)
        self._points.pop(node, None)
        self._drawn.append(Draw(parent, node, law))
        return node

    def _node(self, parent: int, token_id: int, source: str) -> int:
        node = self._node_of.get((parent, token_id))
        if node is None:
            node = self._node_of[parent, token_id] = len(self.token_ids)
            self.token_ids.append(int(token_id))
            self.parents.append(parent)
            self.sources.append((source,))
        elif source not in self.sources[node]:
            self.sources[node] += (source,)
        return node

    def build(self) -> CandidateTree:
        """The finished tree."""
        return CandidateTree(
            tuple(self.token_ids),
            tuple(self.parents),
            (*self._drawn, *self._points.values()),
            tuple(self.sources),
        )


def chain(token_ids: Sequence[int], source: str = "chain") -> CandidateTree:
    """A tree of one path of point draws."""
    builder, node = TreeBuilder(), ROOT
    for token in token_ids:
        node = builder.add_point(node, token, source)
    return builder.build()
