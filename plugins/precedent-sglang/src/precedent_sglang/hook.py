"""The hook around SGLang's n-gram worker: it drafts each request's candidate tree from a drafting service."""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import monotonic
from typing import Any

from precedent.errors import UnsupportedError
from precedent.planning.costs import CostCurve
from precedent_engines import DRAFTERS, DraftingService
from precedent_engines.tokenizer import read_tokenizer
from precedent_sglang.nodes import Array
from precedent_sglang.rows import Rows
from precedent_sglang.settings import Settings

_log = logging.getLogger(__name__)

SAME = CostCurve.through({1: 1.0, 65: 1.0})
"""SGLang verifies the same number of nodes at every step, whatever is proposed: none of them costs anything."""

REPORTED = 600.0
"""Seconds between two lines of counts in the log."""


class Hook:
    """Holds what the hook needs in a scheduler's process; a process has one n-gram worker.

    If drafting fails, the step goes on with SGLang's own candidates: that is logged once and counted.
    """

    def __init__(
        self,
        settings: Settings,
        service: DraftingService | None = None,
        decode: Callable[[list[int]], str] | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._settings, self._service, self._decode = settings, service, decode
        self._clock, self._reported = clock, clock()
        self._rows: Rows | None = None
        self.num_failures = 0
        """Steps with SGLang's own candidates only, because ours failed."""

    def start(self, original: Callable[..., None], worker: Any, *arguments: Any, **named: Any) -> None:
        """Around `NGRAMWorker.__init__`: open the store.

        Raises UnsupportedError for several processes per model, and what `DraftingService.open` raises: SGLang then
        does not start.
        """
        original(worker, *arguments, **named)
        _check(worker.server_args)
        if self._service is None:
            self._open(worker)
        assert self._service is not None
        assert self._decode is not None
        self._rows = Rows(self._service, self._settings.tenant, self._decode)

    def prepare(self, original: Callable[..., tuple[Array, Array]], worker: Any, batch: Any) -> tuple[Array, Array]:
        """Around `NGRAMWorker._prepare_draft_tokens`: tokens and mask, of SGLang's shapes and types."""
        drafts, mask = original(worker, batch)
        if self._rows is None:
            return drafts, mask
        try:
            drafts, mask = self._rows.filled(worker, batch, drafts, mask)
        except Exception:
            self.num_failures += 1
            if self.num_failures == 1:
                _log.exception("drafting failed; SGLang's own candidates are verified alone")
        self._report()
        return drafts, mask

    def counts(self) -> dict[str, int]:
        """What was counted so far."""
        if self._service is None or self._rows is None:
            return {}
        metrics = self._service.metrics()
        return {
            "drafted_requests": metrics.num_requests,
            "refused_requests": self._rows.num_refused,
            "draft_tokens": metrics.num_draft_tokens,
            "accepted_tokens": metrics.num_accepted_tokens,
            "failed_steps": self.num_failures,
            "store_failures": metrics.store_failures,
        }

    def close(self) -> None:
        """End all sessions and close the store; SGLang does not call it, a process's end does no harm."""
        if self._rows is not None:
            self._rows.close()
        if self._service is not None:
            self._service.close()
        self._service = self._rows = None

    def _open(self, worker: Any) -> None:
        args, settings = worker.server_args, self._settings
        tokenizer = read_tokenizer(args.tokenizer_path or args.model_path)
        self._decode = lambda ids: tokenizer.decode(ids, skip_special_tokens=True)
        self._service = DraftingService.open(
            settings.store, tokenizer, settings.drafters or DRAFTERS, embedder=settings.embedder, cost=SAME,
            context_length=worker.model_runner.model_config.context_len,
        )  # fmt: skip

    def _report(self) -> None:
        if self._clock() - self._reported >= REPORTED:
            self._reported = self._clock()
            _log.info("drafted so far: %s", self.counts())


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
