"""Drafting from texts known before the answer begins: the caller's prediction, premade responses.

They are followed as recall follows stored completions: by the longest match, with a trail that resumes after a
difference, and with votes if several texts agree with the output. The index belongs to one request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from precedent.drafters.base import NODE, Nodes
from precedent.drafters.matching.occurrences import HIT, Occurrences, Text, VoteWeights
from precedent.drafters.matching.search import Found, SearchSession
from precedent.drafters.matching.token_index import NOWHERE, TokenIndex
from precedent.drafters.matching.vote_tree import VotePrior
from precedent.drafters.request import Request
from precedent.runtime.compiled import Int32s, Int64s, compiled
from precedent.tree import ROOT

UNKNOWN = 2**31 - 1
"""Stands for one or more unknown tokens in a text; neither it nor anything behind it is proposed."""

GUESSED_BINS = 2
"""Added to the calibration bin of a guessed token: guesses are accepted at a rate of their own."""

_MAX_OCCURRENCES = 128

Marks = NDArray[np.bool_]


class KnownText(NamedTuple):
    """A text as token ids, with `UNKNOWN` for a gap.

    `log_weight` is the log weight of its votes. Groups 0 and 1 are calibrated separately. `guessed` marks less certain
    tokens (`[num_tokens]`, or empty for none).
    """

    token_ids: Sequence[int]
    log_weight: float = 0.0
    group: int = 0
    guessed: Sequence[bool] = ()


class KnownTextSession(SearchSession):
    """Follows one output through texts known in advance.

    The estimate of a guessed token is multiplied by `trust`.
    """

    def __init__(
        self, source: str, request: Request, texts: Sequence[KnownText], prior: VotePrior, trust: float = 1.0
    ) -> None:
        super().__init__(source, request, TokenIndex() if texts else None, prior, _MAX_OCCURRENCES)
        self._trust = trust
        if self.index is not None:
            self.index.take(self.index.grown({number: text.token_ids for number, text in enumerate(texts)}))
            self._weights = _weights(texts)
            self._guessed = _guessed(self.index.text, texts)

    def weighted(self) -> tuple[VoteWeights, Int32s]:
        """Every text weighs as it says."""
        return self._weights, NOWHERE

    def nodes(self, found: Found) -> Nodes:
        """The candidates, without what is unknown."""
        return settle(found.nodes, found.heaviest, found.votes, self._guessed, self._trust)


def _weights(texts: Sequence[KnownText]) -> VoteWeights:
    """Weights in which every text is a hit, so that its votes carry its group."""
    hits = [(-1, 0, 0.0), *((slot, text.group, text.log_weight) for slot, text in enumerate(texts))]
    return VoteWeights(np.array(hits, dtype=HIT), np.zeros(len(texts)), recency=0.0)


def _guessed(text: Text, texts: Sequence[KnownText]) -> Marks:
    """The marks by index position; the sequences lie there in order, each after its `START`."""
    marks = np.zeros(text.tokens.size, dtype=np.bool_)
    flat = [mark for known in texts for mark in (False, *(known.guessed or [False] * len(known.token_ids)))]
    marks[np.flatnonzero(text.owners >= 0)] = flat
    return marks


@compiled
def settle(nodes: Nodes, heaviest: Int64s, votes: Occurrences, guessed: Marks, trust: float) -> Nodes:
    """Drop `UNKNOWN` candidates and everything below them; scale guessed ones by `trust`, in bins of their own."""
    kept, size = np.empty(nodes.size, NODE), 0
    place, depth = np.full(nodes.size, -1, np.int32), np.ones(nodes.size, np.int32)
    for i in range(nodes.size):
        above = nodes[i].parent
        if above != ROOT:
            depth[i] = depth[above] + 1
        if nodes[i].token_id == UNKNOWN or (above != ROOT and place[above] < 0):
            continue
        mark = guessed[votes[heaviest[i]].position + depth[i]]
        node, place[i] = kept[size], size
        node.token_id, node.parent = nodes[i].token_id, ROOT if above == ROOT else place[above]
        node.estimate = nodes[i].estimate * trust if mark else nodes[i].estimate
        node.bin = nodes[i].bin + GUESSED_BINS if mark else nodes[i].bin
        size += 1
    return kept[:size]
