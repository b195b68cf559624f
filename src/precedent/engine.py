"""Builds the parts, owns the worker thread, and stores completions at a normal end."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from precedent.cache import NewCompletion
from precedent.cache.fingerprint import model_fingerprint, prompt_fingerprint, tokenizer_fingerprint
from precedent.config import SamplingParams, SpeculationConfig, is_lossy
from precedent.cost_curve import CostCurve
from precedent.drafters import Drafter, DrafterParts, load_drafters
from precedent.errors import ConfigError, ContextOverflowError, PromptError
from precedent.generation import Emission, Generation, GenerationResult
from precedent.planner import Planner
from precedent.target import TargetModel
from precedent.target.loading import load_draft, load_target
from precedent.text.assembly import TextAssembler
from precedent.tree import chain
from precedent.verify import find_mode
from precedent.warm_up import compile_inner_loops
from precedent.worker import Request, Worker

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from precedent.cache import SpeculationCache

ResultObserver = Callable[[tuple[int, ...], GenerationResult], None]
"""Called with a finished request's prompt ids and its result, on a thread of the engine's."""

__all__ = ["Emission", "Engine", "Generation", "GenerationResult", "shared_engine"]


class Engine:
    """One target model, at most one draft model, at most one speculation cache, and the thread that runs them.

    `speculation` holds the defaults of every request; `cost` is a cost curve measured before (engines of one model may
    share it); `on_result` sees each finished one (prompt ids and result) before
    its caller does. The engine may be used from any thread and any event loop.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        name: str,
        draft_model: PreTrainedModel | None = None,
        cache: SpeculationCache | None = None,
        speculation: SpeculationConfig | None = None,
        cost: CostCurve | None = None,
        on_result: ResultObserver | None = None,
    ) -> None:
        self._on_result = on_result
        self.tokenizer, self.model_name, self.cache = tokenizer, name, cache
        self.speculation = speculation or SpeculationConfig()
        self.target = TargetModel(model)
        self.tokenizer_fingerprint = tokenizer_fingerprint(tokenizer)
        self.model_fingerprint = model_fingerprint(model.config.to_dict(), model.state_dict())
        self._executor = ThreadPoolExecutor(max_workers=2, thread_name_prefix="precedent-cache")
        draft = None if draft_model is None else TargetModel(draft_model)
        self._parts = DrafterParts(self.tokenizer_fingerprint, self._executor, cache, draft)
        self._drafters: dict[str, Drafter] = {}
        self._drafters_named(self.speculation.drafters)
        compile_inner_loops()
        self.planner = Planner(cost or CostCurve())
        if cost is None:
            self.planner.cost.measure(self._milliseconds_of_width)
        if cache is not None:
            self._executor.submit(cache.warm_up)  # after measuring: loading the embedder would disturb it
        end_ids = _end_token_ids(model, tokenizer)
        self._worker = Worker(self.target, self.planner, end_ids, len(tokenizer), self._executor)
        self._finalizer = weakref.finalize(self, _shut_down, self._worker, self._executor, self._drafters)

    @classmethod
    def load(
        cls,
        target: str | Path | PreTrainedModel,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        draft_model: str | Path | PreTrainedModel | None = None,
        device: str | None = None,
        dtype: str | None = None,
        cache: SpeculationCache | None = None,
        speculation: SpeculationConfig | None = None,
    ) -> Engine:
        """Load a target (Hugging Face id, folder, or a model with its `tokenizer`) and start an engine on it.

        Raises ModelLoadError, UnsupportedError or ConfigError, each saying what to do.
        """
        if isinstance(target, str | Path):
            model, tokenizer = load_target(str(target), device=device, dtype=dtype)
            name = str(target)
        else:
            if tokenizer is None:
                raise ConfigError("a model object needs its tokenizer: pass tokenizer=… as well")
            model, name = target, target.config._name_or_path or type(target).__name__
        draft = None if draft_model is None else load_draft(draft_model, model, tokenizer)
        return cls(model, tokenizer, name=name, draft_model=draft, cache=cache, speculation=speculation)

    def add_drafter(self, drafter: Drafter) -> None:
        """Let requests name a drafter that is not installed, as in `SpeculationConfig(drafters=(drafter.name,))`."""
        self._drafters[drafter.name] = drafter

    @property
    def context_length(self) -> int:
        """Longest prompt plus answer, in tokens."""
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
    ) -> Generation:
        """Start a request and return at once.

        `query` is the text by which recall finds prior completions; `workflow_step` and `tools` are soft keys stored
        with the completion. Raises ContextOverflowError or PromptError before any work starts.
        """
        prompt = tuple(int(token) for token in prompt_ids)
        self._check_prompt(prompt)
        speculation = speculation or self.speculation
        names = speculation.drafters if speculation.enabled else ()
        request = Request(
            prompt_ids=prompt,
            sampling=sampling,
            speculation=speculation,
            mode=_mode(speculation, sampling),
            drafters=self._drafters_named(names),
            text=TextAssembler(self.tokenizer, sampling.stop),
            tenant=tenant,
            query=query,
            workflow_step=workflow_step,
            finished=self._at_normal_end(speculation, prompt, tenant, query, workflow_step, tools),
        )
        self._worker.submit(request)
        return request.generation

    def close(self) -> None:
        """Stop the worker; running requests are cancelled. The cache stays open: it belongs to whoever opened it."""
        self._finalizer()

    def _check_prompt(self, prompt: tuple[int, ...]) -> None:
        if not prompt:
            raise PromptError("the prompt is empty: give at least one token")
        if len(prompt) >= self.context_length:
            raise ContextOverflowError(
                f"the prompt has {len(prompt)} tokens, the model's context holds {self.context_length}: "
                "shorten the conversation or the tool results"
            )

    def _drafters_named(self, names: Sequence[str]) -> dict[str, Drafter]:
        """The engine's drafters of these names, built on first use; those whose parts are absent are left out."""
        for name in names:
            if name not in self._drafters:
                self._drafters.update({drafter.name: drafter for drafter in load_drafters([name], self._parts)})
        return {name: self._drafters[name] for name in names if name in self._drafters}

    def _at_normal_end(
        self,
        speculation: SpeculationConfig,
        prompt: tuple[int, ...],
        tenant: str,
        query: str,
        workflow_step: str,
        tools: str,
    ) -> list[Callable[[GenerationResult], None]]:
        """What happens at a normal end, before the caller learns of it: a reported completion is a stored one."""
        actions: list[Callable[[GenerationResult], None]] = []
        if self._on_result is not None:
            actions.append(partial(self._on_result, prompt))
        if self.cache is not None and speculation.write_back:
            record = NewCompletion(
                token_ids=(),
                tokenizer=self.tokenizer_fingerprint,
                model=self.model_fingerprint,
                tenant=tenant,
                query=query,
                prompt_fingerprint=prompt_fingerprint(prompt),
                tools=tools,
                workflow_step=workflow_step,
            )
            actions.append(partial(_write_back, self.cache, record))
        return actions

    def _milliseconds_of_width(self, width: int) -> float:
        """Time one forward of `width` tokens behind a short prefix."""
        slot = self.target.new_slot()
        self.target.prefill(slot, [0] * 33)
        started = perf_counter()
        self.target.score([(slot, chain([0] * (width - 1)))])
        return (perf_counter() - started) * 1e3


