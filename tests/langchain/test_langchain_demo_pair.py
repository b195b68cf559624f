"""LangChain's standard tests on the demo model with its draft model: `make test-integration` says how many pass.

What these cases ask of a model beyond an interface (the right tool, the right argument) is asked of one of 135 million
parameters; a forced call or a schema leaves it no other form. It does not think, and one model is loaded, not two.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from helpers.standard_suite import Details, Offered
from langchain_tests.integration_tests import ChatModelIntegrationTests

from precedent.cache import SpeculationCache
from precedent.engine.engine import Engine
from precedent.langchain import ChatPrecedent
from precedent.langchain.engines import EngineHolder
from precedent.target.load.source import DEMO_TARGET
from precedent_testing.embedders import HashEmbedder

pytestmark = [pytest.mark.integration, pytest.mark.model, pytest.mark.filterwarnings("default")]


@cache
def engine() -> Engine:
    cache = SpeculationCache.open(embedder=HashEmbedder())
    return Engine.load(DEMO_TARGET, draft_model="first-layers:4", cache=cache)


@pytest.fixture(scope="module", autouse=True)
def _closed_at_the_end() -> Iterator[None]:
    yield
    engine().close()
    engine.cache_clear()


class OneCall(ChatPrecedent):
    """The suite expects one call per answer; a small model that may call again goes on calling."""

    def bind_tools(self, tools: Any, *, tool_choice: Any = None, **settings: Any) -> Any:
        return super().bind_tools(tools, tool_choice=tool_choice, **{"parallel_tool_calls": False, **settings})


class TestDemoPair(Offered, ChatModelIntegrationTests):
    chat_model_class = OneCall
    model_override_value = DEMO_TARGET

    @property
    def chat_model_params(self) -> dict[str, Any]:
        """Greedy text of a model of this size falls into loops; the seed makes sampled text the same every time."""
        sampling = {"temperature": 0.5, "seed": 1, "max_tokens": 200}
        return {"model": DEMO_TARGET, "engines": EngineHolder(engine=engine()), **sampling}

    @property
    def supported_usage_metadata_details(self) -> Details:
        return {"invoke": ["cache_read_input"], "stream": ["cache_read_input"]}
