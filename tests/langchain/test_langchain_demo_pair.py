"""LangChain's standard tests on the demo model with its draft model: `make test-integration` says how many pass.

What these cases ask of a model beyond an interface (the right tool, the right argument) is asked of one of 135 million
parameters; a forced call or a schema leaves it no other form. It does not think, and one model is loaded, not two.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, Literal

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage
from langchain_tests.integration_tests import ChatModelIntegrationTests

from precedent.cache import SpeculationCache
from precedent.engine.engine import Engine
from precedent.langchain import ChatPrecedent
from precedent.langchain.engines import EngineHolder
from precedent.target.load.source import DEMO_TARGET
from precedent_testing.embedders import HashEmbedder

pytestmark = [pytest.mark.integration, pytest.mark.model, pytest.mark.filterwarnings("default")]

DRAFT_MODEL = "first-layers:4"

SETTINGS = {"temperature": 0.5, "seed": 1, "max_tokens": 200}
"""Greedy text of a model of this size falls into loops; the seed makes sampled text the same every time."""

Details = dict[Literal["invoke", "stream"], list[Any]]


@cache
def engine() -> Engine:
    return Engine.load(DEMO_TARGET, draft_model=DRAFT_MODEL, cache=SpeculationCache.open(embedder=HashEmbedder()))


@pytest.fixture(scope="module", autouse=True)
def _closed_at_the_end() -> Iterator[None]:
    yield
    engine().close()
    engine.cache_clear()


class OneCall(ChatPrecedent):
    """The suite expects one call per answer; a small model that may call again goes on calling."""

    def bind_tools(self, tools: Any, *, tool_choice: Any = None, **settings: Any) -> Any:
        return super().bind_tools(tools, tool_choice=tool_choice, **{"parallel_tool_calls": False, **settings})


class TestDemoPair(ChatModelIntegrationTests):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return OneCall

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": DEMO_TARGET, "engines": EngineHolder(engine=engine()), **SETTINGS}

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supports_anthropic_inputs(self) -> bool:
        return True

    @property
    def supports_model_override(self) -> bool:
        return True

    @property
    def model_override_value(self) -> str:
        return DEMO_TARGET

    @property
    def supported_usage_metadata_details(self) -> Details:
        return {"invoke": ["cache_read_input"], "stream": ["cache_read_input"]}

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        """The second of two equal requests: all of its prompt but the last token was read before."""
        self.answer_to("Hello there", stream=stream)
        return self.answer_to("Hello there", stream=stream)

    def answer_to(self, text: str, *, stream: bool) -> AIMessage:
        model = self.chat_model_class(**self.chat_model_params)
        if not stream:
            return model.invoke(text)
        first, *others = model.stream(text)
        return sum(others, first)
