"""The hook around SGLang's n-gram worker: it drafts each request's candidate tree from a drafting service."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

from precedent.errors import PrecedentError, UnsupportedError
from precedent.planning.costs import CostCurve
from precedent.text.query import CHARACTERS_PER_MESSAGE, prompt_query
from precedent_engines import DRAFTERS, DraftingService, DraftingSession
from precedent_engines.followed import FollowedRequests
from precedent_engines.tokenizer import read_tokenizer
from precedent_sglang.nodes import Array, merged
from precedent_sglang.settings import Settings

_log = logging.getLogger(__name__)

SAME = CostCurve.through({1: 1.0, 65: 1.0})
"""SGLang verifies the same number of nodes at every step, whatever is proposed: none of them costs anything."""

REPORTED = 600.0
"""Seconds between two lines of counts in the log."""

LAST_TOKENS = CHARACTERS_PER_MESSAGE // 2
"""Tokens at a prompt's end whose text is looked at for recall's query; a token has two characters or more, mostly."""


class ContractError(PrecedentError):
    """SGLang handed over something else than the version that was read."""


class Hook:
    """Holds what the hook needs in a scheduler's process; a process has one n-gram worker.

    If drafting fails, the step goes on with SGLang's own candidates: that is logged once and counted.
    """

    def __init__(
        self,
        settings: Settings,
        service: DraftingService | None = None,
        decode: Callable[[list[int]], str] | None = None,
    ) -> None:
        self._settings, self._decode, self._reported = settings, decode, monotonic()
        self._requests = None if service is None else FollowedRequests(service)

    def start(self, original: Callable[..., None], worker: Any, *arguments: Any, **named: Any) -> None:
        """Around `NGRAMWorker.__init__`: open the store.

        Raises UnsupportedError for several processes per model, and what `DraftingService` raises: SGLang then does
        not start.
        """
        original(worker, *arguments, **named)
        args, settings = worker.server_args, self._settings
        _check(args)
        if self._requests is None:
            tokenizer = read_tokenizer(args.tokenizer_path or args.model_path)
            self._decode = lambda ids: tokenizer.decode(ids, skip_special_tokens=True)
            service = DraftingService(
                settings.store, tokenizer, settings.drafters or DRAFTERS, embedder=settings.embedder, cost=SAME,
                context_length=worker.model_runner.model_config.context_len,
            )  # fmt: skip
            self._requests = FollowedRequests(service)

    def prepare(self, original: Callable[..., tuple[Array, Array]], worker: Any, batch: Any) -> tuple[Array, Array]:
        """Around `NGRAMWorker._prepare_draft_tokens`: tokens and mask, of SGLang's shapes and types."""
        drafts, mask = original(worker, batch)
        if (requests := self._requests) is None:
            return drafts, mask
        filled = requests.guarded(lambda: self._filled(requests, worker, batch, drafts, mask), (drafts, mask))
        if monotonic() - self._reported >= REPORTED:
            self._reported = monotonic()
            _log.info("drafted so far: %s", self.counts())
        return filled

    def counts(self) -> dict[str, int]:
        """What was counted so far."""
        return {} if self._requests is None else self._requests.counts()

    def close(self) -> None:
        """End all sessions and close the store; SGLang does not call it, a process's end does no harm."""
        if self._requests is not None:
            self._requests.close()
        self._requests = None

    def _filled(
        self, requests: FollowedRequests, worker: Any, batch: Any, drafts: Array, mask: Array
    ) -> tuple[Array, Array]:
        """New arrays `[requests * width]` and `[requests * width * width]`: our candidates first, then SGLang's own.

        Raises ContractError for a batch unlike the one of the version that was read.
        """
        width, reqs = worker.draft_token_num, batch.reqs
        if drafts.shape != (len(reqs) * width,) or mask.shape != (len(reqs) * width * width,):
            raise ContractError(f"{len(reqs)} requests of {width} nodes have shapes {drafts.shape} and {mask.shape}")
        requests.keep(req.rid for req in reqs)
        tokens, masks = drafts.copy().reshape(-1, width), mask.copy().reshape(-1, width, width)
        for row, (req, length) in enumerate(zip(reqs, batch.seq_lens_cpu.tolist(), strict=True)):
            session = self._session(requests, req, length, _staged(worker, row))
            tree = None if session is None else session.tree(width - 1)
            if tree:
                tokens[row], masks[row] = merged(tree, tokens[row], masks[row])
        return tokens.reshape(-1), masks.reshape(-1)

    def _session(
        self, requests: FollowedRequests, req: Any, length: int, staged: Sequence[int]
    ) -> DraftingSession | None:
        """The request's session, knowing all that was committed.

        `length` tokens are in the cache, and one more is committed. With overlapped scheduling the last step's tokens
        may still be missing in `output_ids`, or be there already if another batch ran in between: the length tells.
        """
        num_prompt = len(req.origin_input_ids)
        answered = length + 1 - num_prompt
        missing = answered - len(req.output_ids)
        if not 0 <= missing <= len(staged):
            raise ContractError(f"request {req.rid} lacks {missing} tokens, and the last step committed {len(staged)}")
        one = requests.follow(req.rid, req, num_prompt, lambda: self._begun(requests, req), answered)
        one.tell([*req.output_ids[one.num_known :], *staged[len(staged) - missing :]])
        return one.session

    def _begun(self, requests: FollowedRequests, req: Any) -> DraftingSession | None:
        prompt, tenant, decode = list(req.origin_input_ids_unpadded), self._settings.tenant, self._decode
        query = prompt_query(decode(prompt[-LAST_TOKENS:])) if tenant and decode else ""
        return requests.begin(req.rid, prompt, tenant=tenant, query=query, end_token_ids=_stops(req))


def _check(args: Any) -> None:
    """Raise UnsupportedError where several processes hold one model.

    Each of them drafts for itself, and all must draft the same; ours depend on when the store answers.
    """
    for name in ("tp_size", "pp_size"):
        if getattr(args, name) > 1:
            raise UnsupportedError(
                f"SGLang runs with {name}={getattr(args, name)}: its processes draft each for itself and must agree, "
                "which drafts from a store cannot promise. Set PRECEDENT_SGLANG=off there; external corpora "
                "(precedent_sglang.Corpora) work with it"
            )


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
