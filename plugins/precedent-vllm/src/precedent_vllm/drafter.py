"""The class that vLLM's speculative method `custom_class` loads in its workers."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from precedent_engines import DRAFTERS, DraftingService
from precedent_vllm.counts import Publisher, Series, drafted
from precedent_vllm.engine import Vllm
from precedent_vllm.note import Note, unseal
from precedent_vllm.rows import RequestState, Rows
from precedent_vllm.settings import Settings

_log = logging.getLogger(__name__)


class Drafter:
    """Drafts for vLLM's batch from the store that the environment names; holds no model.

    vLLM makes one per worker. Where several workers hold parts of one model, only the one whose drafts vLLM takes opens
    the store. Raises UnsupportedError for a vLLM that this package does not know, and what `DraftingService.open`
    raises: vLLM then does not start.
    """

    def __init__(
        self,
        vllm_config: Any,
        vllm: Vllm | None = None,
        settings: Settings | None = None,
        service: DraftingService | None = None,
    ) -> None:
        self._vllm = vllm = vllm or Vllm()
        self._settings = settings = settings or Settings.read()
        vllm.check_version()
        self.runner: Any = None
        self.num_failures = 0
        """Steps without drafts because drafting failed."""
        self._service: DraftingService | None = None
        if settings.on and vllm.counts(vllm_config):
            self._service = service = service or _opened(settings, vllm_config.model_config)
            self._rows = Rows(service, vllm_config.speculative_config.num_speculative_tokens, self._read)
            self._publisher = Publisher(settings.folder, self.counts)
            vllm.hand_over_runner(self)

    def load_model(self, *_: Any, **__: Any) -> None:
        """Nothing to load; see that vLLM's rejection sampler on this machine is right. Raises UnsupportedError."""
        self._vllm.check_rejection_sampler()

    def arrived(self, requests: Mapping[str, RequestState]) -> None:
        """Begin drafting for those of vLLM's requests that are new, before their prompts are computed."""
        if self._service is not None:
            try:
                self._rows.arrived(requests)
            except Exception as error:
                self._failed(error)

    def propose(
        self, sampled_token_ids: Sequence[Sequence[int]], num_tokens_no_spec: Any, token_ids_cpu: Any, **_: Any
    ) -> list[list[int]]:
        """One list of drafts per row of the batch, `[]` for none; a failure is logged and counted, and costs drafts."""
        none: list[list[int]] = [[] for _ in sampled_token_ids]
        if self._service is None:
            return none
        try:
            return self._rows.propose(
                self.runner.input_batch.req_ids, self.runner.requests,
                sampled_token_ids, num_tokens_no_spec, token_ids_cpu,
            )  # fmt: skip
        except Exception as error:
            self._failed(error)
            return none

    def _failed(self, error: Exception) -> None:
        self.num_failures += 1
        if self.num_failures == 1:
            _log.error("drafting failed; requests go on without drafts", exc_info=error)

    def counts(self) -> Series:
        """What was counted so far, for Prometheus."""
        assert self._service is not None
        return drafted(self._service.metrics(), self._rows.num_refused, self.num_failures)

    def close(self) -> None:
        """End all sessions and close the store; vLLM does not call it, a process's end does no harm."""
        if self._service is not None:
            self._publisher.close()
            self._rows.close()
            self._service.close()
            self._service = None

    def _read(self, text: Any) -> Note | None:
        """The note of our own middleware; else what holds for every request of this server."""
        tenant = self._settings.tenant
        return unseal(text, self._settings.secret) or (Note(tenant=tenant) if tenant else None)


def _opened(settings: Settings, model: Any) -> DraftingService:
    return DraftingService.open(
        settings.store, model.tokenizer, settings.drafters or DRAFTERS,
        embedder=settings.embedder, cost=settings.step_cost, context_length=model.max_model_len,
    )  # fmt: skip
