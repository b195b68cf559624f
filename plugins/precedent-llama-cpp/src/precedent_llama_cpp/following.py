"""The request that a model is answering, told from token ids alone: a draft model is told nothing else."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from precedent.errors import PrecedentError
from precedent_engines import DraftingSession

_log = logging.getLogger(__name__)

Ids = NDArray[np.intc]


class Following:
    """One request after the other: a session per request, begun where the ids do not go on as one step would have them.

    A step commits the tokens of the last draft up to the first that the model chose otherwise, and the model's own one.
    So ids that go on in another way are another request's, even where they begin with all of the last one's, as the
    next turn of a conversation does.
    """

    def __init__(self, begin: Callable[[Sequence[int]], DraftingSession], max_tokens: int) -> None:
        self._begin, self._max_tokens = begin, max_tokens
        self._session: DraftingSession | None = None
        self._known: Ids = np.zeros(0, dtype=np.intc)
        self._drafted: list[int] = []
        self.num_refused = 0
        """Requests without drafts because a session could not begin."""

    def draft(self, ids: Ids) -> list[int]:
        """Tokens to verify after `ids`, prompt and answer so far; the last of them was sampled just now."""
        if not self._goes_on(ids):
            self.end()
            self._session = self._begun(ids[:-1].tolist())
            self._known = ids[:-1]
        new, self._known, self._drafted = ids[len(self._known) :].tolist(), ids.copy(), []
        if self._session is not None:
            self._session.committed(new)
            self._drafted = self._session.chain(self._max_tokens)
        return self._drafted

    def end(self, whole: Sequence[int] = ()) -> None:
        """End the request's session; `whole` are prompt and answer, if they are known: the last step's tokens too."""
        session, self._session = self._session, None
        known, self._known, self._drafted = self._known.tolist(), np.zeros(0, dtype=np.intc), []
        if session is not None:
            if known == list(whole[: len(known)]):
                session.committed(whole[len(known) :])
            session.end()

    def _goes_on(self, ids: Ids) -> bool:
        known, grown = len(self._known), len(ids) - len(self._known)
        return (
            known > 0
            and grown > 0
            and np.array_equal(ids[:known], self._known)
            and ids[known:-1].tolist() == self._drafted[: grown - 1]
        )

    def _begun(self, prompt: list[Any]) -> DraftingSession | None:
        try:
            return self._begin(prompt)
        except PrecedentError as error:
            self.num_refused += 1
            _log.warning("a request is decoded without drafts: %s", error)
            return None
