"""LangChain's standard tests over a real socket, with our client and others, without an expected failure."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, ClassVar

import httpx
import pytest
import pytest_asyncio
from helpers.standard_answers import TEXT, THINK
from helpers.standard_suite import SCRIPTED, Details, Offered
from langchain_anthropic import ChatAnthropic
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage
from langchain_ollama import ChatOllama
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests

from precedent_server.client import ChatPrecedentServer

pytestmark = [
    pytest.mark.clients,
    pytest.mark.filterwarnings("default"),  # the suites use what LangChain itself has deprecated
    pytest.mark.filterwarnings("ignore:The test <Function"),  # pytest-asyncio: not all tests of a class are async
]


@pytest_asyncio.fixture(scope="class", loop_scope="class")
async def place(server: Any) -> AsyncIterator[dict[str, Any]]:
    """Where the model is; all tests of a class share connections and the event loop that these belong to."""
    with httpx.Client() as client:
        async with httpx.AsyncClient() as async_client:
            clients = {"http_client": client, "http_async_client": async_client}
            yield {"base_url": server.url, "api_key": server.keys["desk"], **clients}


class Connected(Offered):
    """A model behind the server."""

    @pytest.fixture(autouse=True)
    def _connect(self, place: dict[str, Any]) -> None:
        self.place = place

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": SCRIPTED, **self.place}


@pytest.mark.asyncio(loop_scope="class")
class TestChatPrecedentServer(Connected, ChatModelIntegrationTests):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatPrecedentServer


@pytest.mark.asyncio(loop_scope="class")
class TestChatOpenAI(Connected, ChatModelIntegrationTests):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {**super().chat_model_params, "stream_usage": True}  # asks for usage only of OpenAI's own address


@pytest.mark.asyncio(loop_scope="class")
class TestChatAnthropic(Connected, ChatModelIntegrationTests):
    """Left out is JSON mode, which Anthropic's interface does not have."""

    supports_json_mode = False

    @pytest.fixture(autouse=True)
    def _connect(self, server: Any) -> None:
        self.place = {"base_url": server.address, "api_key": server.keys["desk"]}

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatAnthropic

    def invoke_with_reasoning_output(self, *, stream: bool = False) -> AIMessage:
        """An answer that the model thought about; its content is a block of thoughts and one of text."""
        found = self.answer_to(THINK, stream=stream)
        assert found.usage_metadata["output_token_details"]["reasoning"] > 0
        assert found.text == TEXT
        return found


@pytest.mark.asyncio(loop_scope="class")
class TestChatOllama(Connected, ChatModelIntegrationTests):
    """Left out is what ChatOllama does not do.

    It sends no `tool_choice`, tells no details of the usage, and refuses Anthropic's blocks before they are sent.
    """

    has_tool_choice = supports_anthropic_inputs = False
    supported_usage_metadata_details: ClassVar[Details] = {"invoke": [], "stream": []}

    @pytest_asyncio.fixture(scope="class", loop_scope="class")
    async def place(self, server: Any) -> AsyncIterator[dict[str, Any]]:
        headers = {"Authorization": f"Bearer {server.keys['desk']}"}
        with httpx.HTTPTransport() as transport:
            async with httpx.AsyncHTTPTransport() as async_transport:
                yield {
                    "base_url": server.address,
                    "client_kwargs": {"headers": headers},
                    "sync_client_kwargs": {"transport": transport},
                    "async_client_kwargs": {"transport": async_transport},
                }

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatOllama
