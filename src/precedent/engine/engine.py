"""The engine: its parts, the worker thread that runs them, and the way in for requests."""

from __future__ import annotations

import logging
import secrets
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from precedent.cache import Completion, model_fingerprint, prompt_fingerprint, tokenizer_fingerprint
from precedent.config import EngineLimits, PromptScores, SamplingParams, SpeculationConfig
from precedent.decoding.loop import StepObserver, loop_class
from precedent.decoding.sequence import Emission
from precedent.decoding.stats import GenerationStats
from precedent.drafters import Drafter, DrafterParts, Request, load_drafters
from precedent.drafters.recall.drafter import RecallDrafter
from precedent.drafters.sessions import begin_early
from precedent.engine.admission import Admission
from precedent.engine.checks import (
    MOST_QUERY_CHARACTERS,
    check_answer_length,
    check_arguments,
    check_prefix,
    check_scores,
    check_token_ids,
    checked_mode,
    checked_prompt,
    prepare_target,
    unless_switched_off,
)
from precedent.engine.delivery import OBSERVER, WRITE_BACK, CompletionKeeper, Finisher, ResultObserver, write_back_to
from precedent.engine.generation import Generation, GenerationResult
from precedent.engine.health import STALLED_SECONDS, EngineHealth
from precedent.engine.kept_prefixes import KeptPrefixes
from precedent.engine.loading import DraftModels, loaded_draft, loaded_target
from precedent.engine.metrics import EngineMetrics
from precedent.engine.options import EngineOptions
from precedent.engine.queued_sequence import QueuedSequence
from precedent.engine.scheduler import Scheduler
from precedent.engine.shared import opened_cache
from precedent.engine.warm_up import REMEMBERED, RememberedCosts, compile_inner_loops, costs_of
from precedent.engine.worker import Worker
from precedent.grammar import Grammar, GrammarConstraint, GuidanceEngine
from precedent.planning.costs import CostCurve
from precedent.runtime.background import Background
from precedent.runtime.fence import Fences
from precedent.runtime.openmp import release_workers
from precedent.runtime.process import OfOneProcess, check_fork, computing
from precedent.sampling.constraints import constraints_for
from precedent.sampling.rng import entropy_rng
from precedent.target import Target
from precedent.target.load.loading import sampling_defaults
from precedent.target.model import target_of
from precedent.text.assembly import TextAssembler
from precedent.text.codec import TokenizerCodec
from precedent.text.end_tokens import end_token_ids
from precedent.text.templates import Template, Templates

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

log = logging.getLogger(__name__)

__all__ = ["Emission", "Engine", "Generation", "GenerationResult", "ResultObserver"]


