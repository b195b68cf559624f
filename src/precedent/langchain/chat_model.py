"""`ChatPrecedent`, a LangChain chat model on weights in this process, speculated from a cache and a draft model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Self

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models.base import LanguageModelInput
from langchain_core.language_models.chat_models import generate_from_stream
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable

from precedent.errors import ConfigError, UnsupportedError
from precedent.langchain.chunks import AnswerChunks
from precedent.langchain.described import Described
from precedent.langchain.engines import EngineHolder
from precedent.langchain.fields import OF_THE_ENGINE
from precedent.langchain.messages import to_template_messages
from precedent.langchain.run_metadata import FollowsRunMetadata
from precedent.langchain.settings import (
    check_call,
    prediction_text,
    run_keys,
    sampling_params,
    speculation_config,
    templates_of,
    tenant_of,
)
from precedent.langchain.tools import ToolLike, check_tool_choice, openai_tools
from precedent.text.prompt import render_prompt
from precedent.text.query import recall_query
from precedent.text.tool_schema import tools_fingerprint

if TYPE_CHECKING:
    from precedent.engine import Engine, Generation


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

    @classmethod
    def from_model(cls, model: Any, tokenizer: Any, **kwargs: Any) -> Self:
        """A chat model on a transformers model and tokenizer that you hold already."""
        for name in ("device", "dtype"):
            if kwargs.get(name) is not None:
                raise ConfigError(f"{name} cannot be set for a model object: move or convert the model before")
        if not hasattr(model, "config"):
            raise ConfigError(
                f"from_model takes a transformers model and its tokenizer, and a {type(model).__name__} is no model; "
                "for a name or folder write ChatPrecedent(model=…)"
            )
        name = kwargs.pop("model_name", None) or model.config._name_or_path or type(model).__name__
        return cls(model=name, engines=EngineHolder(weights=(model, tokenizer)), **kwargs)

    @classmethod
    def from_engine(cls, engine: Engine, **kwargs: Any) -> Self:
        """A chat model on a running engine."""
        for name in OF_THE_ENGINE:
            if kwargs.get(name) is not None:
                raise ConfigError(f"{name} belongs to the engine: give it to Engine.load")
        return cls(model=engine.model_name, engines=EngineHolder(engine=engine), **kwargs)

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
        check_call(kwargs, self.model)
        check_tool_choice(kwargs.get("tool_choice"))
        tools = [] if kwargs.get("tool_choice") == "none" else openai_tools(kwargs.get("tools") or ())
        turns = to_template_messages(messages)
        prompt_ids = render_prompt(engine.tokenizer, turns, tools)
        keys = run_keys(run_manager.metadata if run_manager else None)
        generation = engine.submit(
            prompt_ids,
            sampling_params(self, stop, kwargs),
            speculation=speculation_config(self, kwargs, engine.speculation),
            tenant=tenant_of(self, kwargs, keys),
            query=recall_query(turns),
            workflow_step=kwargs.get("workflow_step") or keys.get("workflow_step", ""),
            tools=tools_fingerprint(tools),
            prediction=prediction_text(kwargs.get("prediction")),
            templates=templates_of(self, kwargs, tools),
        )
        chunks = AnswerChunks(prompt_ids, self.model, parse_tools=bool(tools), output_version=self.output_version)
        return generation, chunks

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        generation, chunks = self._start(self.engine, messages, stop, run_manager, kwargs)
        try:
            for emission in generation:
                yield from chunks.of(emission)
            yield from chunks.last(generation.result())
        finally:
            generation.cancel()

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        settings = self._engine_settings()
        engine = self.engines.loaded(settings)
        if engine is None:  # loading takes seconds and must not stop the event loop; nothing else leaves it
            engine = await asyncio.to_thread(self.engines.get, settings)
        generation, chunks = self._start(engine, messages, stop, run_manager, kwargs)
        try:
            async for emission in generation:
                for chunk in chunks.of(emission):
                    yield chunk
            for chunk in chunks.last(generation.result()):
                yield chunk
        finally:
            generation.cancel()

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
        check_call(kwargs, self.model)
        return self.bind(tools=openai_tools(tools), tool_choice=tool_choice, **kwargs)

    def with_structured_output(self, schema: Any, *, include_raw: bool = False, **kwargs: Any) -> NoReturn:
        """Refused: nothing forces the model to keep to a schema."""
        raise UnsupportedError(
            "with_structured_output is not supported: nothing forces the model to keep to a schema; "
            "bind the schema with bind_tools and check message.tool_calls"
        )
