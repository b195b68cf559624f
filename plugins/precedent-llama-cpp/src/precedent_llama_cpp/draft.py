"""The draft model that llama-cpp-python is given: it holds no model, and drafts from a speculation cache."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from precedent.cache import Embedder, SpeculationCache
from precedent.cache.records import check_tenant
from precedent.cache.store_url import Place
from precedent.errors import ConfigError, UnsupportedError
from precedent.planning.costs import CostCurve
from precedent.text.query import CHARACTERS_PER_MESSAGE, prompt_query
from precedent_engines import DRAFTERS, DraftingService, DraftingSession
from precedent_engines.tokenizer import read_tokenizer
from precedent_llama_cpp.answers import watch
from precedent_llama_cpp.following import Following, Ids
from precedent_llama_cpp.library import LlamaCpp

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_log = logging.getLogger(__name__)

LAST_TOKENS = CHARACTERS_PER_MESSAGE // 2
"""Tokens at a prompt's end whose text is looked at for recall's query."""


class PrecedentDraft:
    """`Llama(…, draft_model=draft, flash_attn=True)`, then `draft.attach(model)`; one per model.

    `store` is an open `SpeculationCache`, its folder, file or URL, or None to draft from prompts alone. `tokenizer` is
    the one that the GGUF file's tokens come from: one of transformers, a tokenizer.json or its folder. All requests are
    `tenant`'s; for another one's make another draft model on the same cache. `max_tokens` bounds a draft; what pays is
    learned from the time of the steps, or given as `cost`. Raises what `DraftingService.open` raises, and ConfigError
    for a store without a tenant.
    """

    def __init__(
        self,
        store: SpeculationCache | Place | None,
        tokenizer: PreTrainedTokenizerBase | str | Path,
        *,
        tenant: str | None = None,
        max_tokens: int = 10,
        drafters: Sequence[str] = DRAFTERS,
        embedder: str | Embedder | None = None,
        cost: CostCurve | Mapping[int, float] | None = None,
        executor: Executor | None = None,
        library: LlamaCpp | None = None,
    ) -> None:
        if tenant is not None:
            check_tenant(tenant)
        elif store is not None:
            raise ConfigError("a store needs a tenant: say whose requests these are, or leave the store out")
        found: Any = read_tokenizer(tokenizer) if isinstance(tokenizer, str | Path) else tokenizer
        self._tenant, self._tokenizer, self._library = tenant, found, library or LlamaCpp()
        self._service = DraftingService.open(store, found, drafters, embedder=embedder, cost=cost, executor=executor)
        self._following = Following(self._begin, max_tokens)
        self._model: Any = None
        self._num_requests = self.num_failures = 0

    def attach(self, model: Any) -> Any:
        """Check the `Llama` that has this draft model, and store what it answers; returns it.

        Raises UnsupportedError for a version that is not known, no flash attention or another draft model, and
        CacheMismatchError if the tokenizer is not the model's.
        """
        if self._model is not None:
            raise UnsupportedError("this draft model is attached already: make one for each Llama")
        self._library.check(model, self, self._tokenizer.get_vocab())
        self._model = model
        watch(model, self._finished)
        return model

    def __call__(self, input_ids: Ids, /, **_: Any) -> Ids:
        """Tokens to verify after `input_ids`, int32; none if drafting fails, which is logged once and counted."""
        if self._model is None:
            raise UnsupportedError("call draft.attach(model) first: it sees whether this Llama verifies drafts exactly")
        try:
            return np.array(self._following.draft(input_ids), dtype=np.intc)
        except Exception:
            self.num_failures += 1
            if self.num_failures == 1:
                _log.exception("drafting failed; the model goes on without drafts")
            return np.zeros(0, dtype=np.intc)

    def counts(self) -> dict[str, int]:
        """What was counted so far."""
        metrics = self._service.metrics()
        return {
            "drafted_requests": metrics.num_requests,
            "refused_requests": self._following.num_refused,
            "draft_tokens": metrics.num_draft_tokens,
            "accepted_tokens": metrics.num_accepted_tokens,
            "failed_steps": self.num_failures,
            "store_failures": metrics.store_failures,
        }

    def close(self) -> None:
        """Store what waits, and close the store if it was given by its place."""
        self._following.end()
        self._service.close()

    def _begin(self, prompt: Sequence[int]) -> DraftingSession:
        self._num_requests += 1
        return self._service.begin(
            str(self._num_requests), prompt, tenant=self._tenant, query=self._query(prompt),
            end_token_ids=self._library.end_tokens(self._model),
        )  # fmt: skip

    def _finished(self, prompt: list[int], answer: list[int]) -> None:
        self._following.end([*prompt, *answer])
        if self._tenant is not None and self._service.cache is not None and answer:
            self._service.write_back(prompt, answer, tenant=self._tenant, query=self._query(prompt))

    def _query(self, prompt: Sequence[int]) -> str:
        if self._tenant is None:
            return ""
        return prompt_query(self._tokenizer.decode(list(prompt[-LAST_TOKENS:]), skip_special_tokens=True))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
