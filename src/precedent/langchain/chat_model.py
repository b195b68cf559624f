"""`ChatPrecedent`, a LangChain chat model on weights in this process, speculated from a cache and a draft model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Self

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models.base import LangSmithParams, LanguageModelInput
from langchain_core.language_models.chat_models import BaseChatModel, generate_from_stream
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult, LLMResult
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.config import ensure_config
from pydantic import AliasChoices, Field

from precedent.errors import ConfigError, UnsupportedError
from precedent.langchain.chunks import AnswerChunks
from precedent.langchain.engines import EngineHolder, EngineSettings
from precedent.langchain.messages import to_template_messages
from precedent.langchain.settings import (
    SAMPLING,
    check_call,
    check_fields,
    check_names,
    in_one_line,
    merged_stop,
    prediction_text,
    run_keys,
    sampling_params,
    speculation_config,
    templates_of,
    tenant_of,
)
from precedent.langchain.tools import ToolLike, check_tool_choice, openai_tools
from precedent.text.answers import answer_syntax
from precedent.text.prompt import render_prompt
from precedent.text.query import recall_query
from precedent.text.tool_schema import tools_fingerprint

if TYPE_CHECKING:
    from precedent.engine import Engine, Generation

STANDARD_BUT_IDLE = ("api_key", "timeout", "max_retries")
"""Constructor arguments that LangChain gives every chat model and that mean nothing for weights in this process."""

OF_THE_ENGINE = ("draft_model", "speculation_cache", "embedder", "device", "dtype")


class ChatPrecedent(BaseChatModel):
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

    model: str = Field(validation_alias=AliasChoices("model", "model_name"))
    draft_model: Any = None
    speculation_cache: Any = None
    embedder: Any = None
    device: str | None = None
    dtype: str | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int = 512
    stop: list[str] | None = None
    tenant: str = "default"
    drafters: tuple[str, ...] | None = None
    templates: Any = None
    speculation: Any = True
    streaming: bool = False
    engines: EngineHolder = Field(default_factory=EngineHolder, exclude=True, repr=False)

    def __init__(self, **kwargs: Any) -> None:
        """Check the settings. Raises ConfigError on an unknown name or a value out of its range."""
        known = (*type(self).model_fields, "model_name", *STANDARD_BUT_IDLE)
        check_names(kwargs, known, type(self).__name__)
        with in_one_line():
            super().__init__(**kwargs)
        check_fields(self)
        templates_of(self, {}, ())

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

    @property
    def model_name(self) -> str:
        """The model's name or folder."""
        return self.model

    @property
    def engine(self) -> Engine:
        """The engine, loaded now if it is not running yet."""
        return self.engines.get(self._engine_settings())

    def _engine_settings(self) -> EngineSettings:
        return EngineSettings(self.model, **{name: getattr(self, name) for name in OF_THE_ENGINE})

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
        syntax = answer_syntax(engine.tokenizer, turns, tools, prompt_ids)
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
            templates=templates_of(self, kwargs, tools, syntax.form),
            shown_tokens=syntax.shown_tokens,
        )
        return generation, AnswerChunks(syntax, self.model, output_version=self.output_version)

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

    # LangChain hands the run's metadata to `_generate` but not to `_stream`; a tenant must never get lost on the way.

    def _with_run_keys(self, metadata: Mapping[str, Any] | None, kwargs: dict[str, Any]) -> dict[str, Any]:
        return {**run_keys({**(self.metadata or {}), **(metadata or {})}), **kwargs}

    def stream(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> Iterator[AIMessageChunk]:
        """Stream an answer; see LangChain's `BaseChatModel.stream`."""
        kwargs = self._with_run_keys(ensure_config(config)["metadata"], kwargs)
        return super().stream(input, config, stop=stop, **kwargs)

    def astream(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[AIMessageChunk]:
        """Stream an answer; see LangChain's `BaseChatModel.astream`."""
        kwargs = self._with_run_keys(ensure_config(config)["metadata"], kwargs)
        return super().astream(input, config, stop=stop, **kwargs)

    def generate(self, messages: list[list[BaseMessage]], *args: Any, **kwargs: Any) -> LLMResult:
        """Answer several message lists; see LangChain's `BaseChatModel.generate`."""
        return super().generate(messages, *args, **self._with_run_keys(kwargs.get("metadata"), kwargs))

    async def agenerate(self, messages: list[list[BaseMessage]], *args: Any, **kwargs: Any) -> LLMResult:
        """Answer several message lists; see LangChain's `BaseChatModel.agenerate`."""
        return await super().agenerate(messages, *args, **self._with_run_keys(kwargs.get("metadata"), kwargs))

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

    # What LangChain asks about the model

    @property
    def _llm_type(self) -> str:
        return "precedent-chat"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """All that the answer depends on, and what speeds it up: LangChain's answer caches use it as their key."""
        draft = self.draft_model
        named = draft if draft is None or isinstance(draft, str) else type(draft).__name__
        names = ("device", "dtype", *SAMPLING, "stop", "tenant", "drafters", "speculation")
        settings = {name: getattr(self, name) for name in names}
        settings["templates"] = [template.text for template in templates_of(self, {}, ())]
        return {"model_name": self.model, "weights": self.engines.identity, "draft_model": named, **settings}

    def _get_invocation_params(self, stop: list[str] | None = None, **kwargs: Any) -> dict[str, Any]:
        return super()._get_invocation_params(list(merged_stop(self.stop, stop)) or None, **kwargs)

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        merged = list(merged_stop(self.stop, stop))
        params = super()._get_ls_params(stop=merged or None, **kwargs)
        params["ls_provider"] = "precedent"
        return params

    def get_token_ids(self, text: str) -> list[int]:
        """Token ids of `text` by the model's own tokenizer, without special tokens."""
        if self.custom_get_token_ids is not None:
            return self.custom_get_token_ids(text)
        return list(self.engine.tokenizer.encode(text, add_special_tokens=False))

    def get_num_tokens_from_messages(self, messages: list[BaseMessage], tools: Sequence[ToolLike] | None = None) -> int:
        """Tokens of the prompt that these messages and tools become."""
        return len(render_prompt(self.engine.tokenizer, to_template_messages(messages), openai_tools(tools or ())))
