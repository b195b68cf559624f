"""The drafting service: the drafters, the planner and the threads that its sessions share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from precedent.cache import SpeculationCache
from precedent.cache.search.embedder import Embedder
from precedent.cache.store.store_url import Place
from precedent.planning.costs import CostCurve
from precedent.runtime.process import OfOneProcess
from precedent.service.metrics import ServiceMetrics
from precedent.service.session import DraftingSession
from precedent.text.templates import Template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DRAFTERS = ("recall", "prompt", "template", "prediction")
"""The drafters of a service. Those that need a target model or its rows (draft-model, grammar) are refused."""


class DraftingService(OfOneProcess):
    """Drafts for the requests of another engine; holds no model and needs no torch.

    Threads of its own embed, search and read; `begin`, `chain` and `chains` never wait for them, nor for the store. If
    the store fails, requests go on with what can be drafted from the prompt; that is logged once and counted. Any
    thread may use a service; a process forked after it was opened may not, and gets UnsupportedError.
    """

    instead = "open it in the process that uses it"

    @classmethod
    def open(
        cls,
        store: SpeculationCache | Place | None,
        tokenizer: PreTrainedTokenizerBase | str | Path,
        drafters: Sequence[str] = DRAFTERS,
        *,
        embedder: str | Embedder | None = None,
        cost: CostCurve | Mapping[int, float] | None = None,
        context_length: int | None = None,
    ) -> Self:
        """Open a service on a speculation cache: an open one, its folder, file or URL, or None for none.

        `tokenizer` is a transformers tokenizer, a tokenizer.json, a folder that holds one, or a Hugging Face id.
        `embedder` is that of a store given by its place. `cost` gives milliseconds of the other engine's step by its
        width in tokens, `{1: 20.0, 16: 26.0}`; None learns it from the time between calls. `context_length` is the
        longest prompt plus answer, in tokens (None: not checked). Raises CacheMismatchError if the store holds
        completions of other tokenizers only, ConfigError for an unknown or unsuitable drafter, ModelLoadError for a
        tokenizer that cannot be read, and CacheError for a store that cannot be opened. A database server that does not
        answer is no error: it is tried again while requests run.
        """
        raise NotImplementedError

    def begin(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        *,
        tenant: str | None = None,
        query: str = "",
        workflow_step: str = "",
        tools: str | Sequence[Mapping[str, Any]] = "",
        end_token_ids: Iterable[int] = (),
        prediction: str | Sequence[int] | None = None,
        templates: Iterable[str | Template] = (),
    ) -> DraftingSession:
        """Begin drafting for a request; takes about a millisecond per 2,000 tokens of prompt and prediction.

        Without a `tenant` only what the request itself brings is drafted from: prompt, prediction and templates. Recall
        finds prior completions by the text `query` (`precedent.text.query.recall_query` builds one from messages);
        without one all of the tenant's completions weigh the same. `tools` are the schemas of the bound tools, or their
        fingerprint (`precedent.cache.tools_fingerprint`). Nothing follows a token of `end_token_ids`. `prediction` is
        the caller's guess of the answer, a text or token ids.

        Raises ConfigError for a request id whose session has not ended (that session goes on), PromptError for an
        empty prompt or what is not a token id, ContextOverflowError for a prompt or a prediction longer than the
        context, CacheError for an invalid tenant name, and EngineClosedError after `close`.
        """
        raise NotImplementedError

    def chains(self, sessions: Sequence[DraftingSession], max_tokens: int) -> list[list[int]]:
        """`DraftingSession.chain` for the requests of one batch: one list per session, in this order.

        All rows of the batch share the time of its step, so a token must pay for the requests beside it. The cost curve
        is learned from the time between the end of one call and the beginning of the next: call it once per step, with
        every running request.
        """
        raise NotImplementedError

    def write_back(
        self,
        prompt_ids: Sequence[int],
        answer_ids: Sequence[int],
        *,
        tenant: str,
        query: str = "",
        workflow_step: str = "",
        tools: str | Sequence[Mapping[str, Any]] = "",
        model: str = "",
    ) -> Future[int]:
        """Store a finished answer (its ids as generated, end token included) so that later requests are drafted from it.

        Nothing is ever stored without this call. It returns at once; the future holds the completion's id, 0 if nothing
        could be stored, or the store's CacheError. Raises ConfigError without a store, and CacheError for an invalid
        tenant name.
        """
        raise NotImplementedError

    def metrics(self) -> ServiceMetrics:
        """What was counted since the service was opened."""
        raise NotImplementedError

    def close(self) -> None:
        """End all sessions and wait for pending writes; closes the store if it was given by its place. May be repeated."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
