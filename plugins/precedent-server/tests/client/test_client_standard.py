"""LangChain's own standard unit tests on `ChatPrecedentServer`, without an expected failure."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.standard_suite import Offered, admit
from langchain_core.language_models import BaseChatModel
from langchain_tests.unit_tests import ChatModelUnitTests

from precedent_server.client import ChatPrecedentServer

pytestmark = pytest.mark.filterwarnings("default")  # the suites use what LangChain itself has deprecated


class TestUnit(Offered, ChatModelUnitTests):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatPrecedentServer

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "smol", "base_url": "http://server"}

    @property
    def init_from_env_params(self) -> tuple[dict[str, str], dict[str, Any], dict[str, Any]]:
        environment = {"PRECEDENT_MODEL": "folder/name", "PRECEDENT_API_KEY": "key"}
        return environment, {"base_url": "http://server"}, {"model": "folder/name", "openai_api_key": "key"}

    @pytest.fixture(autouse=True)
    def _admitted(self, monkeypatch: pytest.MonkeyPatch) -> None:
        admit(monkeypatch, ChatPrecedentServer)
