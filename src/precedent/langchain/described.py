"""What LangChain asks about a chat model: its name in traces, the key of its answers, its written form, its tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from langchain_core.language_models import ModelProfile
from langchain_core.language_models.base import LangSmithParams
from langchain_core.messages import BaseMessage

from precedent.langchain.fields import ChatFields
from precedent.langchain.messages import template_messages_of
from precedent.langchain.profile import profile_of_engine, profile_of_files
from precedent.langchain.serializing import identifying_params, plain_fields
from precedent.langchain.settings import ONLY_SPEED, merged_stop
from precedent.langchain.tools import ToolLike, openai_tools
from precedent.text.prompt import render_prompt


class Described(ChatFields):
    """A chat model that answers for itself, without a call."""

    @property
    def _llm_type(self) -> str:
        return "precedent-chat"

    @classmethod
    def is_lc_serializable(cls) -> bool:
        """True: settings are written, weights never; a model that was handed over loaded is written by its name."""
        return True

    @classmethod
    def get_lc_namespace(cls) -> list[str]:
        """Where the class is found when it is read back."""
        return ["precedent", "langchain"]

    @property
    def lc_attributes(self) -> dict[str, Any]:
        """Objects among the fields as plain values; what only speeds answers up and cannot be written is left out."""
        return plain_fields(self)

    @property
    def _identifying_params(self) -> dict[str, Any]:
        names = ("strict_tools", "chat_template_kwargs", "reasoning")
        return {**identifying_params(self), **{name: getattr(self, name) for name in names}}

    def _get_llm_string(self, stop: list[str] | None = None, **kwargs: Any) -> str:
        """The key of an answer in LangChain's caches: all that it depends on, and the weights that are meant."""
        call = {name: value for name, value in kwargs.items() if name not in ONLY_SPEED}
        asked = {**self._identifying_params, **call, "call_stop": stop}
        return json.dumps(_with_text_keys(asked), sort_keys=True, default=str)

    def _resolve_model_profile(self) -> ModelProfile | None:
        engine = self._loaded_engine()
        return profile_of_files(self.model) if engine is None else profile_of_engine(engine)

    def _get_invocation_params(self, stop: list[str] | None = None, **kwargs: Any) -> dict[str, Any]:
        return super()._get_invocation_params(list(merged_stop(self.stop, stop)) or None, **kwargs)

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        merged = list(merged_stop(self.stop, stop))
        params = super()._get_ls_params(stop=merged or None, **kwargs)
        params["ls_provider"] = "precedent"
        return params

    def get_num_tokens_from_messages(self, messages: list[BaseMessage], tools: Sequence[ToolLike] | None = None) -> int:
        """Tokens of the prompt that these messages and tools become. Raises PromptError for what cannot be a prompt."""
        turns, shown = template_messages_of(messages), openai_tools(tools or ())
        return len(render_prompt(self.engine.tokenizer, turns, shown, self.template_settings({})))


def _with_text_keys(value: Any) -> Any:
    """A value whose dicts can be sorted; a key that is no text is told apart from the text of it."""
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else f"\0{key!r}": _with_text_keys(part) for key, part in value.items()}
    return [_with_text_keys(part) for part in value] if isinstance(value, list | tuple) else value
