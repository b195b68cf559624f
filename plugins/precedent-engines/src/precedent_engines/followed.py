"""The requests of an engine, each with its session: what the packages for vLLM and SGLang share."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from precedent.errors import ContextOverflowError, PrecedentError
from precedent_engines.service import DraftingService
from precedent_engines.session import DraftingSession

_log = logging.getLogger(__name__)

Result = TypeVar("Result")


@dataclass(slots=True)
class Followed:
    """One request: the engine's object, its session if it has one, and how many tokens of the answer that knows."""

    owner: Any
    num_prompt: int
    session: DraftingSession | None
    num_known: int = 0

    def tell(self, new: Sequence[int]) -> None:
        """Report the tokens that the session does not know yet."""
        if self.session is not None and len(new):
            self.session.committed(new)
            self.num_known += len(new)


class FollowedRequests:
    """An engine's requests, by id. What fails here costs drafts only: it is logged once and counted."""

    def __init__(self, service: DraftingService) -> None:
        self.service, self._followed = service, dict[str, Followed]()
        self.num_refused = 0
        """Requests whose session could not begin."""
        self.num_failures = 0
        """Steps that went on without drafts of ours."""

    def guarded(self, act: Callable[[], Result], otherwise: Result) -> Result:
        """What `act` returns; `otherwise` if it fails."""
        try:
            return act()
        except Exception as error:
            self.num_failures += 1
            if self.num_failures == 1:
                _log.error("drafting failed; requests go on without our drafts", exc_info=error)
            return otherwise

    def begin(self, request_id: str, prompt: Sequence[int], **asked: Any) -> DraftingSession | None:
        """`DraftingService.begin`, without a prediction that is too long; None for a request that it refuses."""
        try:
            return self.service.begin(request_id, prompt, **asked)
        except PrecedentError as error:
            if isinstance(error, ContextOverflowError) and asked.get("prediction"):
                _log.warning("request %s: %s", request_id, error)
                return self.begin(request_id, prompt, **{**asked, "prediction": None})
            self.num_refused += 1
            _log.warning("request %s is decoded without our drafts: %s", request_id, error)
            return None

    def follow(
        self,
        request_id: str,
        owner: Any,
        num_prompt: int,
        begin: Callable[[], DraftingSession | None],
        num_answered: int | None = None,
    ) -> Followed:
        """The request of this id; begun again if it is another one by now, or if tokens that are known are gone."""
        one = self._followed.get(request_id)
        shrunk = one is not None and num_answered is not None and num_answered < one.num_known
        if one is None or one.owner is not owner or one.num_prompt != num_prompt or shrunk:
            self.end([request_id])
            one = self._followed[request_id] = Followed(owner, num_prompt, begin())
        return one

    def keep(self, request_ids: Iterable[str]) -> None:
        """End the sessions of all other requests."""
        self.end(self._followed.keys() - set(request_ids))

    def end(self, request_ids: Iterable[str]) -> None:
        """End the sessions of these requests."""
        for request_id in list(request_ids):
            one = self._followed.pop(request_id, None)
            if one is not None and one.session is not None:
                one.session.end()

    def counts(self) -> dict[str, int]:
        """What was counted so far."""
        metrics = self.service.metrics()
        return {
            "drafted_requests": metrics.num_requests,
            "refused_requests": self.num_refused,
            "draft_tokens": metrics.num_draft_tokens,
            "accepted_tokens": metrics.num_accepted_tokens,
            "failed_steps": self.num_failures,
            "store_failures": metrics.store_failures,
        }

    def close(self) -> None:
        """End all sessions, and close the service."""
        self.end(self._followed)
        self.service.close()
