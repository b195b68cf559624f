"""`ChatPrecedent`, a LangChain chat model on weights in this process that speculates from a cache and a draft model.

`_stream` and `_astream` render a prompt, submit it (`EngineFields._submit`) and turn what the engine emits into chunks
(`AnswerChunks`), which `_generate` merges. The methods that users call only check arguments and pass on whose run it
is, which LangChain tells `_generate` but not `_stream`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import ModelProfile
from langchain_core.language_models.base import LangSmithParams, LanguageModelInput
from langchain_core.language_models.chat_models import BaseChatModel, generate_from_stream
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult, LLMResult
from langchain_core.prompt_values import PromptValue
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.config import ensure_config
from pydantic import model_validator

from precedent import __version__
from precedent.cache import tools_fingerprint
from precedent.errors import ConfigError, UnsupportedError
from precedent.grammar import Grammar
from precedent.langchain.arguments import (
    OF_THE_CALL,
    ONLY_SPEED,
    ChatFields,
    merged_stop,
    strictness,
    workflow_step_of,
)
from precedent.langchain.chunks import AnswerChunks
from precedent.langchain.exceptions import of_both_kinds
from precedent.langchain.fields import EngineFields, call_settings
from precedent.langchain.messages import checked_input, media_of, template_messages_of, to_template_messages
from precedent.langchain.profile import profile_of_engine, profile_of_files, profile_of_weights
from precedent.langchain.recorded_answers import Conversation, warm
from precedent.langchain.structured import AnswerRules
from precedent.langchain.structured_output import structured
from precedent.langchain.synonyms import IN_A_CALL, WITH_TOOLS
from precedent.langchain.telemetry import current_span
from precedent.langchain.tenants import own_tenant, tenant_of
from precedent.langchain.tools import NONE, ToolChoice, ToolLike, allowed_tools, openai_tools, tool_choice_of
from precedent.runtime.plain_values import shown
from precedent.text.answers import AnswerSyntax, answer_syntax
from precedent.text.prompt import num_prompt_tokens, render_prompt
from precedent.text.query import recall_query
from precedent.text.template_settings import TemplateSettings

if TYPE_CHECKING:
    from precedent.engine.engine import Engine, Generation


@dataclass(frozen=True, slots=True)
class RunningAnswer:
    """A request that runs, and how to read its answer; `notes` say what its grammar does not enforce."""

    engine: Engine
    generation: Generation
    syntax: AnswerSyntax
    notes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A rendered prompt, how to read its answer, and further arguments of `Engine.submit` that come from it."""

    token_ids: list[int]
    syntax: AnswerSyntax
    grammar: Grammar | None
    notes: Mapping[str, Any]
    arguments: Mapping[str, Any]


