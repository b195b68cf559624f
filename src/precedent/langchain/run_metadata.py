"""Passes a run's configuration on as arguments of the call: LangChain gives it to `_generate` but not to `_stream`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any

from langchain_core.language_models.base import LanguageModelInput
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import LLMResult
from langchain_core.prompt_values import PromptValue
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import ensure_config

from precedent.langchain.exceptions import of_both_kinds
from precedent.langchain.fields import ChatFields
from precedent.langchain.messages import checked_input
from precedent.langchain.runs import run_metadata, workflow_step_of
from precedent.langchain.settings import check_call
from precedent.langchain.tenants import tenant_of, with_tenant

WAYS_IN = ("invoke", "ainvoke", "stream", "astream", "batch", "abatch", "stream_events", "astream_events")


class FollowsConfigurable:
    """Copies a tenant from `configurable` into the metadata, in every entry method, if the model reads it there.

    Older versions of LangChain copy it themselves.
    """


def _following(way: str) -> Callable[..., Any]:
    def follow(self: Any, input: Any, config: Any = None, *others: Any, **kwargs: Any) -> Any:
        if self.tenant_from is not None:
            config = [with_tenant(one) for one in config] if isinstance(config, list) else with_tenant(config)
        return getattr(super(FollowsConfigurable, self), way)(input, config, *others, **kwargs)

    follow.__name__, follow.__doc__ = way, f"As LangChain's `Runnable.{way}`."
    return follow


for _way in WAYS_IN:
    setattr(FollowsConfigurable, _way, _following(_way))


class FollowsRunMetadata(ChatFields):
    """A chat model that passes tenant and workflow step on from every entry method, so that no tenant gets lost."""

    @of_both_kinds()
    def _with_run_keys(self, metadata: Mapping[str, Any] | None, kwargs: dict[str, Any]) -> dict[str, Any]:
        run = run_metadata(self, metadata)
        tenant = kwargs.get("tenant") if self.tenant_from is None else tenant_of(self, kwargs, run)
        keys = {"tenant": tenant, "workflow_step": kwargs.get("workflow_step") or workflow_step_of(run)}
        others = {name: value for name, value in kwargs.items() if name not in keys}
        return others | {name: value for name, value in keys.items() if value is not None}

    def _convert_input(self, model_input: LanguageModelInput) -> PromptValue:
        with of_both_kinds():
            return checked_input(super()._convert_input, model_input)

    def invoke(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> AIMessage:
        """Answer; see LangChain's `BaseChatModel.invoke`, which would not pass on all of these arguments."""
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
        """Answer; see LangChain's `BaseChatModel.ainvoke`, which would not pass on all of these arguments."""
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
