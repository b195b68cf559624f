"""`PrecedentLLM`, a LangChain text-completion model: the prompt reaches the model as it is, without a chat template."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models.base import LanguageModelInput
from langchain_core.language_models.llms import BaseLLM
from langchain_core.outputs import Generation, GenerationChunk, LLMResult
from langchain_core.prompt_values import PromptValue
from langchain_core.runnables import RunnableConfig

from precedent.errors import PromptError, UnsupportedError
from precedent.langchain.call import Call
from precedent.langchain.exceptions import of_both_kinds
from precedent.langchain.fields import EngineFields
from precedent.langchain.logprobs import openai_logprobs
from precedent.langchain.run_metadata import FollowsConfigurable
from precedent.langchain.serializing import identifying_params
from precedent.langchain.settings import check_call, templates_of, text_settings
from precedent.langchain.telemetry import current_span, describe_result
from precedent.langchain.tenants import tenant_of_batch
from precedent.langchain.wording import input_in_our_words
from precedent.runtime.plain_values import check_plain
from precedent.text.codec import check_length
from precedent.text.query import recall_query

if TYPE_CHECKING:
    from precedent.engine.engine import Engine, GenerationResult
    from precedent.engine.engine import Generation as Running


class PrecedentLLM(FollowsConfigurable, EngineFields, BaseLLM):
    """Continues a text. Its fields and the arguments of a call are those of `ChatPrecedent`, without tools.

        PrecedentLLM(model="HuggingFaceTB/SmolLM2-135M").invoke("The capital of France is", max_tokens=5)

    Control tokens in the prompt keep their meaning: never put texts of others into it unchecked.
    """

    _operation = "text_completion"

    def __init__(self, **kwargs: Any) -> None:
        """Check the settings. Raises ConfigError or UnsupportedError, which say what to write."""
        super().__init__(**kwargs)
        if self.keep_prefixes:
            raise UnsupportedError("keep_prefixes=True is for chat models: a plain text has no system turn to keep")

    def _begin(
        self,
        engine: Engine,
        prompt: str,
        stop: Sequence[str] | None,
        metadata: Mapping[str, Any] | None,
        settings: Mapping[str, Any],
    ) -> Running:
        check_plain("the prompt", prompt, PromptError)
        check_length(engine.tokenizer, prompt, engine.context_length)
        call = Call(
            engine.tokenizer.encode(prompt),
            settings,
            stop,
            metadata,
            query=recall_query([{"role": "user", "content": prompt}]),
            templates=templates_of(self, settings, ()),
        )
        return self._submit(engine, call)

    def _convert_input(self, model_input: LanguageModelInput) -> PromptValue:
        with of_both_kinds(), input_in_our_words():
            return super()._convert_input(model_input)

    def invoke(self, input: LanguageModelInput, config: RunnableConfig | None = None, **kwargs: Any) -> str:
        """Check the arguments, some of which LangChain consumes, and call `BaseLLM.invoke`."""
        check_call(kwargs)
        return super().invoke(input, config, **kwargs)

    async def ainvoke(self, input: LanguageModelInput, config: RunnableConfig | None = None, **kwargs: Any) -> str:
        """Check the arguments, some of which LangChain consumes, and call `BaseLLM.ainvoke`."""
        check_call(kwargs)
        return await super().ainvoke(input, config, **kwargs)

    def batch(
        self, inputs: list[LanguageModelInput], config: Any = None, *, return_exceptions: bool = False, **kwargs: Any
    ) -> list[str]:
        """Check the arguments, some of which LangChain consumes, and call `BaseLLM.batch`."""
        check_call(kwargs)
        return super().batch(inputs, config, return_exceptions=return_exceptions, **kwargs)

    async def abatch(
        self, inputs: list[LanguageModelInput], config: Any = None, *, return_exceptions: bool = False, **kwargs: Any
    ) -> list[str]:
        """Check the arguments, some of which LangChain consumes, and call `BaseLLM.abatch`."""
        check_call(kwargs)
        return await super().abatch(inputs, config, return_exceptions=return_exceptions, **kwargs)

    def generate(self, prompts: list[str], *args: Any, **kwargs: Any) -> LLMResult:
        """Continue several texts, as `BaseLLM.generate` does. Raises UnsupportedError for several tenants."""
        tenant = tenant_of_batch(self, kwargs)
        return BaseLLM.generate(self._as_of(tenant), prompts, *args, **{**kwargs, "tenant": tenant})

    async def agenerate(self, prompts: list[str], *args: Any, **kwargs: Any) -> LLMResult:
        """Continue several texts, as `BaseLLM.agenerate` does. Raises UnsupportedError for several tenants."""
        tenant = tenant_of_batch(self, kwargs)
        return await BaseLLM.agenerate(self._as_of(tenant), prompts, *args, **{**kwargs, "tenant": tenant})

    def _as_of(self, tenant: str) -> Self:
        """A copy on the same engine with this tenant: keys of LangChain's answer caches hold a model's fields only."""
        return self.model_copy(update={"tenant": tenant, "tenant_from": None})

    def _stream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[GenerationChunk]:
        with of_both_kinds():
            settings = text_settings(kwargs)
            engine, span = self._engine_of(settings), current_span()
            running = self._begin(engine, prompt, stop, run_manager.metadata if run_manager else None, settings)
        try:
            for emission in running:
                if emission.text:
                    yield _told(GenerationChunk(text=emission.text), run_manager)
            result = running.result()
            if span is not None:
                describe_result(span, settings.get("model") or self.model, result)
            yield GenerationChunk(text="", generation_info=self._info(engine, result, settings))
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
            settings = text_settings(kwargs)
            engine, span = await self._aengine_of(settings), current_span()
            running = self._begin(engine, prompt, stop, run_manager.metadata if run_manager else None, settings)
        try:
            async for emission in running:
                if emission.text:
                    chunk = GenerationChunk(text=emission.text)
                    if run_manager is not None:
                        await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                    yield chunk
            result = running.result()
            if span is not None:
                describe_result(span, settings.get("model") or self.model, result)
            yield GenerationChunk(text="", generation_info=self._info(engine, result, settings))
        finally:
            running.cancel()

    def _generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        with of_both_kinds():
            settings = text_settings(kwargs)
            engine, metadata = self._engine_of(settings), run_manager.metadata if run_manager else None
            running = [self._begin(engine, prompt, stop, metadata, settings) for prompt in prompts]
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
            settings = text_settings(kwargs)
            engine, metadata = await self._aengine_of(settings), run_manager.metadata if run_manager else None
            running = [self._begin(engine, prompt, stop, metadata, settings) for prompt in prompts]
        try:
            results = [await _awaited(one) for one in running]
        finally:
            for one in running:
                one.cancel()
        return self._result(engine, results, settings)

    def _result(self, engine: Engine, results: list[GenerationResult], kwargs: Mapping[str, Any]) -> LLMResult:
        generations = [
            [Generation(text=result.text, generation_info=self._info(engine, result, kwargs))] for result in results
        ]
        return LLMResult(generations=generations)

    def _info(self, engine: Engine, result: GenerationResult, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        logprobs = {"logprobs": openai_logprobs(result.logprobs, engine.tokenizer)} if result.logprobs else {}
        return {
            "model_name": kwargs.get("model") or self.model,
            "finish_reason": result.finish_reason,
            "prompt_tokens": result.prompt_tokens,
            "completion_tokens": len(result.token_ids),
            "speculation": result.stats.as_dict(),
            **logprobs,
        }

    @property
    def _llm_type(self) -> str:
        return "precedent-llm"

    @property
    def _identifying_params(self) -> Mapping[str, Any]:
        return identifying_params(self)


def _told(chunk: GenerationChunk, run_manager: CallbackManagerForLLMRun | None) -> GenerationChunk:
    """Show a chunk to the run's handlers and return it."""
    if run_manager is not None:
        run_manager.on_llm_new_token(chunk.text, chunk=chunk)
    return chunk


async def _awaited(running: Running) -> GenerationResult:
    async for _ in running:
        pass
    return running.result()
