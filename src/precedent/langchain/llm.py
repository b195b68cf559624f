"""`PrecedentLLM`, a LangChain text-completion model: the prompt reaches the model as it is, without a chat template."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models.base import LanguageModelInput
from langchain_core.language_models.llms import BaseLLM
from langchain_core.outputs import Generation, GenerationChunk, LLMResult
from langchain_core.prompt_values import PromptValue
from langchain_core.runnables import RunnableConfig

from precedent.errors import PromptError, UnsupportedError
from precedent.langchain.arguments import FOR_CHAT, OF_THE_CALL, workflow_step_of
from precedent.langchain.chunks import openai_logprobs
from precedent.langchain.exceptions import input_in_our_words, of_both_kinds
from precedent.langchain.fields import EngineFields, call_settings
from precedent.langchain.synonyms import IN_A_CALL
from precedent.langchain.telemetry import Span, current_span, describe_result
from precedent.langchain.tenants import tenant_of, usable_tenant
from precedent.runtime.plain_values import check_plain
from precedent.text.codec import check_length
from precedent.text.query import recall_query

if TYPE_CHECKING:
    from precedent.engine.engine import Engine, GenerationResult
    from precedent.engine.engine import Generation as Running


class PrecedentLLM(EngineFields, BaseLLM):
    """Continues a text. Its fields and the arguments of a call are those of `ChatPrecedent`, without tools.

        PrecedentLLM(model="HuggingFaceTB/SmolLM2-135M").invoke("The capital of France is", max_tokens=5)

    Control tokens in the prompt keep their meaning: never put texts of others into it unchecked.
    """

    _operation = "text_completion"
    _not_in_constructor: ClassVar = {
        **dict.fromkeys(OF_THE_CALL, IN_A_CALL),
        **dict.fromkeys(FOR_CHAT, "text completion does not have it: use ChatPrecedent"),
    }

    def __init__(self, **kwargs: Any) -> None:
        """Check the settings. Raises ConfigError or UnsupportedError, which say what to write."""
        super().__init__(**kwargs)
        if self.keep_prefixes:
            raise UnsupportedError("keep_prefixes=True is for chat models: a plain text has no system turn to keep")

    # One request

    def _start(
        self, engine: Engine, prompt: str, stop: list[str] | None, run: Any, settings: Mapping[str, Any]
    ) -> Running:
        check_plain("the prompt", prompt, PromptError)
        check_length(engine.tokenizer, prompt, engine.context_length)
        query, templates = recall_query([{"role": "user", "content": prompt}]), self._templates(settings, ())
        token_ids = engine.tokenizer.encode(prompt)
        return self._submit(engine, settings, stop, run, token_ids, query=query, templates=templates)

    def _stream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[GenerationChunk]:
        with of_both_kinds():
            settings = _text_settings(kwargs)
            engine, span = self._engine_of(settings), current_span()
            running = self._start(engine, prompt, stop, run_manager, settings)
        try:
            for emission in running:
                if emission.text:
                    chunk = GenerationChunk(text=emission.text)
                    if run_manager is not None:
                        run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                    yield chunk
            yield self._last(engine, running.result(), settings, span)
        finally:
            running.cancel()

    async def _astream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[GenerationChunk]:
        with of_both_kinds():
            settings = _text_settings(kwargs)
            engine, span = await self._aengine_of(settings), current_span()
            running = self._start(engine, prompt, stop, run_manager, settings)
        try:
            async for emission in running:
                if emission.text:
                    chunk = GenerationChunk(text=emission.text)
                    if run_manager is not None:
                        await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                    yield chunk
            yield self._last(engine, running.result(), settings, span)
        finally:
            running.cancel()

    def _last(
        self, engine: Engine, result: GenerationResult, settings: Mapping[str, Any], span: Span | None
    ) -> GenerationChunk:
        if span is not None:
            describe_result(span, settings.get("model", self.model), result)
        return GenerationChunk(text="", generation_info=self._info(engine, result, settings))

    def _generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        with of_both_kinds():
            settings = _text_settings(kwargs)
            engine = self._engine_of(settings)
            running = [self._start(engine, prompt, stop, run_manager, settings) for prompt in prompts]
        try:
            return self._result(engine, [one.result() for one in running], settings)
        finally:
            for one in running:
                one.cancel()

    async def _agenerate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        with of_both_kinds():
            settings = _text_settings(kwargs)
            engine = await self._aengine_of(settings)
            running = [self._start(engine, prompt, stop, run_manager, settings) for prompt in prompts]
        try:
            for one in running:
                async for _ in one:
                    pass
            return self._result(engine, [one.result() for one in running], settings)
        finally:
            for one in running:
                one.cancel()

    def _result(self, engine: Engine, results: list[GenerationResult], settings: Mapping[str, Any]) -> LLMResult:
        generations = [
            [Generation(text=result.text, generation_info=self._info(engine, result, settings))] for result in results
        ]
        return LLMResult(generations=generations)

    def _info(self, engine: Engine, result: GenerationResult, settings: Mapping[str, Any]) -> dict[str, Any]:
        logprobs = {"logprobs": openai_logprobs(result.logprobs, engine.tokenizer)} if result.logprobs else {}
        return {
            "model_name": settings.get("model", self.model),
            "finish_reason": result.finish_reason,
            "prompt_tokens": result.prompt_tokens,
            "completion_tokens": len(result.token_ids),
            "speculation": result.stats.as_dict(),
            **logprobs,
        }

    @property
    def _llm_type(self) -> str:
        return "precedent-llm"

    # What users call; LangChain consumes some of the arguments

    def _convert_input(self, model_input: LanguageModelInput) -> PromptValue:
        with of_both_kinds(), input_in_our_words():
            return super()._convert_input(model_input)

    def invoke(self, input: LanguageModelInput, config: RunnableConfig | None = None, **kwargs: Any) -> str:
        """Continue a text; see LangChain's `BaseLLM.invoke`."""
        self._check(kwargs)
        return super().invoke(input, config, **kwargs)

    async def ainvoke(self, input: LanguageModelInput, config: RunnableConfig | None = None, **kwargs: Any) -> str:
        """Continue a text; see LangChain's `BaseLLM.ainvoke`."""
        self._check(kwargs)
        return await super().ainvoke(input, config, **kwargs)

    def batch(self, inputs: list[LanguageModelInput], config: Any = None, **kwargs: Any) -> list[str]:
        """Continue several texts; see LangChain's `BaseLLM.batch`."""
        self._check({name: value for name, value in kwargs.items() if name != "return_exceptions"})
        return super().batch(inputs, config, **kwargs)

    async def abatch(self, inputs: list[LanguageModelInput], config: Any = None, **kwargs: Any) -> list[str]:
        """Continue several texts; see LangChain's `BaseLLM.abatch`."""
        self._check({name: value for name, value in kwargs.items() if name != "return_exceptions"})
        return await super().abatch(inputs, config, **kwargs)

    def generate(self, prompts: list[str], *args: Any, **kwargs: Any) -> LLMResult:
        """Continue several texts, as `BaseLLM.generate` does. Raises UnsupportedError for several tenants."""
        model = self._of_one_tenant(kwargs)
        return BaseLLM.generate(model, prompts, *args, **{**kwargs, "tenant": model.tenant})

    async def agenerate(self, prompts: list[str], *args: Any, **kwargs: Any) -> LLMResult:
        """Continue several texts, as `BaseLLM.agenerate` does. Raises UnsupportedError for several tenants."""
        model = self._of_one_tenant(kwargs)
        return await BaseLLM.agenerate(model, prompts, *args, **{**kwargs, "tenant": model.tenant})

    @of_both_kinds()
    def _of_one_tenant(self, kwargs: Mapping[str, Any]) -> Self:
        """A copy on the same engine with the tenant of a batch, since keys of answer caches hold a model's fields only.

        LangChain passes a batch on with the first text's run. Raises UnsupportedError if the batch mixes tenants or
        workflow steps.
        """
        metadata = kwargs.get("metadata")
        metadata = metadata if isinstance(metadata, list) else [metadata]
        runs = [{**(one or {}), **(self.metadata or {})} for one in metadata]
        by_run = self.tenant_from is not None and kwargs.get("tenant") is None
        if len({(workflow_step_of(run), usable_tenant(run) if by_run else None) for run in runs}) > 1:
            raise UnsupportedError(
                "one batch of texts cannot mix tenants or workflow steps: use a separate batch for each"
            )
        tenant = tenant_of(self, kwargs, runs[0] if runs else None)
        return self.model_copy(update={"tenant": tenant, "tenant_from": None})


def _text_settings(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    settings = call_settings(kwargs)
    for name in FOR_CHAT:
        if name in settings:
            raise UnsupportedError(f"{name} cannot be given to a text completion: use ChatPrecedent")
    return settings
