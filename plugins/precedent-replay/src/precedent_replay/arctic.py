"""The baseline `arctic`: the SuffixDecoding authors' own code, if their package `arctic-inference` is installed."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import numpy as np

from precedent.errors import UnsupportedError
from precedent.tree import CandidateTree
from precedent_replay.baselines import LONGEST_MATCH, MIN_PROBABILITY, POOLED, as_tree
from precedent_replay.pool import Pool
from precedent_replay.turns import Turn

_MODULE = "arctic_inference.suffix_decoding"
_LIVE = "live"


def suffix_decoding() -> Any:
    """Import the package's module. Raises UnsupportedError if it is not installed."""
    try:
        return import_module(_MODULE)
    except ImportError as error:
        raise UnsupportedError(
            f"the baseline 'arctic' needs a package: pip install arctic-inference ({error})"
        ) from error


def is_installed() -> bool:
    """Whether the baseline can take part."""
    try:
        suffix_decoding()
    except UnsupportedError:
        return False
    return True


class SharedTrees:
    """The package's cache: a tree of the pool's visible completions, and one of the current contender's live text."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.cache = suffix_decoding().SuffixDecodingCache(max_tree_depth=LONGEST_MATCH, max_cached_requests=-1)
        self._known: set[int] = set()
        self._last_id, self._epoch = 0, 0

    def read_pool(self) -> None:
        """Add completions that the pool now shows, and evict those that it hides."""
        if self._pool.epoch() != self._epoch:
            self._epoch = self._pool.epoch()
            kept = {completion.id for completion in self._pool.since("", "")}
            for number in self._known - kept:
                self.cache.evict_cached_response(number)
            self._known &= kept
        for completion in self._pool.since("", "", self._last_id):
            self.cache.start_request(completion.id, [])
            self.cache.add_active_response(completion.id, np.array(completion.token_ids, dtype=np.int32))
            self.cache.stop_request(completion.id)
            self._known.add(completion.id)
            self._last_id = completion.id


class Arctic:
    """SuffixDecoding with one α and budget; contenders that run in turn may share their trees."""

    def __init__(self, pool: Pool, alpha: float, budget: int, trees: SharedTrees | None = None) -> None:
        self.name = f"arctic-{alpha:g}" if alpha != 1 else "arctic"
        self._alpha, self._budget = alpha, budget
        self._trees = trees or SharedTrees(pool)
        self._cache, self._recent = self._trees.cache, list[int]()

    def begin(self, turn: Turn) -> None:
        """Update the tree from the pool, and index the prompt."""
        self._trees.read_pool()
        self._recent = list(turn.prompt_ids[-LONGEST_MATCH:])
        self._cache.start_request(_LIVE, np.array(turn.prompt_ids, dtype=np.int32))

    def propose(self) -> CandidateTree:
        """Propose the package's own choice between both trees."""
        draft = self._cache.speculate(
            _LIVE,
            np.array(self._recent, dtype=np.int32),
            max_spec_tokens=self._budget,
            max_spec_factor=self._alpha,
            min_token_prob=MIN_PROBABILITY,
            use_tree_spec=True,
        )
        return as_tree(draft.token_ids, draft.parents, POOLED)

    def committed(self, path: Sequence[int], token_ids: Sequence[int]) -> None:
        """Append to the live text."""
        self._cache.add_active_response(_LIVE, np.array(token_ids, dtype=np.int32))
        self._recent = [*self._recent, *token_ids][-LONGEST_MATCH:]

    def end(self) -> None:
        """Evict the live text: the pool decides who sees this answer, so the cache must not keep it."""
        self._cache.stop_request(_LIVE)
        self._cache.evict_cached_response(_LIVE)
