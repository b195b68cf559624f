"""The requests in SGLang's decode batch, and a drafting session for each; imports nothing of SGLang."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from precedent.errors import PrecedentError
from precedent.text.query import CHARACTERS_PER_MESSAGE, prompt_query
from precedent_engines import DraftingService, DraftingSession
from precedent_sglang.nodes import Array, merged

_log = logging.getLogger(__name__)

LAST_TOKENS = CHARACTERS_PER_MESSAGE // 2
"""Tokens at a prompt's end whose text is looked at for recall's query; a token has two characters or more, mostly."""


class ContractError(PrecedentError):
    """SGLang handed over something else than the version that was read."""


@dataclass(slots=True)
class _Tracked:
    """A request, its session if it has one, and how many tokens of the answer the session knows."""

    req: Any
    session: DraftingSession | None
    num_known: int = 0


class Rows:
    """Follows requests by their ids and objects, and puts our candidates into the arrays of a step."""

    def __init__(self, service: DraftingService, tenant: str | None, decode: Callable[[list[int]], str]) -> None:
        self._service, self._tenant, self._decode = service, tenant, decode
        self._tracked: dict[str, _Tracked] = {}
        self.num_refused = 0
        """Requests whose session could not begin."""

    def filled(self, worker: Any, batch: Any, drafts: Array, mask: Array) -> tuple[Array, Array]:
        """New arrays `[requests * width]` and `[requests * width * width]`: our candidates first, then SGLang's own.

        Raises ContractError for a batch unlike the one of the version that was read.
        """
        width, reqs = worker.draft_token_num, batch.reqs
        if drafts.shape != (len(reqs) * width,) or mask.shape != (len(reqs) * width * width,):
            raise ContractError(f"{len(reqs)} requests of {width} nodes have shapes {drafts.shape} and {mask.shape}")
        self._end(self._tracked.keys() - {req.rid for req in reqs})
        tokens, masks = drafts.copy().reshape(-1, width), mask.copy().reshape(-1, width, width)
        for row, (req, length) in enumerate(zip(reqs, batch.seq_lens_cpu.tolist(), strict=True)):
            session = self._followed(req, length, _staged(worker, row))
            tree = None if session is None else session.tree(width - 1)
            if tree:
                tokens[row], masks[row] = merged(tree, tokens[row], masks[row])
        return tokens.reshape(-1), masks.reshape(-1)

    def close(self) -> None:
        """End all sessions."""
        self._end(self._tracked)

    def _followed(self, req: Any, length: int, staged: Sequence[int]) -> DraftingSession | None:
        """The request's session, knowing all that was committed.

        `length` tokens are in the cache, and one more is committed. With overlapped scheduling the last step's tokens
        may still be missing in `output_ids`, or be there already if another batch ran in between: the length tells.
        """
        answered = length + 1 - len(req.origin_input_ids)
        missing = answered - len(req.output_ids)
        if not 0 <= missing <= len(staged):
            raise ContractError(f"request {req.rid} lacks {missing} tokens, and the last step committed {len(staged)}")
        one = self._tracked.get(req.rid)
        if one is None or one.req is not req or answered < one.num_known:
            self._end([req.rid])
            one = self._tracked[req.rid] = _Tracked(req, self._begun(req))
        if one.session is not None and answered > one.num_known:
            one.session.committed([*req.output_ids[one.num_known :], *staged[len(staged) - missing :]])
            one.num_known = answered
        return one.session

    def _begun(self, req: Any) -> DraftingSession | None:
        prompt = list(req.origin_input_ids_unpadded)
        try:
            query = prompt_query(self._decode(prompt[-LAST_TOKENS:])) if self._tenant else ""
            return self._service.begin(req.rid, prompt, tenant=self._tenant, query=query, end_token_ids=_stops(req))
        except PrecedentError as error:
            self.num_refused += 1
            _log.warning("request %s is drafted for by SGLang alone: %s", req.rid, error)
            return None

    def _end(self, rids: Iterable[str]) -> None:
        for rid in list(rids):
            one = self._tracked.pop(rid, None)
            if one is not None and one.session is not None:
                one.session.end()


def _staged(worker: Any, row: int) -> Sequence[int]:
    """The tokens that a request's last step committed, where SGLang has not yet put them into `output_ids`."""
    start = row * worker.draft_token_num
    found: Sequence[int] = worker.prev_token_ids[start : start + worker.prev_accept_lens[row]]
    return found


def _stops(req: Any) -> set[int]:
    """The tokens that end an answer."""
    params, tokenizer = req.sampling_params, req.tokenizer
    if params.ignore_eos:
        return set()
    found = set(params.stop_token_ids or ()) | set(req.eos_token_ids or ())
    if tokenizer is not None:
        found |= {tokenizer.eos_token_id, *(getattr(tokenizer, "additional_stop_token_ids", None) or ())}
    return found - {None}
