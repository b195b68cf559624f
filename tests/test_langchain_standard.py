"""LangChain's own standard tests: what needs neither a forced tool call nor structured output.

A property switches off what `ChatPrecedent` refuses by name; nothing is marked as an expected failure.
"""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests
from langchain_tests.unit_tests.chat_models import ChatModelTests

from precedent.langchain import ChatPrecedent
from precedent.langchain.engines import EngineHolder
from precedent.testing.scripted_engine import ScriptedEngine, chatml_tokenizer

pytestmark = pytest.mark.filterwarnings("default")  # the suites use what LangChain itself has deprecated


class Offered:
    """What the suites are told of the model, and a model for each of them."""

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatPrecedent

    @property
    def has_tool_choice(self) -> bool:
        return False

    @property
    def has_structured_output(self) -> bool:
        return False

    @property
    def supports_model_override(self) -> bool:
        return False

    @property
    def supports_anthropic_inputs(self) -> bool:
        return True


class TestUnit(Offered, ChatModelUnitTests):
    @property
    def has_tool_calling(self) -> bool:
        return False  # its only test forces a call

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "scripted"}


CALLS = {
    "magic_function": '{"input": 3}',
    "magic_function_no_args": "{}",
    "get_weather": '{"location": "San Francisco"}',
    "greeting_generator": '{"answer_style": "pirate"}',
}


def answer(prompt: str) -> str:
    """Calls the tool that a question needs unless its result is there, else says something."""
    for name, arguments in CALLS.items():
        if f'"{name}"' in prompt and "<tool_response>" not in prompt:
            return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
    return "one, two, three, and so on: a bun goes above and below a hamburger."


class OnScriptedEngine(Offered):
    @property
    def chat_model_params(self) -> dict[str, Any]:
        engine: Any = ScriptedEngine(chatml_tokenizer(), answer)
        return {"model": "scripted", "engines": EngineHolder(engine=engine)}


class TestIntegration(OnScriptedEngine, ChatModelIntegrationTests):
    @property
    def has_tool_calling(self) -> bool:
        return False  # some of these tests force a call; those that do not are in the next class


class TestToolCalling(OnScriptedEngine, ChatModelTests):
    """The suite's own tests of tools that the model calls of its own accord."""

    @property
    def has_tool_calling(self) -> bool:
        return True

    test_tool_calling = ChatModelIntegrationTests.test_tool_calling
    test_tool_calling_async = ChatModelIntegrationTests.test_tool_calling_async
    test_tool_calling_with_no_arguments = ChatModelIntegrationTests.test_tool_calling_with_no_arguments
    test_bind_runnables_as_tools = ChatModelIntegrationTests.test_bind_runnables_as_tools
    test_tool_message_histories_string_content = ChatModelIntegrationTests.test_tool_message_histories_string_content
    test_tool_message_histories_list_content = ChatModelIntegrationTests.test_tool_message_histories_list_content
    test_tool_message_error_status = ChatModelIntegrationTests.test_tool_message_error_status
    test_anthropic_inputs = ChatModelIntegrationTests.test_anthropic_inputs
    test_agent_loop = ChatModelIntegrationTests.test_agent_loop
