"""LangChain's standard tests over a real socket: as many as in-process pass, with our client and with `ChatOpenAI`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
import pytest_asyncio
from helpers.standard_answers import engine_of
from helpers.standard_suite import OTHER, SCRIPTED, Offered
from langchain_core.language_models import BaseChatModel
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests

from precedent.langchain import ChatPrecedent
from precedent.langchain.engines import EngineHolder
from precedent_server.client import ChatPrecedentServer

pytestmark = [
    pytest.mark.clients,
    pytest.mark.filterwarnings("default"),  # the suites use what LangChain itself has deprecated
    pytest.mark.filterwarnings("ignore:The test <Function"),  # pytest-asyncio: not all tests of a class are async
]


class TestInProcess(Offered, ChatModelIntegrationTests):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatPrecedent

    @property
    def chat_model_params(self) -> dict[str, Any]:
        ChatPrecedent.from_engine(engine_of(OTHER, False, ""))  # a call may choose what runs already
        return {"model": SCRIPTED, "engines": EngineHolder(engine=engine_of(SCRIPTED, False, "cold"))}


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


@pytest.mark.parametrize("client", ["TestChatPrecedentServer", "TestChatOpenAI"])
def test_the_same_tests_pass_as_in_process(outcomes: Callable[[str], dict[str, str]], client: str) -> None:
    expected = outcomes("langchain TestInProcess")
    assert list(expected.values()).count("passed") > 40
    assert outcomes(f"langchain {client}") == expected
