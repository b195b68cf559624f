"""A request's candidates as SGLang's n-gram worker hands them on: exactly `width` tokens, and who precedes whom.

Node 0 is the last committed token. `mask[i, j]` is 1 where node j is node i or one of its ancestors.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from precedent.tree import CandidateTree

Array = NDArray[Any]

PADDING = 0
"""The token of nodes that nothing is proposed for; SGLang's own padding has the same."""


class Nodes:
    """Nodes of one request, each token below a parent once, at most `width`, the root included."""

    def __init__(self, root: int, width: int) -> None:
        self._width = width
        self.tokens, self.parents = [root], [-1]
        self._found: dict[tuple[int, int], int] = {}

    def add(self, parent: int | None, token: int) -> int | None:
        """The node of a token below a parent; None if there is no room, or none for the parent."""
        if parent is None or (parent, token) in self._found:
            return None if parent is None else self._found[parent, token]
        if len(self.tokens) == self._width:
            return None
        node = self._found[parent, token] = len(self.tokens)
        self.tokens.append(token)
        self.parents.append(parent)
        return node

    def arrays(self) -> tuple[Array, Array]:
        """Tokens `[width]` and mask `[width, width]`, int64, level by level as SGLang's own trees are.

        What is left is a chain of padding below the last node: below the root, as SGLang does it, the same token would
        be a candidate several times, and sampling would accept it too often.
        """
        order = _by_level(self.parents)
        place = {node: index for index, node in enumerate(order)}
        tokens = np.full(self._width, PADDING, dtype=np.int64)
        tokens[: len(order)] = [self.tokens[node] for node in order]
        mask = np.eye(self._width, dtype=np.int64)
        for index in range(1, self._width):
            parent = place[self.parents[order[index]]] if index < len(order) else index - 1
            mask[index, : parent + 1] = mask[parent, : parent + 1]
        return tokens, mask


def merged(ours: CandidateTree, tokens: Array, mask: Array) -> tuple[Array, Array]:
    """Our candidates, and SGLang's own in the nodes that are left: tokens `[width]`, mask `[width, width]`."""
    nodes = Nodes(int(tokens[0]), len(tokens))
    for candidates in (_ours(ours), _theirs(tokens, mask)):
        place: dict[int, int | None] = {0: 0}
        for node, parent, token in candidates:
            place[node] = nodes.add(place.get(parent), token)
    return nodes.arrays()


def _ours(tree: CandidateTree) -> Iterator[tuple[int, int, int]]:
    """Node, parent, token; the root is 0."""
    for node, (token, parent) in enumerate(zip(tree.token_ids, tree.parents, strict=True), start=1):
        yield node, parent + 1, token


def _theirs(tokens: Array, mask: Array) -> Iterator[tuple[int, int, int]]:
    """The same of SGLang's arrays, without what is its padding: the token 0 below the root."""
    for node in range(1, len(tokens)):
        parent, token = int(mask[node, :node].nonzero()[0][-1]), int(tokens[node])
        if (parent, token) != (0, PADDING):
            yield node, parent, token


def _by_level(parents: list[int]) -> list[int]:
    """Nodes in the order of their depth; those of one level as they came."""
    depths = [0] * len(parents)
    for node, parent in enumerate(parents[1:], start=1):
        depths[node] = depths[parent] + 1
    return sorted(range(len(parents)), key=depths.__getitem__)
