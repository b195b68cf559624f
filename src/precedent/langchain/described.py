"""What LangChain asks about a chat model: its name in traces, the key of its answers, how it counts tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain_core.language_models.base import LangSmithParams
from langchain_core.messages import BaseMessage

from precedent.langchain.fields import ChatFields
from precedent.langchain.messages import to_template_messages
from precedent.langchain.settings import SAMPLING, merged_stop, templates_of
from precedent.langchain.tools import ToolLike, openai_tools
from precedent.text.prompt import render_prompt


class Described(ChatFields):
    """A chat model that answers for itself, without a call."""

    @property
    def _llm_type(self) -> str:
        return "precedent-chat"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """All that the answer depends on, and what speeds it up: LangChain's answer caches use it as their key."""
        draft = self.draft_model
        named = draft if draft is None or isinstance(draft, str) else type(draft).__name__
        names = ("device", "dtype", *SAMPLING, "stop", "tenant", "drafters", "speculation", "strict_tools")
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
