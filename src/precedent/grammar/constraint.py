"""A grammar as a constraint: it masks every node of the candidate tree by the node's own path."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from precedent.grammar.guidance import GuidanceMatcher, Words
from precedent.runtime.placing import placed
from precedent.runtime.recent import Recent
from precedent.target import common_prefix

MOST_MASKS = 256
"""Masks cached per request: enough for the nodes of several steps, which target, draft model and drafters share."""


class GrammarConstraint:
    """Masks the rows of one request by its grammar; a single matcher moves between the nodes.

    If a path has left the grammar or has ended, its row stays unmasked, because nothing there can be accepted.
    """

    def __init__(self, matcher: GuidanceMatcher, end_token_ids: Iterable[int]) -> None:
        self._matcher, self._end_ids = matcher, frozenset(end_token_ids)
        self._path: list[int] = []
        self._masks = Recent[tuple[int, ...], Words | None](MOST_MASKS)

    def __call__(self, output_ids: Sequence[int], row: Tensor) -> Tensor:
        """Mask the tokens that the grammar forbids after `output_ids`; at a dead end, all of them."""
        words = self._words(tuple(output_ids))
        return row if words is None else row.masked_fill(_forbidden(words, row), -torch.inf)

    def forced(self, output_ids: Sequence[int]) -> tuple[int, ...]:
        """The tokens that must follow, up to the first choice or the end of the answer."""
        path = tuple(output_ids)
        while self._words(path) is not None:
            self._walk_to(path)
            found = self._matcher.forced() or self._only(path)
            if not found:
                break
            path = (*path, *found)
        return path[len(output_ids) :]

    def _only(self, path: tuple[int, ...]) -> list[int]:
        """The only token allowed after a path, if there is exactly one."""
        words = self._words(path)
        if words is None or np.count_nonzero(words) != 1:
            return []
        tokens = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
        return tokens.tolist() if tokens.size == 1 else []

    def _words(self, path: tuple[int, ...]) -> Words | None:
        """The mask after a path, None if the path has left the grammar or has ended."""
        return self._masks.get_or_make(path, lambda: self._mask_after(path))

    def _mask_after(self, path: tuple[int, ...]) -> Words | None:
        ended = bool(path) and path[-1] in self._end_ids
        return self._matcher.allowed() if not ended and self._walk_to(path) else None

    def _walk_to(self, path: Sequence[int]) -> bool:
        """Move the matcher along a path as far as the grammar follows; returns whether it reached the end."""
        shared = common_prefix(self._path, path)
        if shared < len(self._path):
            self._matcher.go_back(len(self._path) - shared)
        taken = self._matcher.advance(path[shared:])
        self._path[shared:] = path[shared : shared + taken]
        return len(self._path) == len(path)


def _forbidden(words: Words, row: Tensor) -> Tensor:
    """The forbidden tokens of a row, `[vocab_size]` bool on its device; those beyond the end of the mask are too."""
    size = row.shape[-1]
    bits = np.full((size + 7) // 8, 0xFF, dtype=np.uint8)
    given = words.view(np.uint8)[: bits.size]
    bits[: given.size] ^= given
    if row.is_cpu:
        return torch.from_numpy(np.unpackbits(bits, bitorder="little")).view(torch.bool)[:size]
    # on a GPU the bytes are moved first, which are an eighth of the data
    spread: Tensor = placed(bits, row.device)[:, None] >> torch.arange(8, dtype=torch.uint8, device=row.device)
    return spread.bitwise_and_(1).flatten().bool()[:size]
