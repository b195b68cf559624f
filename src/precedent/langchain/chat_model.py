"""`ChatPrecedent`, a LangChain chat model on weights in this process that speculates from a cache and a draft model."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from langchain_core.language_models import ModelProfile
from langchain_core.language_models.chat_models import generate_from_stream
from langchain_core.messages import BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult

from precedent.cache import tools_fingerprint
from precedent.errors import ConfigError, PromptError, UnsupportedError
from precedent.langchain.answer_rules import AnswerRules
from precedent.langchain.answers import AnswerChunks, Prompt, Running
from precedent.langchain.arguments import OF_THE_CALL, ONLY_SPEED, merged_stop, own_tenant, tenant_of
from precedent.langchain.chat_calls import ChatCalls
from precedent.langchain.fields import EngineFields
from precedent.langchain.messages import media_of, template_messages_of, to_template_messages
from precedent.langchain.profile import profile_of_engine, profile_of_files, profile_of_weights
from precedent.langchain.recorded import AnswerReader
from precedent.langchain.synonyms import IN_A_CALL, WITH_TOOLS
from precedent.langchain.tools import NONE, ToolLike, allowed_tools, openai_tools, tool_choice_of
from precedent.text.answers import answer_syntax
from precedent.text.prompt import num_prompt_tokens, render_prompt
from precedent.text.query import recall_query
from precedent.text.template_settings import TemplateSettings
from precedent.text.traces import read_trajectories

if TYPE_CHECKING:
    from precedent.engine.engine import Engine

log = logging.getLogger(__name__)


class ChatPrecedent(EngineFields, ChatCalls):
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
        self.template_settings({})

    def _usable(self, engine: Engine) -> Engine:
        """The engine. Raises UnsupportedError if an encoder reads its prompts: such models hold no conversation."""
        if engine.encodes_prompt:
            raise UnsupportedError(
                f"{engine.model_name} is an encoder-decoder model, which has no chat template and no tool calls: use "
                "PrecedentLLM, which turns one text into another"
            )
        return engine

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

    def begin(self, messages: list[BaseMessage], settings: Mapping[str, Any]) -> Running:
        """Check everything, render the prompt and start a request; `settings` are a call's keyword arguments.

        For callers that send the answer elsewhere than to LangChain. Compiling a grammar may take seconds. Raises
        PrecedentErrors, each saying what to do.
        """
        return self._begin(messages, None, None, settings)

    def num_prompt_tokens(self, messages: list[BaseMessage], settings: Mapping[str, Any]) -> int:
        """The length of the prompt with which `begin` would start. Raises what `begin` raises about the prompt."""
        settings = self._call_settings(settings)
        return len(self._prompt(self._engine_of(settings), messages, settings).token_ids)

    def _generate(self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> ChatResult:
        return generate_from_stream(self._chunks(messages, stop, run_manager, kwargs, whole=True))

    async def _agenerate(self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> ChatResult:
        chunks = [chunk async for chunk in self._achunks(messages, stop, run_manager, kwargs, whole=True)]
        return generate_from_stream(iter(chunks))

    def _stream(
        self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any
    ) -> Iterator[ChatGenerationChunk]:
        return self._chunks(messages, stop, run_manager, kwargs)

    def _astream(
        self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any
    ) -> AsyncIterator[ChatGenerationChunk]:
        return self._achunks(messages, stop, run_manager, kwargs)

    def _prompt(self, engine: Engine, given: list[BaseMessage], settings: Mapping[str, Any]) -> Prompt:
        choice = settings.get("tool_choice")
        tools = allowed_tools(choice, openai_tools(settings.get("tools", ())))
        rules = AnswerRules.of(settings, tool_choice_of(choice, tools), self.strict_tools)
        tools = [] if rules.choice == NONE else tools
        turns = to_template_messages(given, media=media_of(settings, self.media))
        of_template, kept = self.template_settings(settings), engine.kept_prefixes
        token_ids = render_prompt(engine.tokenizer, turns, tools, of_template, engine.context_length)
        syntax = answer_syntax(engine.tokenizer, turns, tools, token_ids)
        grammar = rules.grammar(syntax)
        arguments = {
            "query": recall_query(turns),
            "tools": tools_fingerprint(tools),
            "grammar": grammar,
            "templates": self._templates(settings, tools, syntax.form),
            "shown_tokens": syntax.shown_tokens,
            "prefix_tokens": 0 if kept is None else kept.fixed_part.length(token_ids, turns, tools, of_template),
        }
        return Prompt(token_ids, arguments, syntax, {} if grammar is None else rules.notes())

    def _reader(self, running: Running, *, whole: bool) -> AnswerChunks:
        return AnswerChunks(running, in_blocks=self.output_version == "v1", whole=whole)

    def _of_run(self, run: Mapping[str, Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        tenant = {} if self.tenant_from is None else {"tenant": tenant_of(self, kwargs, run)}
        return super()._of_run(run, kwargs) | tenant

    # What else users call

    def warm(
        self,
        conversations: str | Path | Iterable[Sequence[Any]],
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
        settings = self._call_settings({"tenant": tenant, "workflow_step": workflow_step})
        cache, shown = self.engine.cache, openai_tools(tools)
        if cache is None:
            raise ConfigError("there is no speculation cache to warm: give the chat model speculation_cache=…")
        reader = AnswerReader(
            self.engine.tokenizer,
            tenant=own_tenant(self, settings.get("tenant")),
            workflow_step=settings.get("workflow_step", ""),
            settings=self.template_settings({}),
            media=self.media,
        )
        if not isinstance(conversations, str | Path):
            read = [self._turns(*numbered) for numbered in enumerate(_checked_lists(conversations), start=1)]
            return sum(cache.insert(one) > 0 for turns in read for one in reader.answers(turns, shown))
        logged, skipped = read_trajectories([Path(conversations)], reader.skipped.add), reader.skipped
        number = sum(cache.insert(one) > 0 for call in logged for one in reader.completions(call))
        if skipped.counts:
            count, first = skipped.counts.total(), next(iter(skipped.first.values()))
            log.warning("skipped answers of %s: %d, the first because of %s", conversations, count, first)
        return number

    def _turns(self, number: int, conversation: Any) -> list[dict[str, Any]]:
        try:
            return template_messages_of(_checked_lists(conversation), media=self.media)
        except (PromptError, UnsupportedError) as error:
            raise type(error)(f"conversation {number}: {error}") from error

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

    # What LangChain asks about the model

    @property
    def _llm_type(self) -> str:
        return "precedent-chat"

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
        return repr(sorted({**self._identifying_params, **call, "call_stop": stop}.items()))

    def _resolve_model_profile(self) -> ModelProfile | None:
        engine, weights = self.engines.loaded(self.model, self._engine_options()), self.engines.weights
        if engine is not None:
            return profile_of_engine(engine)
        if weights is not None:
            return profile_of_weights(*weights)
        return profile_of_files(self.model, self.model_kwargs, self.chat_template)

    def _get_invocation_params(self, stop: list[str] | None = None, **kwargs: Any) -> dict[str, Any]:
        return super()._get_invocation_params(list(merged_stop(self.stop, stop)) or None, **kwargs)


def _checked_lists(given: Any) -> Iterable[Any]:
    if isinstance(given, BaseMessage | str | Mapping) or not isinstance(given, Iterable):
        raise ConfigError("conversations must be lists of messages: give one list for each conversation")
    return given


def _written(value: Any) -> str | None:
    return str(value) if isinstance(value, str | Path) else None