class ChatPrecedent(EngineFields, ChatFields, BaseChatModel):
    """A chat model that answers as its target model would, faster: earlier answers and a draft model propose tokens.

    Weights are loaded at the first call, once for all models of equal settings, until `unload`.
    Fields of `EngineOptions` describe the engine and cannot be given per call; all others can. Fields of
    `SamplingParams` mean what they mean there, and None is the default.

    - `model`: a Hugging Face id, a folder, a GGUF file, or the name of one in Ollama or LM Studio.
    - `speculation_cache`: a folder, file or URL, or an open `SpeculationCache`; None is no cache.
    - `tenant`: whose completions may be drafted from: a hard partition of the cache.
    - `tenant_from`: "metadata" lets each run's metadata name its tenant.
    - `drafters`: which drafters propose, in order of credit; None are the engine's, `[]` is none.
    - `templates`: premade responses with `{holes}` (texts, or a `Templates`), proposed beside the forms of tool calls.
    - `speculation`: True, False (plain decoding) or a `SpeculationConfig`.
    - `sampling`: "model" samples as the model recommends, where nothing else is given; "precedent" is greedy; None is
      "model" for Ollama's and LM Studio's names, else "precedent".
    - `logprobs`: return the log-probabilities of the answer's tokens.
    - `top_logprobs`: and of this many of the likeliest at each place, at most 20.
    - `strict_tools`: the default of `strict`: whether calls must fit their tool's schema. "auto" holds forced calls.
    - `chat_template_kwargs`: variables of the model's chat template, as `{"enable_thinking": False}`.
    - `reasoning`: True or False where the chat template has a switch for thinking, an effort such as "low" where it
      has `reasoning_effort`.
    - `media`: what happens to images, audio, video and files in messages: "refuse" raises UnsupportedError,
      "placeholder" puts a short text in their place, so that a tool that returns a screenshot ends no agent's run.

    Raises ConfigError or UnsupportedError for a setting that is wrong, or that the model cannot have.

    >>> from precedent_testing.scripted_model import scripted_model_engine
    >>> llm = ChatPrecedent.from_engine(scripted_model_engine(["It is on its way."]))
    >>> llm.invoke("Where is order 1042?").text
    'It is on its way.'
    >>> llm.engine.close()
    """

    _operation = "chat"
    _not_in_constructor: ClassVar = {**dict.fromkeys(OF_THE_CALL, IN_A_CALL), **WITH_TOOLS}

    def __init__(self, **kwargs: Any) -> None:
        """Check the settings. Raises ConfigError or UnsupportedError, which say what to write."""
        super().__init__(**kwargs)
        strictness({}, self.strict_tools)
        self.template_settings({})
        if self.output_version not in (None, "v0", "v1"):
            raise ConfigError(f"output_version={shown(self.output_version)} must be 'v0' or 'v1'")

    @property
    def engine(self) -> Engine:
        """The engine; reading this loads it if it is not running yet. Raises UnsupportedError for no chat model."""
        return _decoder_only(super().engine)

    def _engine_of(self, settings: Mapping[str, Any]) -> Engine:
        return _decoder_only(super()._engine_of(settings))

    def template_settings(self, settings: Mapping[str, Any]) -> tuple[TemplateSettings, ...]:
        """Settings of the chat template: those of the fields, then those of the call."""
        given = (
            (self.chat_template_kwargs, self.reasoning),
            (settings.get("chat_template_kwargs"), settings.get("reasoning")),
        )
        return tuple(
            TemplateSettings({} if variables is None else variables, reasoning)
            for variables, reasoning in given
            if variables is not None or reasoning is not None
        )

    # One request

    def begin(self, messages: list[BaseMessage], settings: Mapping[str, Any]) -> RunningAnswer:
        """Check everything, render the prompt and start a request; `settings` are a call's keyword arguments.

        For callers that send the answer elsewhere than to LangChain. Compiling a grammar may take seconds. Raises
        PrecedentErrors, each saying what to do.
        """
        checked = call_settings(settings)
        engine = self._engine_of(checked)
        return self._start(engine, self._prompt(engine, messages, checked), checked, None, None)

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return generate_from_stream(self._stream(messages, stop, run_manager, _whole=True, **kwargs))

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        chunks = [chunk async for chunk in self._astream(messages, stop, run_manager, _whole=True, **kwargs)]
        return generate_from_stream(iter(chunks))

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        *,
        _whole: bool = False,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        """Answer in chunks; with `_whole` they are merged anyway, so that each call comes when it has ended."""
        with of_both_kinds():
            settings = call_settings(kwargs)
            engine = self._engine_of(settings)
            running = self._start(engine, self._prompt(engine, messages, settings), settings, stop, run_manager)
            chunks = self._chunks(running, settings, _whole)
        try:
            for emission in running.generation:
                yield from chunks.of(emission)
            yield from chunks.last(running.generation.result())
        finally:
            running.generation.cancel()

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        *,
        _whole: bool = False,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        with of_both_kinds():
            settings = call_settings(kwargs)
            engine = await self._aengine_of(settings)
            prompt = self._prompt(engine, messages, settings)
            if prompt.grammar is not None:  # compiling one takes long, a tokenizer's first one above all
                await asyncio.to_thread(engine.grammars.matcher, prompt.grammar)
            running = self._start(engine, prompt, settings, stop, run_manager)
            chunks = self._chunks(running, settings, _whole)
        try:
            async for emission in running.generation:
                for chunk in chunks.of(emission):
                    yield chunk
            for chunk in chunks.last(running.generation.result()):
                yield chunk
        finally:
            running.generation.cancel()

    def _prompt(self, engine: Engine, messages: list[BaseMessage], settings: Mapping[str, Any]) -> _Prompt:
        choice = settings.get("tool_choice")
        tools = allowed_tools(choice, openai_tools(settings.get("tools", ())))
        rules = AnswerRules.of(settings, tool_choice_of(choice, tools), self.strict_tools)
        tools = [] if rules.choice == NONE else tools
        turns = to_template_messages(messages, media=media_of(settings, self.media))
        of_template, kept = self.template_settings(settings), engine.kept_prefixes
        token_ids = render_prompt(engine.tokenizer, turns, tools, of_template, engine.context_length)
        syntax = answer_syntax(engine.tokenizer, turns, tools, token_ids)
        grammar = rules.grammar(syntax)
        arguments = {
            "query": recall_query(turns),
            "tools": tools_fingerprint(tools),
            "templates": self._templates(settings, tools, syntax.form),
            "shown_tokens": syntax.shown_tokens,
            "prefix_tokens": 0 if kept is None else kept.fixed_part.length(token_ids, turns, tools, of_template),
        }
        return _Prompt(token_ids, syntax, grammar, {} if grammar is None else rules.notes(), arguments)

    def _start(
        self, engine: Engine, prompt: _Prompt, settings: Mapping[str, Any], stop: list[str] | None, run: Any
    ) -> RunningAnswer:
        generation = self._submit(
            engine, settings, stop, run, prompt.token_ids, grammar=prompt.grammar, **prompt.arguments
        )
        return RunningAnswer(engine, generation, prompt.syntax, prompt.notes)

    def _chunks(self, running: RunningAnswer, settings: Mapping[str, Any], whole: bool) -> AnswerChunks:
        return AnswerChunks(
            running.syntax,
            settings.get("model", self.model),
            running.engine.tokenizer,
            in_blocks=self.output_version == "v1",
            notes=running.notes,
            whole=whole,
            span=current_span(),
        )

    # What users call

    @of_both_kinds()
    def _with_run_keys(self, metadata: Mapping[str, Any] | None, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments with the run's tenant and workflow step: `_stream` is not told them, nor are answer caches."""
        run = {**(metadata or {}), **(self.metadata or {})}
        keys = {"workflow_step": kwargs.get("workflow_step") or workflow_step_of(run)}
        if self.tenant_from is not None:
            keys["tenant"] = tenant_of(self, kwargs, run)
        return kwargs | {name: value for name, value in keys.items() if value is not None}

    def _convert_input(self, model_input: LanguageModelInput) -> PromptValue:
        with of_both_kinds():
            return checked_input(super()._convert_input, model_input)

    def invoke(self, input: LanguageModelInput, config: RunnableConfig | None = None, **kwargs: Any) -> AIMessage:
        """Answer; see LangChain's `BaseChatModel.invoke`."""
        self._check(kwargs)
        return super().invoke(input, config, **kwargs)

    async def ainvoke(
        self, input: LanguageModelInput, config: RunnableConfig | None = None, **kwargs: Any
    ) -> AIMessage:
        """Answer; see LangChain's `BaseChatModel.ainvoke`."""
        self._check(kwargs)
        return await super().ainvoke(input, config, **kwargs)

    def stream(
        self, input: LanguageModelInput, config: RunnableConfig | None = None, **kwargs: Any
    ) -> Iterator[AIMessageChunk]:
        """Stream an answer; see LangChain's `BaseChatModel.stream`."""
        self._check(kwargs)
        config = ensure_config(config)
        return super().stream(input, config, **self._with_run_keys(config["metadata"], kwargs))

    def astream(
        self, input: LanguageModelInput, config: RunnableConfig | None = None, **kwargs: Any
    ) -> AsyncIterator[AIMessageChunk]:
        """Stream an answer; see LangChain's `BaseChatModel.astream`."""
        self._check(kwargs)
        config = ensure_config(config)
        return super().astream(input, config, **self._with_run_keys(config["metadata"], kwargs))

    def generate(self, messages: list[list[BaseMessage]], *args: Any, **kwargs: Any) -> LLMResult:
        """Answer several message lists; see LangChain's `BaseChatModel.generate`."""
        return super().generate(messages, *args, **self._with_run_keys(kwargs.get("metadata"), kwargs))

    async def agenerate(self, messages: list[list[BaseMessage]], *args: Any, **kwargs: Any) -> LLMResult:
        """Answer several message lists; see LangChain's `BaseChatModel.agenerate`."""
        return await super().agenerate(messages, *args, **self._with_run_keys(kwargs.get("metadata"), kwargs))

    def bind_tools(
        self, tools: Sequence[ToolLike], *, tool_choice: ToolChoice = None, **kwargs: Any
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Show `tools` to the model, which decides whether to call them unless `tool_choice` forces it to.

        `tool_choice`: "auto", "none", "any" (also "required" or True), a tool's name, or OpenAI's or Anthropic's dict.
        OpenAI's type "allowed_tools" shows the tools that it names alone.
        `parallel_tool_calls=False` is one call at most; `strict=True` holds every call to its tool's schema.
        Raises PromptError for a tool that is none, ConfigError for a choice that is none.
        """
        bound, settings = openai_tools(tools), call_settings(kwargs)
        choice = tool_choice_of(tool_choice, allowed_tools(tool_choice, bound))
        AnswerRules.of(settings, choice, self.strict_tools)
        return self.bind(tools=bound, tool_choice=tool_choice, **settings)

    def with_structured_output(
        self,
        schema: Any = None,
        *,
        method: str = "json_schema",
        include_raw: bool = False,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """A runnable whose answers are objects of a pydantic class (v2 or v1), or dicts of a TypedDict or JSON Schema.

        `method`: "json_schema" (the answer is JSON that a grammar holds to the schema), "function_calling" (a forced
        call), or "json_mode" (any JSON object; say in the prompt which). With `include_raw` an answer is a dict of
        `raw`, `parsed` and `parsing_error`. Raises ConfigError on anything else.
        """
        return structured(self, schema, method, strict, include_raw, call_settings(kwargs))

    def warm(
        self,
        conversations: str | Path | Iterable[Conversation],
        *,
        tools: Sequence[ToolLike] = (),
        tenant: str | None = None,
        workflow_step: str = "",
    ) -> int:
        """Store answers that any model gave before in the speculation cache; returns how many.

        `conversations` are lists of messages, or the path of a log (JSON lines in OpenAI's form, as `PrecedentRecorder`
        writes it). `tools` are those that were bound; a log brings its own. Lines of a log that cannot be read are
        skipped, and a warning counts them and names the first. Raises ConfigError without a cache, or if `tenant` is
        missing with `tenant_from="metadata"`; PromptError or UnsupportedError, with the number of the conversation,
        for messages that cannot be read.
        """
        settings = call_settings({"tenant": tenant, "workflow_step": workflow_step})
        tenant, step = own_tenant(self, settings.get("tenant")), settings.get("workflow_step", "")
        return warm(self, conversations, openai_tools(tools), tenant=tenant, workflow_step=step)

    # What LangChain asks about the model

    @property
    def _llm_type(self) -> str:
        return "precedent-chat"

    @classmethod
    def is_lc_serializable(cls) -> bool:
        """True. Settings are serialized, weights never are; a model that was passed in loaded is written by name."""
        return True

    @classmethod
    def get_lc_namespace(cls) -> list[str]:
        """The namespace in which LangChain finds the class when it loads a serialized model."""
        return ["precedent", "langchain"]

    @property
    def lc_attributes(self) -> dict[str, Any]:
        """Fields that may hold objects, as JSON values; None for an object without such a form."""
        speculation = self.speculation
        plain = {
            "embedder": _written(self.embedder),
            "speculation": speculation if isinstance(speculation, bool | Mapping) else asdict(speculation),
            "model_kwargs": self._public_model_kwargs(),
            "templates": None if self.templates is None else [one.text for one in self._templates({}, ())],
        }
        defaults = type(self).model_fields
        return {
            **{name: value for name, value in plain.items() if getattr(self, name) is not defaults[name].default},
            # always written, or the environment of who reads it could fill them in
            "draft_model": _written(self.draft_model),
            "speculation_cache": self._cache_as_text(self.speculation_cache),
        }

    @property
    def _identifying_params(self) -> dict[str, Any]:
        names = ("strict_tools", "chat_template_kwargs", "reasoning", "media")
        return {**super()._identifying_params, **{name: getattr(self, name) for name in names}}

    def _get_llm_string(self, stop: list[str] | None = None, **kwargs: Any) -> str:
        """The key of an answer in LangChain's caches: everything that it depends on, including the model's identity."""
        call = {name: value for name, value in kwargs.items() if name not in ONLY_SPEED}
        asked = {**self._identifying_params, **call, "call_stop": stop}
        return json.dumps(_with_text_keys(asked), sort_keys=True, default=str)

    def _resolve_model_profile(self) -> ModelProfile | None:
        engine, weights = self.engines.loaded(self.model, self._engine_options()), self.engines.weights
        if engine is not None:
            return profile_of_engine(engine)
        if weights is not None:
            return profile_of_weights(*weights)
        return profile_of_files(self.model, self.model_kwargs, self.chat_template)

    def _get_invocation_params(self, stop: list[str] | None = None, **kwargs: Any) -> dict[str, Any]:
        return super()._get_invocation_params(list(merged_stop(self.stop, stop)) or None, **kwargs)

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=list(merged_stop(self.stop, stop)) or None, **kwargs)
        params["ls_provider"] = "precedent"
        return params

    def get_num_tokens_from_messages(self, messages: list[BaseMessage], tools: Sequence[ToolLike] | None = None) -> int:
        """Tokens in the prompt made of these messages and tools.

        The messages may be any part of a conversation, also one that the chat template refuses; no messages are 0
        tokens, an image is its placeholder. Raises PromptError for what are no messages.
        """
        shown = openai_tools(tools or ())
        if isinstance(messages, Sequence) and not messages:
            return 0
        turns = template_messages_of(messages, media="placeholder")
        return num_prompt_tokens(self.engine.tokenizer, turns, shown, self.template_settings({}))

    @model_validator(mode="after")
    def _set_precedent_version(self) -> Self:
        """Add our version to traces; LangChain wants a validator of a name that no other class has."""
        self._add_version("precedent-llm", __version__)
        return self


def _decoder_only(engine: Engine) -> Engine:
    """The engine. Raises UnsupportedError if an encoder reads its prompts: such models hold no conversation."""
    if engine.encodes_prompt:
        raise UnsupportedError(
            f"{engine.model_name} is an encoder-decoder model, which has no chat template and no tool calls: use "
            "PrecedentLLM, which turns one text into another"
        )
    return engine


def _written(value: Any) -> str | None:
    return str(value) if isinstance(value, str | Path) else None


def _with_text_keys(value: Any) -> Any:
    """The value with text keys, so that its dicts can be sorted; a converted key never equals an original text key."""
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else f"\0{key!r}": _with_text_keys(part) for key, part in value.items()}
    return [_with_text_keys(part) for part in value] if isinstance(value, list | tuple) else value
