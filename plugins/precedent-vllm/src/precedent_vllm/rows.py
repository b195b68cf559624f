"""The requests in vLLM's batch, and a drafting session for each; knows arrays, and nothing of vLLM's classes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from precedent.errors import ContextOverflowError, PrecedentError
from precedent_engines import DraftingService, DraftingSession
from precedent_vllm.note import NAME, NOTHING, Note

_log = logging.getLogger(__name__)

OFF = "off"
"""What a request writes instead of a note to be decoded without speculation."""


class RequestState(Protocol):
    """What is read of vLLM's `CachedRequestState`: one object per request, until vLLM forgets it."""

    prompt_token_ids: Sequence[int] | None
    sampling_params: Any


@dataclass(slots=True)
class _Tracked:
    """A request, its session if it has one, and how many of its tokens the session knows."""

    state: RequestState
    session: DraftingSession | None
    num_prompt: int
    num_known: int
    longest: int


class Rows:
    """Follows vLLM's requests by their ids, whatever slots they move to, and drafts for a step's batch at once."""

    def __init__(self, service: DraftingService, max_tokens: int, read: Callable[[Any], Note | None]) -> None:
        self._service, self._max_tokens, self._read = service, max_tokens, read
        self._tracked: dict[str, _Tracked] = {}
        self.num_refused = 0
        """Requests without drafts because a session could not begin."""

    def arrived(self, requests: Mapping[str, RequestState]) -> None:
        """Begin a session for each new one of all requests that vLLM knows, and end those of requests that are gone."""
        self._end({req_id for req_id in self._tracked if req_id not in requests})
        for req_id, state in requests.items():
            self._tracked_as(req_id, state)

    def propose(
        self,
        req_ids: Sequence[str],
        requests: Mapping[str, RequestState],
        sampled: Sequence[Sequence[int]],
        lengths: Sequence[int],
        tokens: Any,
    ) -> list[list[int]]:
        """One list of drafts per row; empty for a row that sampled nothing, as in a part of its prompt.

        `lengths` are the rows' tokens in `tokens` ([rows, context]), those just sampled included. `requests` are all
        that vLLM knows, waiting ones as well; sessions of others end.
        """
        self._end({req_id for req_id in self._tracked if req_id not in requests})
        drafts: list[list[int]] = [[] for _ in sampled]
        rows, found = list[int](), list[_Tracked]()
        for row, (req_id, new) in enumerate(zip(req_ids, sampled, strict=False)):
            one = self._followed(req_id, requests[req_id], tokens[row], int(lengths[row]))
            if one.session is not None and len(new):
                rows.append(row)
                found.append(one)
        chains = self._service.chains([one.session for one in found if one.session], self._max_tokens) if found else []
        for row, one, chain in zip(rows, found, chains, strict=True):
            drafts[row] = chain[: max(0, one.longest - one.num_known - 1)]
        return drafts

    def close(self) -> None:
        """End all sessions."""
        self._end(self._tracked.keys())

    def _followed(self, req_id: str, state: RequestState, tokens: Any, length: int) -> _Tracked:
        """The request, its session knowing its first `length` tokens; one that knows more is begun again."""
        one = self._tracked_as(req_id, state)
        if length < one.num_known:
            self._end([req_id])
            one = self._tracked_as(req_id, state)
        if one.session is not None and length > one.num_known:
            one.session.committed(tokens[one.num_known : length])
            one.num_known = length
        return one

    def _tracked_as(self, req_id: str, state: RequestState) -> _Tracked:
        """The request, begun if it is new; another request of the same id ends first."""
        one = self._tracked.get(req_id)
        if one is None or one.state is not state or one.num_prompt != _prompt_length(state):
            self._end([req_id])
            one = self._tracked[req_id] = self._begun(req_id, state)
        return one

    def _begun(self, req_id: str, state: RequestState) -> _Tracked:
        params, prompt = state.sampling_params, state.prompt_token_ids
        num_prompt = _prompt_length(state)
        most = getattr(params, "max_tokens", None)
        longest = num_prompt + (2**31 if most is None else int(most))
        arguments = getattr(params, "extra_args", None) or {}
        note = self._note(arguments.get(NAME))
        session = self._session(req_id, prompt, note, _stops(params)) if prompt and note.on else None
        return _Tracked(state, session, num_prompt, num_prompt, longest)

    def _note(self, text: Any) -> Note:
        return Note(on=False) if text == OFF else self._read(text) or NOTHING

    def _session(self, req_id: str, prompt: Sequence[int], note: Note, stops: Iterable[int]) -> DraftingSession | None:
        """A session; without the prediction if that is too long, None if the request cannot have one at all."""
        for prediction in (note.prediction, None) if note.prediction else (None,):
            try:
                return self._service.begin(
                    req_id, prompt, tenant=note.tenant, query=note.query, workflow_step=note.workflow_step,
                    tools=note.tools, end_token_ids=stops, prediction=prediction,
                )  # fmt: skip
            except ContextOverflowError as error:
                _log.warning("request %s: %s", req_id, error)
            except PrecedentError as error:
                _log.warning("request %s is decoded without drafts: %s", req_id, error)
                break
        self.num_refused += 1
        return None

    def _end(self, req_ids: Iterable[str]) -> None:
        for req_id in list(req_ids):
            one = self._tracked.pop(req_id, None)
            if one is not None and one.session is not None:
                one.session.end()


def _prompt_length(state: RequestState) -> int:
    return 0 if state.prompt_token_ids is None else len(state.prompt_token_ids)


def _stops(params: Any) -> Iterable[int]:
    """The tokens that end an answer; the model's own do not where vLLM is told to ignore them."""
    name = "stop_token_ids" if getattr(params, "ignore_eos", False) else "all_stop_token_ids"
    return getattr(params, name, None) or ()
