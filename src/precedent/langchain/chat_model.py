"""`ChatPrecedent`, a LangChain chat model on weights in this process that speculates from a cache and a draft model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models.base import LanguageModelInput
from langchain_core.language_models.chat_models import generate_from_stream
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable

from precedent.cache import tools_fingerprint
from precedent.langchain.call import Begun, Call
from precedent.langchain.chunks import AnswerChunks
from precedent.langchain.described import Described
from precedent.langchain.exceptions import of_both_kinds
from precedent.langchain.logprobs import openai_logprobs
from precedent.langchain.messages import media_of, to_template_messages
from precedent.langchain.run_metadata import FollowsConfigurable, FollowsRunMetadata
from precedent.langchain.settings import call_settings, templates_of
from precedent.langchain.structured import AnswerRules
from precedent.langchain.structured_output import structured
from precedent.langchain.telemetry import Span, current_span, describe_result
from precedent.langchain.tenants import own_tenant
from precedent.langchain.tools import NONE, ToolChoice, ToolLike, allowed_tools, openai_tools, tool_choice_of
from precedent.langchain.warming import Conversation, warm
from precedent.text.answers import AnswerSyntax, answer_syntax
from precedent.text.prompt import render_prompt
from precedent.text.query import recall_query

if TYPE_CHECKING:
    from precedent.engine.engine import Engine, GenerationResult


class ChatPrecedent(FollowsConfigurable, FollowsRunMetadata, Described):
    """A chat model that answers as its target model would, faster: earlier answers and a draft model propose tokens.

    Weights are loaded at the first call, once for all models of equal settings, until `unload`.
    Fields of `EngineOptions` describe the engine and cannot be given per call; all others can. Fields of
    `SamplingParams` mean what they mean there, and None is the default.

    - `model`: a Hugging Face id, a folder or a GGUF file.
    - `speculation_cache`: a folder, file or URL, or an open `SpeculationCache`; None is no cache.
    - `tenant`: whose completions may be drafted from: a hard partition of the cache.
    - `tenant_from`: "metadata" lets each run's metadata name its tenant.
    - `drafters`: which drafters propose, in order of credit; None are the engine's, `[]` is none.
    - `templates`: premade responses with `{holes}` (texts, or a `Templates`), proposed beside the forms of tool calls.
    - `speculation`: True, False (plain decoding) or a `SpeculationConfig`.
    - `sampling`: "model" samples as the checkpoint recommends, where nothing else is given; None is greedy.
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
        asked = call_settings({"tenant": tenant, "workflow_step": workflow_step})
        return warm(
            self.engine,
            conversations,
            tools=openai_tools(tools),
            settings=self.template_settings({}),
            tenant=own_tenant(self, asked["tenant"]),
            workflow_step=asked["workflow_step"] or "",
            media=self.media,
        )

    # One request

    def begin(
        self,
        messages: list[BaseMessage],
        settings: Mapping[str, Any],
        *,
        stop: list[str] | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Begun:
        """Check everything, render the prompt and start a request; `settings` are a call's keyword arguments.

        For callers that send the answer elsewhere than to LangChain. Compiling a grammar may take seconds. Raises
        PrecedentErrors, each saying what to do.
        """
        checked = call_settings(settings)
        return self._begun(*self._asked(self._engine_of(checked), messages, stop, metadata, checked))

    def _asked(
        self,
        engine: Engine,
        messages: list[BaseMessage],
        stop: list[str] | None,
        metadata: Mapping[str, Any] | None,
        settings: Mapping[str, Any],
    ) -> tuple[Engine, Call, AnswerSyntax, Mapping[str, Any]]:
        """The call, how to read its answer, and notes on its grammar."""
        bound = openai_tools(() if settings.get("tools") is None else settings["tools"])
        bound = allowed_tools(settings.get("tool_choice"), bound)
        rules = AnswerRules.of(settings, tool_choice_of(settings.get("tool_choice"), bound), self.strict_tools)
        tools = [] if rules.choice == NONE else bound
        turns = to_template_messages(messages, media=media_of(settings, self.media))
        of_template, kept = self.template_settings(settings), engine.kept_prefixes
        prompt_ids = render_prompt(engine.tokenizer, turns, tools, of_template, engine.context_length)
        syntax = answer_syntax(engine.tokenizer, turns, tools, prompt_ids)
        call = Call(
            prompt_ids,
            settings,
            stop,
            metadata,
            query=recall_query(turns),
            templates=templates_of(self, settings, tools, syntax.form),
            tools=tools_fingerprint(tools),
            grammar=rules.grammar(syntax),
            shown_tokens=syntax.shown_tokens,
            prefix_tokens=0 if kept is None else kept.fixed_part.length(prompt_ids, turns, tools, of_template),
        )
        return engine, call, syntax, {} if call.grammar is None else rules.notes()

    def _begun(self, engine: Engine, call: Call, syntax: AnswerSyntax, notes: Mapping[str, Any]) -> Begun:
        return Begun(engine, self._submit(engine, call), syntax, notes)

    def _chunks(self, begun: Begun, settings: Mapping[str, Any], whole: bool) -> AnswerChunks:
        name = settings.get("model") or self.model
        return AnswerChunks(begun.syntax, name, output_version=self.output_version, notes=begun.notes, whole=whole)

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        return self._answer(messages, stop, run_manager, kwargs, whole=False)

    def _answer(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None,
        run_manager: CallbackManagerForLLMRun | None,
        kwargs: dict[str, Any],
        *,
        whole: bool,
    ) -> Iterator[ChatGenerationChunk]:
        with of_both_kinds():
            settings = call_settings(kwargs)
            engine, span = self._engine_of(settings), current_span()
            metadata = run_manager.metadata if run_manager else None
            begun = self._begun(*self._asked(engine, messages, stop, metadata, settings))
        chunks = self._chunks(begun, settings, whole)
        try:
            for emission in begun.generation:
                yield from chunks.of(emission)
            yield from self._last(engine, chunks, begun.generation.result(), span)
        finally:
            begun.generation.cancel()

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        async for chunk in self._aanswer(messages, stop, run_manager, kwargs, whole=False):
            yield chunk

    async def _aanswer(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None,
        run_manager: AsyncCallbackManagerForLLMRun | None,
        kwargs: dict[str, Any],
        *,
        whole: bool,
    ) -> AsyncIterator[ChatGenerationChunk]:
        with of_both_kinds():
            settings = call_settings(kwargs)
            engine, span = await self._aengine_of(settings), current_span()
            asked = self._asked(engine, messages, stop, run_manager.metadata if run_manager else None, settings)
            if asked[1].grammar is not None:  # compiling one takes long, a tokenizer's first one above all
                await asyncio.to_thread(engine.grammars.matcher, asked[1].grammar)
            begun = self._begun(*asked)
        chunks = self._chunks(begun, settings, whole)
        try:
            async for emission in begun.generation:
                for chunk in chunks.of(emission):
                    yield chunk
            for chunk in self._last(engine, chunks, begun.generation.result(), span):
                yield chunk
        finally:
            begun.generation.cancel()

    def _last(
        self, engine: Engine, chunks: AnswerChunks, result: GenerationResult, span: Span | None
    ) -> Iterator[ChatGenerationChunk]:
        """The chunks held back, with the figures on the last one and on the span in which the call was made."""
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
        return generate_from_stream(self._answer(messages, stop, run_manager, kwargs, whole=True))

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        chunks = [chunk async for chunk in self._aanswer(messages, stop, run_manager, kwargs, whole=True)]
        return generate_from_stream(iter(chunks))

    # Tools

    def bind_tools(
        self, tools: Sequence[ToolLike], *, tool_choice: ToolChoice = None, **kwargs: Any
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Show `tools` to the model, which decides whether to call them unless `tool_choice` forces it to.

        `tool_choice`: "auto", "none", "any" (also "required" or True), a tool's name, or OpenAI's or Anthropic's dict.
        OpenAI's type "allowed_tools" shows the tools that it names alone.
        `parallel_tool_calls=False` is one call at most; `strict=True` holds every call to its tool's schema.
        Raises PromptError for a tool that is none, ConfigError for a choice that is none.
        """
        bound = openai_tools(tools)
        given = {name: value for name, value in call_settings(kwargs).items() if value is not None}
        choice = tool_choice_of(tool_choice, allowed_tools(tool_choice, bound))
        AnswerRules.of(given, choice, self.strict_tools)
        return self.bind(tools=bound, tool_choice=tool_choice, **given)

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
