"""`ChatPrecedent`, a LangChain chat model on weights in this process, speculated from a cache and a draft model."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models.base import LanguageModelInput
from langchain_core.language_models.chat_models import generate_from_stream
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable

from precedent.errors import UnsupportedError
from precedent.langchain.chunks import AnswerChunks
from precedent.langchain.described import Described
from precedent.langchain.logprobs import openai_logprobs
from precedent.langchain.messages import to_template_messages
from precedent.langchain.run_metadata import FollowsRunMetadata
from precedent.langchain.settings import check_call, templates_of
from precedent.langchain.telemetry import Span, current_span, describe_result
from precedent.langchain.tools import ToolLike, check_tool_choice, openai_tools
from precedent.langchain.warming import Conversation, warm
from precedent.text.prompt import render_prompt
from precedent.text.query import recall_query
from precedent.text.tool_schema import tools_fingerprint

if TYPE_CHECKING:
    from precedent.engine import Engine, Generation, GenerationResult


class ChatPrecedent(FollowsRunMetadata, Described):
    """A chat model whose every answer is the target model's own, proposed ahead by earlier answers and a draft model.

    `model` is a Hugging Face id or folder; `draft_model` a smaller model of the same tokenizer; `speculation_cache` a
    path, an open `SpeculationCache`, or None for no cache. `speculation` is True, False (plain decoding), or a
    `SpeculationConfig`. `templates` are premade responses with `{holes}` (texts, or a `Templates`), proposed beside the
    forms of the bound tools' calls; `prediction=` of a call is a guess of its answer. Sampling fields are those of
    `SamplingParams`; temperature 0 is greedy. All but the fields of the engine can be given per call. Weights are
    loaded at the first call, once for all chat models of equal settings.

        llm = ChatPrecedent(model="HuggingFaceTB/SmolLM2-1.7B-Instruct", speculation_cache="orders.db")
        agent = create_agent(llm, tools=[look_up_order])
    """

    def warm(
        self,
        conversations: str | Path | Iterable[Conversation],
        *,
        tools: Sequence[ToolLike] = (),
        tenant: str | None = None,
        workflow_step: str = "",
    ) -> int:
        """Teach the speculation cache answers that were given before, by whatever model; returns how many.

        `conversations` are lists of messages, or the path of a log (JSON lines in OpenAI's form, as `PrecedentRecorder`
        writes it). `tools` are those that were bound; a log brings its own. Raises ConfigError without a cache.
        """
        whose = {"tenant": tenant or self.tenant, "workflow_step": workflow_step}
        return warm(self.engine, conversations, tools=openai_tools(tools), **whose)

    # One request

    def _start(
        self,
        engine: Engine,
        messages: list[BaseMessage],
        stop: list[str] | None,
        run_manager: CallbackManagerForLLMRun | AsyncCallbackManagerForLLMRun | None,
        kwargs: Mapping[str, Any],
    ) -> tuple[Generation, AnswerChunks]:
        """Check everything, render the prompt, and submit the request."""
        check_call(kwargs)
        check_tool_choice(kwargs.get("tool_choice"))
        tools = [] if kwargs.get("tool_choice") == "none" else openai_tools(kwargs.get("tools") or ())
        turns = to_template_messages(messages)
        prompt_ids = render_prompt(engine.tokenizer, turns, tools)
        generation = self._submit(
            engine,
            prompt_ids,
            stop,
            run_manager.metadata if run_manager else None,
            kwargs,
            query=recall_query(turns),
            tools=tools_fingerprint(tools),
            templates=templates_of(self, kwargs, tools),
        )
        name = kwargs.get("model") or self.model
        chunks = AnswerChunks(prompt_ids, name, parse_tools=bool(tools), output_version=self.output_version)
        return generation, chunks

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        engine, span = self._engine_of(kwargs), current_span()
        generation, chunks = self._start(engine, messages, stop, run_manager, kwargs)
        try:
            for emission in generation:
                yield from chunks.of(emission)
            yield from self._last(engine, chunks, generation.result(), span)
        finally:
            generation.cancel()

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        engine, span = await self._aengine_of(kwargs), current_span()
        generation, chunks = self._start(engine, messages, stop, run_manager, kwargs)
        try:
            async for emission in generation:
                for chunk in chunks.of(emission):
                    yield chunk
            for chunk in self._last(engine, chunks, generation.result(), span):
                yield chunk
        finally:
            generation.cancel()

    def _last(
        self, engine: Engine, chunks: AnswerChunks, result: GenerationResult, span: Span | None
    ) -> Iterator[ChatGenerationChunk]:
        """What was held back, then the figures: on the last chunk, and on the span in which the call was made."""
        *others, last = chunks.last(result)
        if result.logprobs:
            last.message.response_metadata["logprobs"] = openai_logprobs(result.logprobs, engine.tokenizer)
        if span is not None:
            describe_result(span, last.message.response_metadata["model_name"], result)
        yield from (*others, last)

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return generate_from_stream(self._stream(messages, stop, run_manager, **kwargs))

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        chunks = [chunk async for chunk in self._astream(messages, stop, run_manager, **kwargs)]
        return generate_from_stream(iter(chunks))

    # Tools

    def bind_tools(
        self, tools: Sequence[ToolLike], *, tool_choice: str | None = None, **kwargs: Any
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Show `tools` to the model, which decides whether to call them (`tool_choice` "auto", or "none" for never).

        Raises PromptError for a tool that is none, UnsupportedError for a tool choice that would force a call.
        """
        check_tool_choice(tool_choice)
        check_call(kwargs)
        return self.bind(tools=openai_tools(tools), tool_choice=tool_choice, **kwargs)

    def with_structured_output(self, schema: Any, *, include_raw: bool = False, **kwargs: Any) -> NoReturn:
        """Refused: nothing forces the model to keep to a schema."""
        raise UnsupportedError(
            "with_structured_output is not supported: nothing forces the model to keep to a schema; "
            "bind the schema with bind_tools and check message.tool_calls"
        )
