"""The candidate tree: the tokens proposed for one step, as flat arrays, and where each candidate came from.

Two ideas carry the whole library, and both live here (docs/decisions/0001):

* **A sampled candidate carries the distribution it was sampled from.** `Sampled(row, excluded)` is that of a sample
  from a draft model. `Fixed()` is that of a candidate from text (cache, prompt, prediction, grammar): probability 1.
* **Nodes are shared, sampled candidates are never dropped.** A prefix proposed twice is one node, scored once by the
  target model. Every sample stays in its parent's list, because verification needs the distributions of all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
"""The child of a sampled candidate that proposed nothing, because its `keep_mask` dropped the sampled token."""


SMALLEST_MASS = 1e-37  # a normal number of float32


@dataclass(frozen=True, slots=True)
class Fixed:
    """The distribution of a fixed candidate: its token with probability 1."""


@dataclass(frozen=True, slots=True, eq=False)
class Sampled:
    """The distribution of a sample from a draft model.

    `row` is the draft model's distribution `[vocab_size]` after all processors; it sums to 1. `excluded` are token ids
    that could not be sampled (cached siblings, earlier samples without replacement). `keep_mask` `[vocab_size]` marks
    the tokens that are kept when sampled; with it the distribution sums to less than 1, and the rest is the probability
    of proposing nothing. `logits` `[vocab_size]` are the draft model's under the request's constraints, before
    temperature and truncation; drafters keep them only for a mode that reads them (`Verifier.keeps_draft_logits`).
    """

    row: Tensor
    excluded: tuple[int, ...] = ()
    keep_mask: Tensor | None = None
    logits: Tensor | None = None

    def probs(self) -> Tensor:
        """The probabilities that were sampled from, `[vocab_size]`; they sum to 1, or less with a `keep_mask`."""
        from precedent.runtime.placing import placed  # here: trees of fixed candidates need no torch

        probs = self.row
        if self.excluded:
            probs = probs.index_fill(0, placed(np.array(self.excluded, dtype=np.int64), probs.device), 0.0)
            probs = probs / probs.sum().clamp(min=SMALLEST_MASS)  # zeros, not NaN, if nothing could be sampled
        return probs if self.keep_mask is None else probs * self.keep_mask


Distribution = Fixed | Sampled

_FIXED = Fixed()


class Candidate(NamedTuple):
    """A token proposed below `parent`: `child` is its node or `NULL`, `distribution` what it was sampled from."""

    parent: int
    child: int
    distribution: Distribution


@dataclass(frozen=True)
class CandidateTree:
    """The candidates of one step in topological order; `ROOT` (-1) stands for the last committed token.

    `token_ids[i]` follows `parents[i] < i`. `candidates` lists every candidate, per parent in verification order:
    sampled ones in the order of sampling, then fixed ones. `sources[i]` names the drafters that proposed node i, the
    credited one first.
    """

    token_ids: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    candidates: tuple[Candidate, ...] = ()
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

        Takes log2(depth) rounds: after n rounds, `mask` covers 2^n generations and `up` leads 2^n levels up.
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
    def candidates_at(self) -> dict[int, tuple[Candidate, ...]]:
        """The candidates below each parent, in verification order; parents without candidates are absent."""
        grouped: dict[int, list[Candidate]] = {}
        for candidate in self.candidates:
            grouped.setdefault(candidate.parent, []).append(candidate)
        return {parent: tuple(candidates) for parent, candidates in grouped.items()}

    @cached_property
    def only_fixed_below(self) -> tuple[bool, ...]:
        """Whether the subtree below each node holds only fixed candidates, `[num_nodes]`."""
        only_fixed = [True] * len(self)
        for candidate in sorted(self.candidates, key=lambda candidate: candidate.parent, reverse=True):
            if candidate.parent != ROOT:
                below = candidate.child == NULL or only_fixed[candidate.child]
                only_fixed[candidate.parent] &= below and isinstance(candidate.distribution, Fixed)
        return tuple(only_fixed)

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

    def without(self, unsound: Callable[[Candidate], bool]) -> CandidateTree:
        """The tree without the candidates that are unsound, and without everything below their nodes."""
        bad = {each for each in range(len(self.candidates)) if unsound(self.candidates[each])}
        gone = {self.candidates[each].child for each in bad}
        for node, parent in enumerate(self.parents):
            if parent in gone and parent != ROOT:
                gone.add(node)
        left = [node for node in range(len(self)) if node not in gone]
        number = {ROOT: ROOT, NULL: NULL} | {node: place for place, node in enumerate(left)}
        candidates = [each for place, each in enumerate(self.candidates) if place not in bad]
        return CandidateTree(
            tuple(self.token_ids[node] for node in left),
            tuple(number[self.parents[node]] for node in left),
            tuple(
                Candidate(number[each.parent], number[each.child], each.distribution)
                for each in candidates
                if each.parent in number and each.child in number
            ),
            tuple(self.sources[node] for node in left),
        )


EMPTY_TREE = CandidateTree()


@dataclass(slots=True)
class TreeBuilder:
    """Builds one candidate tree: fixed candidates first (they may be matched, merged and pruned), then sampled ones.

    Adding a fixed candidate again adds its source to the node. A sampled token that is also a cached sibling is one
    node, listed once, as sampled. `runners_up` are the nodes that a draft model proposed beside its chain.
    """

    token_ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    sources: list[tuple[str, ...]] = field(default_factory=list)
    _edges: dict[tuple[int, int], int] | None = field(default_factory=dict)
    _sampled: list[Candidate] = field(default_factory=list)
    _fixed: dict[int, Candidate] = field(default_factory=dict)
    runners_up: set[int] = field(default_factory=set)

    @classmethod
    def reopened(cls, tree: CandidateTree) -> TreeBuilder:
        """A builder that holds a finished tree; nodes keep their indices and candidates their order."""
        node_of = {edge: node for node, edge in enumerate(zip(tree.parents, tree.token_ids, strict=True))}
        sampled = [each for each in tree.candidates if isinstance(each.distribution, Sampled)]
        fixed = {each.child: each for each in tree.candidates if isinstance(each.distribution, Fixed)}
        return cls(list(tree.token_ids), list(tree.parents), list(tree.sources), node_of, sampled, fixed)

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def _node_of(self) -> dict[tuple[int, int], int]:
        """(parent, token id) to node, built on first use."""
        if self._edges is None:
            self._edges = {edge: node for node, edge in enumerate(zip(self.parents, self.token_ids, strict=True))}
        return self._edges

    def child(self, parent: int, token_id: int) -> int | None:
        """The node of `token_id` below `parent`, or None."""
        return self._node_of.get((parent, token_id))

    def children(self, parent: int) -> tuple[int, ...]:
        """Token ids of all children of `parent`, in the order in which they were added."""
        return tuple(token for (above, token) in self._node_of if above == parent)

    def add_fixed(self, parent: int, token_id: int, source: str) -> int:
        """Propose `token_id` below `parent` with probability 1; returns its node."""
        node = self._node(parent, token_id, source)
        if all(candidate.child != node for candidate in self._sampled):
            self._fixed.setdefault(node, Candidate(parent, node, _FIXED))
        return node

    def add_fixed_tree(
        self, token_ids: Sequence[int], parents: Sequence[int], sources: Sequence[tuple[str, ...]]
    ) -> None:
        """Fill an empty builder with a trie of fixed candidates in topological order, siblings distinct."""
        assert not self.token_ids
        self.token_ids, self.parents, self.sources = list(token_ids), list(parents), list(sources)
        self._edges = None  # most trees are complete now and never look up a node
        self._fixed = {node: Candidate(parent, node, _FIXED) for node, parent in enumerate(parents)}

    def add_sampled(self, parent: int, token_id: int, distribution: Sampled, source: str) -> int:
        """Record that `token_id` was sampled below `parent`; returns its node, or `NULL` if `keep_mask` dropped it."""
        if distribution.keep_mask is not None and not bool(distribution.keep_mask[token_id]):
            self._sampled.append(Candidate(parent, NULL, distribution))
            return NULL
        node = self._node(parent, token_id, source)
        self._fixed.pop(node, None)  # rejected as a sample, it has no probability left as a fixed candidate
        self._sampled.append(Candidate(parent, node, distribution))
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
            (*self._sampled, *self._fixed.values()),
            tuple(self.sources),
        )


def chain(token_ids: Sequence[int], source: str = "chain") -> CandidateTree:
    """A tree of one path of fixed candidates."""
    builder, node = TreeBuilder(), ROOT
    for token in token_ids:
        node = builder.add_fixed(node, token, source)
    return builder.build()
