"""Answers LangChain's questions about a chat model: its name in traces, cache key, serialized form and token counts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from langchain_core.language_models import ModelProfile
from langchain_core.language_models.base import LangSmithParams
from langchain_core.messages import BaseMessage

from precedent.langchain.arguments import ONLY_SPEED, merged_stop
from precedent.langchain.fields import ChatFields
from precedent.langchain.messages import template_messages_of
from precedent.langchain.profile import profile_of_engine, profile_of_files, profile_of_weights
from precedent.langchain.serializing import identifying_params, plain_fields
from precedent.langchain.tools import ToolLike, openai_tools
from precedent.text.prompt import num_prompt_tokens


class Described(ChatFields):
    """The part of a chat model that describes it without a call."""

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
        """Fields that are objects, as plain values; those that cannot be written and affect only speed are left out."""
        return plain_fields(self)

    @property
    def _identifying_params(self) -> dict[str, Any]:
        names = ("strict_tools", "chat_template_kwargs", "reasoning", "media")
        return {**identifying_params(self), **{name: getattr(self, name) for name in names}}

    def _get_llm_string(self, stop: list[str] | None = None, **kwargs: Any) -> str:
        """The key of an answer in LangChain's caches: everything that it depends on, including the model's identity."""
        call = {name: value for name, value in kwargs.items() if name not in ONLY_SPEED}
        asked = {**self._identifying_params, **call, "call_stop": stop}
        return json.dumps(_with_text_keys(asked), sort_keys=True, default=str)

    def _resolve_model_profile(self) -> ModelProfile | None:
        engine = self._loaded_engine()
        if engine is not None:
            return profile_of_engine(engine)
        weights = self.engines.weights
        if weights is not None:
            return profile_of_weights(*weights)
        return profile_of_files(self.model, self.model_kwargs, self.chat_template)

    def _get_invocation_params(self, stop: list[str] | None = None, **kwargs: Any) -> dict[str, Any]:
        return super()._get_invocation_params(list(merged_stop(self.stop, stop)) or None, **kwargs)

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        merged = list(merged_stop(self.stop, stop))
        params = super()._get_ls_params(stop=merged or None, **kwargs)
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


def _with_text_keys(value: Any) -> Any:
    """The value with text keys, so that its dicts can be sorted; a converted key never equals an original text key."""
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else f"\0{key!r}": _with_text_keys(part) for key, part in value.items()}
    return [_with_text_keys(part) for part in value] if isinstance(value, list | tuple) else value
