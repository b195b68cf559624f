"""The drafting service: the drafters, the planner and the threads that its sessions share."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Self

from precedent.cache import Completion, Embedder, SpeculationCache, prompt_fingerprint
from precedent.cache.records import check_tenant
from precedent.cache.store_url import Place
from precedent.config import SamplingParams
from precedent.drafters import DrafterParts, Request, load_drafters
from precedent.errors import CacheError, CacheMismatchError, ConfigError, EngineClosedError
from precedent.planning.costs import CostCurve
from precedent.planning.planner import Planner
from precedent.planning.warm_up import compile_drafting
from precedent.runtime.background import Background
from precedent.runtime.fence import Fences
from precedent.runtime.plain_values import shown
from precedent.runtime.process import OfOneProcess, check_fork
from precedent.text.templates import Template, Templates
from precedent_engines.requests import (
    check_drafters,
    curve_of,
    fingerprint_of,
    prediction_ids,
    room_after,
    token_ids_of,
    whole_number,
)
from precedent_engines.session import Batch, Clock, DraftingSession
from precedent_engines.tokenizer import codec_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_log = logging.getLogger(__name__)

DRAFTERS = ("recall", "prompt", "template", "prediction")
"""The drafters of a service. Those that need a target model or its rows (draft-model, grammar) are refused."""

WITHOUT_TENANT = ("prompt", "template", "prediction")
"""Those that draft only from what a request brings itself."""

NO_TENANT = ""
"""The tenant of a request without one; no completion can have it."""


@dataclass(frozen=True, slots=True)
class ServiceMetrics:
    """Counts since the service was opened, under vLLM's names where it has one.

    `num_drafts` counts chains and trees with at least one token, `num_draft_tokens` their tokens,
    `num_accepted_tokens` those that were committed (without the target's own), `accepted_by_source` the same by the
    drafter that is credited. `failures_by_drafter` counts requests that went on without a drafter, or without the
    planner or its step costs, because it failed; `degraded` names what is switched off for that. `store_failures`
    counts calls to the store that failed; `store_away` says whether the last one did.
    """

    running: int = 0
    num_requests: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_by_source: Mapping[str, int] = field(default_factory=dict)
    failures_by_drafter: Mapping[str, int] = field(default_factory=dict)
    degraded: tuple[str, ...] = ()
    store_failures: int = 0
    store_away: bool = False


class DraftingService(OfOneProcess):
    """Drafts for the requests of another engine; holds no model and needs no torch.

    `store` is an open speculation cache, its folder, file or URL, or None. `tokenizer` is a transformers tokenizer, a
    tokenizer.json, a folder that holds one, or a Hugging Face id. `embedder` is that of a store given by its place.
    `cost` gives milliseconds of the other engine's step by its width in tokens, `{1: 20.0, 16: 26.0}`; None learns it
    from the time between calls. `context_length` is the longest prompt plus answer, in tokens (None: not checked).
    `executor` embeds, searches, reads and stores, and is shut down with the service (None: two threads of its own).

    `begin`, `chain` and `chains` never wait for those threads, nor for the store. If the store fails, requests go on
    with what can be drafted from the prompt; that is logged once and counted. Any thread may use a service; a process
    forked after it was opened may not, and gets UnsupportedError.

    Raises CacheMismatchError if the store holds completions of other tokenizers only, ConfigError for an unknown or
    unsuitable drafter, ModelLoadError for a tokenizer that cannot be read, and CacheError for a store that cannot be
    opened. A database server that does not answer is no error: it is tried again while requests run.
    """

    instead = "open it in the process that uses it"

    def __init__(
        self,
        store: SpeculationCache | Place | None,
        tokenizer: PreTrainedTokenizerBase | str | Path,
        drafters: Sequence[str] = DRAFTERS,
        *,
        embedder: str | Embedder | None = None,
        cost: CostCurve | Mapping[int, float] | None = None,
        context_length: int | None = None,
        executor: Executor | None = None,
        clock: Clock = perf_counter,
    ) -> None:
        check_fork()
        check_drafters(drafters)
        curve, (self._codec, self._num_tokens) = curve_of(cost), codec_of(tokenizer)
        if context_length is not None:
            whole_number(context_length, "context_length", least=1)
        self._context_length = context_length
        self.cache, self.health = _opened(store, embedder), StoreHealth()
        self._owned = None if self.cache is store else self.cache
        try:
            if self.cache is not None:
                check_tokenizer(self.cache, self._codec.fingerprint, self.health)
        except BaseException:
            if self._owned is not None:
                self._owned.close()
            raise
        self._executor = executor or Background(2, "precedent-service")
        fences = Fences(switch_off=False)  # a store that is away answers at once, and says when it is back
        parts = DrafterParts(
            self._codec.fingerprint, self._executor, self.cache, codec=self._codec, report=self.health.report,
            fences=fences,
        )  # fmt: skip
        self._drafters = {drafter.name: drafter for drafter in load_drafters(drafters, parts)}
        self._batch = Batch(Planner(curve), clock)
        self._sessions: dict[str, DraftingSession] = {}
        self._gate, self._closed, self._num_requests = threading.Lock(), False, 0
        compile_drafting()
        if self.cache is not None and "recall" in self._drafters:
            self._executor.submit(self.cache.warm_up).add_done_callback(self.health.report)

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
        self.check_process()
        if tenant is not None:
            check_tenant(tenant)
        for name, text in (("request_id", request_id), ("query", query), ("workflow_step", workflow_step)):
            if not isinstance(text, str):
                raise ConfigError(f"{name}={shown(text)} must be a text")
        prompt = tuple(token_ids_of(prompt_ids, "the prompt's ids"))
        room = room_after(len(prompt), self._context_length)
        request = Request(
            request_id=request_id,
            prompt_ids=prompt,
            sampling=SamplingParams(),
            tenant=tenant or NO_TENANT,
            query=query,
            workflow_step=workflow_step,
            tools=fingerprint_of(tools),
            num_tokens=self._num_tokens,
            end_token_ids=frozenset(token_ids_of(end_token_ids, "the end tokens")),
            prediction=prediction_ids(prediction, self._codec, room),
            templates=tuple(Templates(templates)),
        )
        with self._gate:
            if self._closed:
                raise EngineClosedError("this drafting service is closed: open another one")
            if request_id in self._sessions:
                raise ConfigError(f"request {request_id!r} is being drafted for already: end its session first")
            allowed = {name: each for name, each in self._drafters.items() if tenant or name in WITHOUT_TENANT}
            begun = self._batch.begin(allowed, request)
            self._sessions[request_id] = session = DraftingSession(self._batch, request, begun, room, self._ended)
            self._num_requests += 1
        return session

    def chains(self, sessions: Sequence[DraftingSession], max_tokens: int) -> list[list[int]]:
        """`DraftingSession.chain` for the requests of one batch: one list per session, in this order.

        All rows of the batch share the time of its step, so a token must pay for the requests beside it. The cost curve
        is learned from the time between the end of one call and the beginning of the next: call it once per step, with
        every running request.
        """
        self.check_process()
        most = whole_number(max_tokens, "max_tokens")
        if len({id(session) for session in sessions}) < len(sessions):
            raise ConfigError("a session is in the batch twice: give each running request once")
        return self._batch.chains(sessions, most)

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
        """Store a finished answer, so that later requests are drafted from it; nothing is stored without this call.

        `answer_ids` are the ids as generated, end token included. It returns at once; the future holds the completion's
        id, 0 if nothing could be stored, or the store's CacheError. Raises ConfigError without a store, PromptError for
        what is not a token id, and CacheError for an invalid tenant name.
        """
        self.check_process()
        if self.cache is None:
            raise ConfigError("this drafting service has no store to write to: open it with one")
        check_tenant(tenant)
        answer = tuple(token_ids_of(answer_ids, "the answer's ids"))
        completion = Completion(
            token_ids=answer,
            tokenizer=self._codec.fingerprint,
            model=model,
            tenant=tenant,
            query=query,
            prompt_fingerprint=prompt_fingerprint(token_ids_of(prompt_ids, "the prompt's ids")),
            tools=fingerprint_of(tools),
            workflow_step=workflow_step,
            text=self._codec.decode(answer),
        )
        written: Future[int] = self._executor.submit(self.cache.insert, completion)
        written.add_done_callback(self.health.report)
        return written

    def metrics(self) -> ServiceMetrics:
        """What was counted since the service was opened."""
        self.check_process()
        batch = self._batch
        with batch.lock:
            accepted = dict(batch.accepted_by_source)
            return ServiceMetrics(
                running=len(self._sessions),
                num_requests=self._num_requests,
                num_drafts=batch.num_drafts,
                num_draft_tokens=batch.num_draft_tokens,
                num_accepted_tokens=sum(accepted.values()),
                accepted_by_source=accepted,
                failures_by_drafter=batch.fences.faults(),
                degraded=batch.fences.degraded(),
                store_failures=self.health.failures,
                store_away=self.health.away,
            )

    def close(self) -> None:
        """End all sessions and wait for pending writes; may be called again.

        A store that was given by its place is closed as well.
        """
        if not self.is_here:
            return
        with self._gate:
            self._closed, sessions = True, list(self._sessions.values())
        for session in sessions:
            session.end()
        for drafter in self._drafters.values():
            drafter.close()
        self._drafters = {}
        self._executor.shutdown(wait=True)
        if self._owned is not None:
            self._owned.close()

    def _ended(self, request_id: str) -> None:
        with self._gate:
            self._sessions.pop(request_id, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _opened(store: SpeculationCache | Place | None, embedder: str | Embedder | None) -> SpeculationCache | None:
    if store is not None and not isinstance(store, SpeculationCache):
        return SpeculationCache.open(store, embedder=embedder)
    if embedder is not None:
        raise ConfigError("embedder is for a store given by its place: an open cache has one already, leave it out")
    return store


class StoreHealth:
    """Hears of every finished call to the store, on any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.failures, self.away = 0, False

    def report(self, work: Future[Any]) -> None:
        """Take note of a finished call; a cancelled one says nothing."""
        if not work.cancelled():
            self.note(work.exception())

    def note(self, error: BaseException | None) -> None:
        """Count a failure, and log the first one after a success; log as well when the store answers again."""
        with self._lock:
            was_away, self.away = self.away, error is not None
            self.failures += self.away
        if error is not None and not was_away:
            _log.warning("the store failed, drafting goes on with what the requests bring: %s", error)
        elif was_away and error is None:
            _log.info("the store answers again")


def check_tokenizer(cache: SpeculationCache, fingerprint: str, health: StoreHealth) -> None:
    """Raise CacheMismatchError if a store holds completions of other tokenizers only.

    A store that does not answer is noted as away; its completions have their tokenizer's fingerprint, so none of
    another tokenizer is ever drafted from.
    """
    try:
        stored = cache.tokenizers()
    except CacheMismatchError:
        raise
    except CacheError as error:
        health.note(error)
        return
    if stored and fingerprint not in stored:
        others = ", ".join(sorted(stored)[:3])
        raise CacheMismatchError(
            f"the store holds completions of other tokenizers only ({others}; this one is {fingerprint}): "
            "give the tokenizer that wrote them, or another store"
        )
