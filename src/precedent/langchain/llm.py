"""`PrecedentLLM`, a LangChain text-completion model: the prompt reaches the model as it is, without a chat template."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, ClassVar, Self

from langchain_core.language_models.base import LanguageModelInput
from langchain_core.language_models.llms import BaseLLM
from langchain_core.outputs import GenerationChunk, LLMResult
from langchain_core.prompt_values import PromptValue
from langchain_core.runnables import RunnableConfig

from precedent.errors import PromptError, UnsupportedError
from precedent.langchain.answers import Prompt, Running, openai_logprobs
from precedent.langchain.arguments import FOR_CHAT, OF_THE_CALL, tenant_of, usable_tenant, workflow_step_of
from precedent.langchain.exceptions import input_in_our_words, of_both_kinds
from precedent.langchain.fields import EngineFields
from precedent.langchain.synonyms import IN_A_CALL
from precedent.runtime.plain_values import check_plain
from precedent.text.codec import check_length
from precedent.text.query import recall_query

if TYPE_CHECKING:
    from precedent.engine.engine import Emission, Engine, GenerationResult


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

    def _call_settings(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        settings = super()._call_settings(kwargs)
        for name in FOR_CHAT:
            if name in settings:
                raise UnsupportedError(f"{name} cannot be given to a text completion: use ChatPrecedent")
        return settings

    def _prompt(self, engine: Engine, given: str, settings: Mapping[str, Any]) -> Prompt:
        check_plain("the prompt", given, PromptError)
        check_length(engine.tokenizer, given, engine.context_length)
        query = recall_query([{"role": "user", "content": given}])
        return Prompt(engine.tokenizer.encode(given), {"query": query, "templates": self._templates(settings, ())})

    def _reader(self, running: Running, *, whole: bool) -> TextChunks:
        return TextChunks(running)

    def _stream(
        self, prompt: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any
    ) -> Iterator[GenerationChunk]:
        for chunk in self._chunks(prompt, stop, run_manager, kwargs):
            if run_manager is not None and chunk.text:
                run_manager.on_llm_new_token(chunk.text, chunk=chunk)
            yield chunk

    async def _astream(
        self, prompt: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any
    ) -> AsyncIterator[GenerationChunk]:
        async with aclosing(self._achunks(prompt, stop, run_manager, kwargs)) as chunks:
            async for chunk in chunks:
                if run_manager is not None and chunk.text:
                    await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk

    def _generate(self, prompts: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> LLMResult:
        with of_both_kinds():
            running = [self._begin(prompt, stop, run_manager, kwargs) for prompt in prompts]
        return _results(running)

    async def _agenerate(self, prompts: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> LLMResult:
        with of_both_kinds():
            running = [await self._abegin(prompt, stop, run_manager, kwargs) for prompt in prompts]
        try:
            for one in running:
                async for _ in one.generation:
                    pass
        finally:
            for one in running:
                one.generation.cancel()
        return _results(running)

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


class TextChunks:
    """A continued text as chunks, of which the last has statistics."""

    def __init__(self, running: Running) -> None:
        self._running = running

    def of(self, emission: Emission) -> Iterator[GenerationChunk]:
        """The text of an emission, unless it is empty."""
        if emission.text:
            yield GenerationChunk(text=emission.text)

    def last(self, result: GenerationResult, text: str = "") -> Iterator[GenerationChunk]:
        """One chunk without text, or with the whole `text`."""
        info = {
            "model_name": self._running.model_name,
            "finish_reason": result.finish_reason,
            "prompt_tokens": result.prompt_tokens,
            "completion_tokens": len(result.token_ids),
            "speculation": result.stats.as_dict(),
        }
        if result.logprobs:
            info["logprobs"] = openai_logprobs(result.logprobs, self._running.engine.tokenizer)
        yield GenerationChunk(text=text, generation_info=info)


def _results(running: Sequence[Running]) -> LLMResult:
    """Wait for all; what still runs is cancelled if one fails."""
    try:
        results = [one.result() for one in running]
    finally:
        for one in running:
            one.generation.cancel()
    return LLMResult(
        generations=[[*TextChunks(one).last(result, result.text)] for one, result in zip(running, results, strict=True)]
    )
