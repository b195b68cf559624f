"""LangChain's own standard unit tests on `ChatPrecedentServer`, without an expected failure."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.load import load as langchain_load
from langchain_tests.unit_tests import ChatModelUnitTests

from precedent.client import ChatPrecedentServer

pytestmark = pytest.mark.filterwarnings("default")  # the suites use what LangChain itself has deprecated


class TestUnit(ChatModelUnitTests):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatPrecedentServer

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "smol", "base_url": "http://server"}

    @property
    def has_tool_calling(self) -> bool:
        return True

    @property
    def has_tool_choice(self) -> bool:
        return True

    @property
    def has_structured_output(self) -> bool:
        return True

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def init_from_env_params(self) -> tuple[dict[str, str], dict[str, Any], dict[str, Any]]:
        environment = {"PRECEDENT_MODEL": "folder/name", "PRECEDENT_API_KEY": "key"}
        return environment, {"base_url": "http://server"}, {"model": "folder/name", "openai_api_key": "key"}

    @pytest.fixture(autouse=True)
    def _admitted(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """`load` reads only classes that LangChain lists, or that it is given by name; this suite gives none.

        So it is given what docs/langchain.md tells users to give.
        """
        name = "langchain_tests.unit_tests.chat_models.load"
        admit: Any = lambda obj, **settings: langchain_load(  # noqa: E731
            obj, **settings | {"allowed_objects": [ChatPrecedentServer]}
        )
        monkeypatch.setattr(name, admit)
