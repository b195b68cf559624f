"""A grammar as a constraint: every node of the candidate tree is masked by its own path."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from precedent.grammar.matching import TokenMatcher, Words
from precedent.target import common_prefix

MOST_MASKS = 256
"""Masks kept of one request: several steps' worth of nodes, which target, draft model and drafters ask for in turn."""


class GrammarConstraint:
    """Masks the rows of one request by its grammar; one matcher walks to and fro between the nodes.

    A path that the grammar has left, or that has ended, keeps its row as it is: nothing there can be accepted.
    """

    def __init__(self, matcher: TokenMatcher, end_token_ids: Iterable[int]) -> None:
        self._matcher, self._end_ids = matcher, frozenset(end_token_ids)
        self._path: list[int] = []
        self._masks: OrderedDict[tuple[int, ...], Words | None] = OrderedDict()

    def __call__(self, output_ids: Sequence[int], row: Tensor) -> Tensor:
        """Mask what the grammar does not allow behind `output_ids`; all of it at a dead end."""
        words = self._words(tuple(output_ids))
        if words is None:
            return row
        return row.masked_fill(~_as_tensor(words, row), -torch.inf)

    def forced(self, output_ids: Sequence[int]) -> tuple[int, ...]:
        """The tokens that must follow, up to the first place with a choice or the end of the answer."""
        path = tuple(output_ids)
        while self._words(path) is not None:
            self._walk_to(path)
            found = self._matcher.forced() or self._only(path)
            if not found:
                break
            path = (*path, *found)
        return path[len(output_ids) :]

    def _only(self, path: tuple[int, ...]) -> list[int]:
        """The token that is alone allowed behind a path, if there is one."""
        words = self._words(path)
        if words is None or np.count_nonzero(words) != 1:
            return []
        tokens = np.flatnonzero(_bits(words))
        return tokens.tolist() if tokens.size == 1 else []

    def _words(self, path: tuple[int, ...]) -> Words | None:
        """The mask behind a path, None where the path left the grammar or ended."""
        if path in self._masks:
            self._masks.move_to_end(path)
            return self._masks[path]
        ended = bool(path) and path[-1] in self._end_ids
        words = self._masks[path] = self._matcher.allowed() if not ended and self._walk_to(path) else None
        if len(self._masks) > MOST_MASKS:
            self._masks.popitem(last=False)
        return words

    def _walk_to(self, path: Sequence[int]) -> bool:
        """Bring the matcher to a path, or as near as the grammar follows it; says whether it got there."""
        shared = common_prefix(self._path, path)
        if shared < len(self._path):
            self._matcher.go_back(len(self._path) - shared)
        taken = self._matcher.advance(path[shared:])
        self._path[shared:] = path[shared : shared + taken]
        return len(self._path) == len(path)


def _bits(words: Words) -> NDArray[np.uint8]:
    return np.unpackbits(words.view(np.uint8), bitorder="little")


def _as_tensor(words: Words, row: Tensor) -> Tensor:
    """Which tokens of a row are allowed, `[vocab_size]` bool on the row's device; ids that the mask lacks are not."""
    allowed = torch.zeros(row.numel(), dtype=torch.bool)
    bits = _bits(words)[: row.numel()]
    allowed[: bits.size] = torch.from_numpy(bits).bool()
    return allowed.to(row.device, non_blocking=True)