class Engine(OfOneProcess):
    """One target model, at most one draft model, at most one speculation cache, and the thread that runs them.

    `EngineOptions` lists what it is built from; each option may be given as a keyword as well. `name` is what answers
    and metrics call the model; `cost` is a cost curve measured before, which engines of one model may share;
    `on_result` sees each finished request (prompt ids and result) before its caller does; `executor` embeds, searches
    and stores beside decoding, and is shut down with the engine (None: two threads of its own). `fences` hold the clock
    and deadline by which what only makes answers faster is switched off when it fails. Any thread and event
    loop may use an engine; a process forked after it was built may not, and gets UnsupportedError. Raises ConfigError,
    UnsupportedError, ModelLoadError for the draft model, or CacheError for the cache.

    >>> from precedent_testing.scripted_model import scripted_model_engine
    >>> engine = scripted_model_engine(["On its way."])  # in practice: Engine.load("Qwen/Qwen3-4B", cache="orders.db")
    >>> engine.submit(engine.tokenizer.encode("Where is it?"), SamplingParams(max_tokens=20)).result().text
    'On its way.'
    >>> engine.close()
    """

    instead = (
        "load the model in the process that uses it (after the fork; gunicorn without --preload), or let one process "
        "answer for the others"
    )

    @computing()
    def __init__(
        self,
        model: PreTrainedModel | Target,
        tokenizer: PreTrainedTokenizerBase,
        options: EngineOptions | None = None,
        *,
        name: str,
        cost: CostCurve | None = None,
        on_result: ResultObserver | None = None,
        executor: Executor | None = None,
        fences: Fences | None = None,
        **changes: Any,
    ) -> None:
        check_fork()
        options = (options or EngineOptions()).with_changes(**changes)
        options.check()
        options.check_loaded()
        self.tokenizer, self.model_name, self._on_result = tokenizer, name, on_result
        self.speculation = options.speculation or SpeculationConfig()
        self.cache = opened_cache(options)
        if self.cache is not None:
            self.cache.check_process()
        draft_model = loaded_draft(options, model, tokenizer)
        self.target = target_of(model, bitwise=options.bitwise, cuda_graphs=options.cuda_graphs)
        self._fences = fences or Fences()
        self._fences.add(self.target.team.fence)
        prepare_target(self.target, self.speculation.mode)
        self.encodes_prompt = self.target.encodes_prompt
        self.tokenizer_fingerprint = tokenizer_fingerprint(tokenizer)
        self.model_fingerprint = model_fingerprint(self.target.config.to_dict(), self.target.weights())
        self._own_threads = own = set[threading.Thread]()
        self._executor = executor or Background(2, "precedent-cache", lambda: own.add(threading.current_thread()))
        found = loop_class(options.loop)
        self._models = DraftModels.beside(self.target, draft_model, self.speculation.drafters)
        self._codec = TokenizerCodec(tokenizer)
        self._parts = DrafterParts(
            self.tokenizer_fingerprint, self._executor, self.cache, self._models.draft, self._codec,
            self._models.early_exit, device=self.target.device, heads=self._models.heads, fences=self._fences,
        )  # fmt: skip
        self.kept_prefixes = (
            KeptPrefixes(self._parts, self.target, tokenizer, self.model_fingerprint) if options.keep_prefixes else None
        )
        self._drafters: dict[str, Drafter] = dict(found.drafters(self._parts))
        self._loading = threading.Lock()
        self._drafters_named(self.speculation.drafters)
        compile_inner_loops()
        remembered = RememberedCosts(self.target, self.model_fingerprint)
        self.planner = found.planner(cost or costs_of(self.target, remembered, self._fences.of(REMEMBERED)))
        release_workers()  # the model was loaded and timed on this thread, and runs on another
        self._end_ids = end_token_ids(self.target, tokenizer)
        self._grammars: GuidanceEngine = GuidanceEngine(tokenizer, self._end_ids)
        self.admission = Admission(self.target, limits := options.limits or EngineLimits(), self.kept_prefixes)
        loop, finish = found(self.target, self.planner, self._fences), Finisher(self._executor, self._fences)
        remember = partial(remembered.write, self.planner.cost)
        self._worker = Worker(
            Scheduler(loop, self.admission, finish, limits.prefill_tokens_per_round),
            partial(_release, self._drafters, self._executor, loop.close, self._fences, remember),
        )
        if self.cache is not None:
            self._executor.submit(self.cache.warm_up)  # after measuring: loading the embedder would disturb it
            # kept conversations hold the words that were forgotten, and calibrations what they taught
            self.cache.on_gone(self._worker.drop_idle, only_forgotten=True)
            self.cache.on_gone(self.planner.calibrations.forget, only_forgotten=True)
        weakref.finalize(self, self._worker.stop).atexit = False  # at exit the worker closes itself

    @classmethod
    @computing()
    def load(
        cls,
        target: str | Path | PreTrainedModel,
        options: EngineOptions | None = None,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        name: str | None = None,
        **changes: Any,
    ) -> Engine:
        """Load a target (Hugging Face id, folder, or a model with its `tokenizer`) and start an engine on it.

        `name` is what answers and metrics call the model instead of `target`. Each of the `options` may be given as a
        keyword: `Engine.load(target, bitwise=True)`. Raises ModelLoadError, UnsupportedError, ConfigError or
        CacheError, each saying what to do.
        """
        check_fork()
        options = (options or EngineOptions()).with_changes(**changes)
        loaded = loaded_target(target, tokenizer, options)
        return cls(loaded.model, loaded.tokenizer, loaded.options, name=loaded.name if name is None else name)

    def add_drafter(self, drafter: Drafter) -> None:
        """Add a drafter that is not installed; requests name it: `SpeculationConfig(drafters=(drafter.name,))`."""
        self.check_process()
        self._drafters[drafter.name] = drafter

    @property
    def grammars(self) -> GuidanceEngine:
        """Compiles grammars for this engine's tokenizer."""
        self.check_process()
        return self._grammars

    @property
    def drafters(self) -> tuple[str, ...]:
        """Names of the drafters built or added so far."""
        return tuple(self._drafters)

    @property
    def closed(self) -> bool:
        """Whether the engine has stopped taking requests."""
        return self._worker.closed

    @property
    def sampling_defaults(self) -> dict[str, Any]:
        """Sampling settings that the checkpoint recommends, by their names in `SamplingParams`; empty without any.

        No request uses them by itself: `SamplingParams(**engine.sampling_defaults)` does.
        """
        return sampling_defaults(self.target.generation_config)

    @property
    def context_length(self) -> int:
        """Longest prompt plus answer, in tokens; the longest prompt where an encoder reads it."""
        return self.target.context_length

    def submit(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        speculation: SpeculationConfig | None = None,
        tenant: str = "default",
        query: str = "",
        workflow_step: str = "",
        tools: str = "",
        prediction: str | Sequence[int] | None = None,
        templates: Iterable[str | Template] = (),
        grammar: Grammar | None = None,
        write_back: CompletionKeeper | None = None,
        shown_tokens: Collection[int] = (),
        prefix_tokens: int = 0,
        scores: PromptScores | None = None,
    ) -> Generation:
        """Start a request and return once it is prepared: texts encoded and indexed, the grammar compiled.

        That takes milliseconds, for the longest prompts and grammars a second, on the calling thread and not on the
        engine's. What a request brings is bounded, and refused beyond: the prompt by the context, a `prediction` by 8
        characters per token of the context, `templates` as in `Templates`, stop strings as in `SamplingParams`,
        `workflow_step` and `tools` by 1,000 characters.

        Recall finds prior completions by the text `query`; `workflow_step` and `tools` are soft keys stored with the
        completion. `prediction` is a guess of the answer (a text, or token ids), `templates` are premade responses and
        forms of tool calls; both only propose. A `grammar` restricts the answer; `shown_tokens` are the special tokens
        that stay in its text; `write_back` receives the completion instead of the cache. `prefix_tokens` is how many
        of the prompt's first tokens other requests of the tenant share, for `keep_prefixes`. `scores` asks for the
        log-probabilities of the prompt's own tokens, all of which are then computed. Raises ContextOverflowError,
        PromptError, CapacityError, ConfigError, UnsupportedError or EngineClosedError at once.
        """
        self.check_process()
        check_arguments(
            sampling=sampling, speculation=speculation, grammar=grammar, write_back=write_back,
            shown_tokens=shown_tokens, scores=scores, tenant=tenant, query=query, workflow_step=workflow_step,
            tools=tools,
        )  # fmt: skip
        prompt, num_tokens = checked_prompt(prompt_ids, self.target), min(len(self.tokenizer), self.target.vocab_size)
        check_answer_length(sampling.max_tokens, self.target)
        check_prefix(prefix_tokens, prompt, kept=self.kept_prefixes is not None)
        check_token_ids(sampling, num_tokens)
        speculation = unless_switched_off(speculation or self.speculation)
        if scores is not None:
            check_scores(self.target)
            speculation = replace(speculation, write_back=False)  # evaluations are not worth recalling
        has_answer = scores is None or not scores.alone
        drafters = self._drafters_named(speculation.drafters if speculation.enabled and has_answer else ())
        matching = None if grammar is None else GrammarConstraint(self.grammars.matcher(grammar), self._end_ids)
        mode = checked_mode(speculation, sampling, self.target)
        request = Request(
            request_id=secrets.token_hex(8),
            prompt_ids=prompt,
            sampling=sampling,
            tenant=tenant,
            query=query[:MOST_QUERY_CHARACTERS],
            workflow_step=workflow_step,
            tools=tools,
            mode=mode,
            shape=constraints_for(sampling, prompt, matching),
            num_tokens=num_tokens,
            end_token_ids=self._end_ids | set(sampling.stop_token_ids),
            prediction=self._codec.prediction_ids(prediction, self.context_length),
            templates=tuple(Templates(templates)),
        )
        max_tokens = min(sampling.max_tokens, self.target.most_answer_tokens(len(prompt)))
        if max_tokens < sampling.max_tokens:
            log.info(
                "max_tokens=%d: behind a prompt of %d tokens the context has room for %d",
                sampling.max_tokens, len(prompt), max_tokens,
            )  # fmt: skip
        bitwise = self.target.capabilities.bitwise and mode in ("greedy", "coupled")
        sequence = QueuedSequence(
            request=request,
            max_tokens=max_tokens if has_answer else 0,
            rng_of=entropy_rng(secrets.randbits(128)),
            speculation=speculation,
            bitwise=bitwise,
            stats=GenerationStats(mode=mode, bitwise=bitwise),
            drafters=drafters,
            text=TextAssembler(self.tokenizer, sampling.stop, shown_tokens),
            actions=self._actions(request, speculation, write_back),
            kv_bytes=self._kv_bytes(len(prompt), max_tokens, speculation, drafters),
            prefix_tokens=prefix_tokens,
            scores=scores,
            early=begin_early(drafters, request, self._fences),
        )
        self._worker.submit(sequence)
        return sequence.generation

    def _actions(
        self, request: Request, speculation: SpeculationConfig, keeper: CompletionKeeper | None
    ) -> dict[str, Callable[[GenerationResult], object]]:
        """What is done with a request's answer before it is reported, by the name of its fence."""
        actions: dict[str, Callable[[GenerationResult], object]] = {}
        if self._on_result is not None:
            actions[OBSERVER] = partial(self._on_result, request.prompt_ids)
        if self.cache is not None and speculation.write_back:
            asked = Completion(
                (), self.tokenizer_fingerprint, self.model_fingerprint, request.tenant, request.query,
                prompt_fingerprint(request.prompt_ids), request.tools, request.workflow_step,
            )  # fmt: skip
            actions[WRITE_BACK] = partial(write_back_to, keeper or self.cache.insert, asked)
        return actions

    def _kv_bytes(
        self, prompt_tokens: int, max_tokens: int, speculation: SpeculationConfig, drafters: dict[str, Drafter]
    ) -> int:
        """Bytes of keys and values of a whole request and its draft models without an arena. Raises CapacityError."""
        tree = speculation.max_nodes + speculation.max_draws + 1 if drafters else 1
        num_bytes = self.target.request_bytes(prompt_tokens, max_tokens, tree, tree)
        for drafter in drafters.values() if not self.target.capabilities.fixed_memory else ():
            own = getattr(drafter, "request_bytes", None)
            num_bytes += 0 if own is None else own(prompt_tokens, max_tokens, speculation)
        self.admission.check(num_bytes, prompt_tokens, max_tokens)
        return num_bytes

    def _drafters_named(self, names: Sequence[str]) -> dict[str, Drafter]:
        """The drafters of these names, built on first use, without those whose parts the engine lacks."""
        names = self._models.named(names)
        with self._loading:
            for name in names:
                if name not in self._drafters:
                    self._drafters.update({drafter.name: drafter for drafter in load_drafters([name], self._parts)})
        return {name: self._drafters[name] for name in names if name in self._drafters}

    @property
    def recall(self) -> RecallDrafter | None:
        """The drafter that holds what its tenants' requests were answered before; None without a cache."""
        found = self._drafters.get(RecallDrafter.name)
        return found if isinstance(found, RecallDrafter) else None

    def metrics(self) -> EngineMetrics:
        """Requests that run and wait now, counts since the start, and latencies of recent requests."""
        self.check_process()
        return self._worker.metrics()

    def health(self, stalled_seconds: float = STALLED_SECONDS) -> EngineHealth:
        """Whether requests are served, and what is switched off because it failed; never waits for the engine.

        An engine fails if many requests of the last minute ended in internal errors, or if its thread works on one
        step for `stalled_seconds`. It recovers by itself.
        """
        self.check_process()
        return self._worker.health(stalled_seconds)

    def longest_wait(self) -> float:
        """Seconds for which the first of the requests that wait for memory has waited."""
        self.check_process()
        return self._worker.scheduler.longest_wait()

    def watch_steps(self, observer: StepObserver | None) -> None:
        """Show every verified step to `observer` from now on, on the engine's thread; None ends it.

        Its candidates are words of other callers.
        """
        self.check_process()
        self._worker.scheduler.loop.on_verified = observer

    def close(self) -> None:
        """Cancel all requests and wait until the worker has ended; closing twice is harmless. The cache stays open.

        Called on one of the engine's own threads (`on_result`, a drafter) it returns at once, and the worker ends
        later. In a forked process it does nothing.
        """
        self._worker.stop()
        if self.is_here and threading.current_thread() not in self._own_threads:
            self._worker.close()
            self._executor.shutdown(wait=self._fences.settle())


def _release(
    drafters: dict[str, Drafter],
    executor: Executor,
    close_loop: Callable[[], None],
    fences: Fences,
    remember: Callable[[], None],
) -> None:
    """Release what the requests shared, after all of them have ended, and remember what was learned of the machine."""
    fences.of(REMEMBERED).run(remember, None)
    close_loop()
    fences.settle()  # recall still writes its credit on the executor
    for name, drafter in list(drafters.items()):
        try:
            drafter.close()
        except Exception as error:
            fences.of(name).fault(error)
    executor.shutdown(wait=False)
