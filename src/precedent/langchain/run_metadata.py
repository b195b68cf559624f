"""The run's metadata as arguments of the call: LangChain hands it to `_generate`, but not to `_stream`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

from langchain_core.language_models.base import LanguageModelInput
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import LLMResult
from langchain_core.prompt_values import PromptValue
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import ensure_config

from precedent.errors import PromptError
from precedent.langchain.exceptions import of_both_kinds
from precedent.langchain.settings import check_call, run_keys
from precedent.langchain.wording import input_in_our_words
from precedent.plain_values import check_plain


class FollowsRunMetadata(BaseChatModel):
    """A chat model whose every way in names tenant and workflow step: a tenant must never get lost on the way."""

    @of_both_kinds()
    def _with_run_keys(self, metadata: Mapping[str, Any] | None, kwargs: dict[str, Any]) -> dict[str, Any]:
        return {**run_keys({**(self.metadata or {}), **(metadata or {})}), **kwargs}

    def _convert_input(self, model_input: LanguageModelInput) -> PromptValue:
        with of_both_kinds():
            with input_in_our_words():
                prompt = super()._convert_input(model_input)
            for position, message in enumerate(prompt.to_messages(), start=1):  # before LangChain walks through them
                check_plain(f"message {position}", dict(message), PromptError)
        return prompt

    def invoke(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> AIMessage:
        """Answer; see LangChain's `BaseChatModel.invoke`, which some of these arguments would not reach."""
        check_call(kwargs, stop)
        return super().invoke(input, config, stop=stop, **kwargs)

    async def ainvoke(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> AIMessage:
        """Answer; see LangChain's `BaseChatModel.ainvoke`, which some of these arguments would not reach."""
        check_call(kwargs, stop)
        return await super().ainvoke(input, config, stop=stop, **kwargs)

    def stream(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> Iterator[AIMessageChunk]:
        """Stream an answer; see LangChain's `BaseChatModel.stream`."""
        check_call(kwargs, stop)
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
        check_call(kwargs, stop)
        kwargs = self._with_run_keys(ensure_config(config)["metadata"], kwargs)
        return super().astream(input, config, stop=stop, **kwargs)

    def generate(self, messages: list[list[BaseMessage]], *args: Any, **kwargs: Any) -> LLMResult:
        """Answer several message lists; see LangChain's `BaseChatModel.generate`."""
        return super().generate(messages, *args, **self._with_run_keys(kwargs.get("metadata"), kwargs))

    async def agenerate(self, messages: list[list[BaseMessage]], *args: Any, **kwargs: Any) -> LLMResult:
        """Answer several message lists; see LangChain's `BaseChatModel.agenerate`."""
        return await super().agenerate(messages, *args, **self._with_run_keys(kwargs.get("metadata"), kwargs))
