"""What LangChain's standard tests are told of a chat model that gives `helpers.standard_answers`."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import pytest
from langchain_core.load import load as langchain_load
from langchain_core.messages import AIMessage

from helpers.standard_answers import TEXT, THINK

Details = dict[Literal["invoke", "stream"], list[Any]]
SCRIPTED, OTHER = "scripted-model", "other-model"
DETAILS = ["reasoning_output", "cache_read_input"]


def admit(monkeypatch: pytest.MonkeyPatch, chat_model: type) -> None:
    """Give the suite's `load` the class that docs/how-to/langchain.md tells users to give; it reads no others."""

    def loaded(obj: Any, **settings: Any) -> Any:
        return langchain_load(obj, **settings | {"allowed_objects": [chat_model]})

    monkeypatch.setattr("langchain_tests.unit_tests.chat_models.load", loaded)


class Offered:
    """Properties of a suite; `chat_model_class` and `chat_model_params` are for subclasses to say."""

    chat_model_class: Any
    chat_model_params: Any

    has_tool_calling = has_tool_choice = has_structured_output = supports_json_mode = True
    returns_usage_metadata = supports_model_override = supports_anthropic_inputs = True
    model_override_value = OTHER
    supported_usage_metadata_details: ClassVar[Details] = {"invoke": DETAILS, "stream": DETAILS}

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        """The second of two equal requests: all of its prompt but the last token was read before."""
        self.answer_to("Hello there", stream=stream)
        found = self.answer_to("Hello there", stream=stream)
        assert found.usage_metadata["input_token_details"]["cache_read"] > 0
        return found

    def invoke_with_reasoning_output(self, *, stream: bool = False) -> AIMessage:
        """An answer that the model thought about."""
        found = self.answer_to(THINK, stream=stream)
        assert found.usage_metadata["output_token_details"]["reasoning"] > 0
        assert found.content == TEXT
        return found

    def answer_to(self, text: str, *, stream: bool) -> AIMessage:
        model = self.chat_model_class(**self.chat_model_params)
        if not stream:
            return model.invoke(text)
        first, *others = model.stream(text)
        return sum(others, first)