_LOADING = threading.Lock()
_SHARED: weakref.WeakValueDictionary[Hashable, Engine] = weakref.WeakValueDictionary()


def shared_engine(
    target: str | Path | PreTrainedModel,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    draft_model: str | Path | PreTrainedModel | None = None,
    device: str | None = None,
    dtype: str | None = None,
    cache: SpeculationCache | None = None,
) -> Engine:
    """The engine of these settings, loaded once per process and kept while somebody holds it.

    LangChain re-creates chat models behind one's back (`configurable_fields`, `init_chat_model`); the weights must not
    be loaded again each time.
    """
    named = str(target) if isinstance(target, str | Path) else id(target)
    draft = str(draft_model) if isinstance(draft_model, str | Path) else id(draft_model)
    key = (named, draft, device, dtype, id(cache))
    with _LOADING:
        engine = _SHARED.get(key)
        if engine is None:
            engine = Engine.load(
                target, tokenizer=tokenizer, draft_model=draft_model, device=device, dtype=dtype, cache=cache
            )
            _SHARED[key] = engine
        return engine


def _write_back(cache: SpeculationCache, record: NewCompletion, result: GenerationResult) -> None:
    cache.insert(replace(record, token_ids=result.token_ids, text=result.text))


def _mode(speculation: SpeculationConfig, sampling: SamplingParams) -> str:
    """The verification mode of a request. Raises ConfigError when the mode asked for would ignore a setting."""
    mode, seeded = speculation.mode, sampling.seed is not None
    if is_lossy(mode):
        find_mode(mode)  # a wrong parameter is refused now, not in the middle of an answer
        return mode
    if mode == "auto" or sampling.greedy:
        return "greedy" if sampling.greedy else "coupled" if seeded else "traversal"
    if mode == "greedy":
        raise ConfigError(f"mode='greedy' would ignore temperature={sampling.temperature}: set temperature=0")
    if seeded and mode != "coupled":
        # coins that depend on the seed alone would be known to a completion cached from the same seed
        raise ConfigError(f"mode={mode!r} draws fresh coins for every request: drop the seed, or use mode='coupled'")
    if mode == "coupled" and not seeded:
        raise ConfigError("mode='coupled' needs a seed")
    return mode


def _end_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """End tokens by the generation config and the tokenizer."""
    config = getattr(model, "generation_config", None)
    configured = getattr(config, "eos_token_id", None)
    ids = configured if isinstance(configured, list) else [configured]
    return frozenset(int(token) for token in (*ids, tokenizer.eos_token_id) if token is not None)


def _shut_down(worker: Worker, executor: ThreadPoolExecutor, drafters: dict[str, Drafter]) -> None:
    worker.stop()
    for drafter in drafters.values():
        drafter.close()  # before the executor: recall still writes its credit there
    executor.shutdown(wait=True)
