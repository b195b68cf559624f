"""The methods of chat models that callers use, in this process and for a server: arguments are checked, tools bound."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any, Self

from langchain_core.language_models.base import LangSmithParams, LanguageModelInput
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import LLMResult
from langchain_core.prompt_values import PromptValue
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.config import ensure_config
from pydantic import model_validator

from precedent import __version__
from precedent.errors import ConfigError
from precedent.langchain.arguments import ChatFields, merged_stop, parallel_calls, strictness, workflow_step_of
from precedent.langchain.exceptions import of_both_kinds
from precedent.langchain.messages import checked_input
from precedent.langchain.structured_output import structured
from precedent.langchain.tools import ToolChoice, ToolLike, allowed_tools, openai_tools, tool_choice_of
from precedent.runtime.plain_values import shown


class ChatCalls(ChatFields, BaseChatModel):
    """A chat model whose calls are checked, and know the workflow step of their run."""

    def __init__(self, **kwargs: Any) -> None:
        """Check the settings. Raises ConfigError or UnsupportedError, which say what to write."""
        super().__init__(**kwargs)
        strictness({}, self.strict_tools)
        if self.output_version not in (None, "v0", "v1"):
            raise ConfigError(f"output_version={shown(self.output_version)} must be 'v0' or 'v1'")

    @of_both_kinds()
    def _with_run(self, metadata: Mapping[str, Any] | None, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments with what the run says of them: LangChain tells `_stream` and answer caches nothing of it."""
        return kwargs | self._of_run({**(metadata or {}), **(self.metadata or {})}, kwargs)

    def _of_run(self, run: Mapping[str, Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        step = kwargs.get("workflow_step") or workflow_step_of(run)
        return {} if step is None else {"workflow_step": step}

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
        return super().stream(input, config, **self._with_run(config["metadata"], kwargs))

    def astream(
        self, input: LanguageModelInput, config: RunnableConfig | None = None, **kwargs: Any
    ) -> AsyncIterator[AIMessageChunk]:
        """Stream an answer; see LangChain's `BaseChatModel.astream`."""
        self._check(kwargs)
        config = ensure_config(config)
        return super().astream(input, config, **self._with_run(config["metadata"], kwargs))

    def generate(self, messages: list[list[BaseMessage]], *args: Any, **kwargs: Any) -> LLMResult:
        """Answer several message lists; see LangChain's `BaseChatModel.generate`."""
        return super().generate(messages, *args, **self._with_run(kwargs.get("metadata"), kwargs))

    async def agenerate(self, messages: list[list[BaseMessage]], *args: Any, **kwargs: Any) -> LLMResult:
        """Answer several message lists; see LangChain's `BaseChatModel.agenerate`."""
        return await super().agenerate(messages, *args, **self._with_run(kwargs.get("metadata"), kwargs))

    def bind_tools(
        self, tools: Sequence[ToolLike], *, tool_choice: ToolChoice = None, **kwargs: Any
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Show `tools` to the model, which decides whether to call them unless `tool_choice` forces it to.

        `tool_choice`: "auto", "none", "any" (also "required" or True), a tool's name, or OpenAI's or Anthropic's dict.
        OpenAI's type "allowed_tools" shows the tools that it names alone.
        `parallel_tool_calls=False` is one call at most; `strict=True` holds every call to its tool's schema.
        Raises PromptError for a tool that is none, ConfigError for a choice that is none.
        """
        bound, settings = openai_tools(tools), self._call_settings(kwargs)
        tool_choice_of(tool_choice, allowed_tools(tool_choice, bound))
        strictness(settings, self.strict_tools)
        parallel_calls(settings)
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
        return structured(self, schema, method, strict, include_raw, self._call_settings(kwargs))

    # What LangChain asks about the model

    @classmethod
    def is_lc_serializable(cls) -> bool:
        """True. Settings are serialized, weights and keys never are."""
        return True

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(list(merged_stop(self.stop, stop)) or None, **kwargs)
        params["ls_provider"] = "precedent"
        return params

    @model_validator(mode="after")
    def _set_precedent_version(self) -> Self:
        """Add our version to traces; LangChain wants a validator of a name that no other class has."""
        self._add_version("precedent-llm", __version__)
        return self
