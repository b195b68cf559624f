"""LangChain's own standard tests on a scripted `LlamaTarget`, whose context keeps cells as llama.cpp does."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from helpers.llama_context import FakeContext
from helpers.standard_answers import answer, thinking_tokenizer
from helpers.standard_suite import OTHER, SCRIPTED, Offered
from langchain_core.language_models import BaseChatModel
from langchain_tests.integration_tests import ChatModelIntegrationTests
from transformers import PreTrainedConfig

from precedent.langchain import ChatPrecedent
from precedent.langchain.engines import EngineHolder
from precedent.runtime.background import AtOnce
from precedent_llama_cpp.target import LlamaTarget
from precedent_testing.scripted_model import Scripted, ScriptedModelEngine, fixed_cost

pytestmark = pytest.mark.filterwarnings("default")  # the suite uses what LangChain itself has deprecated


class ScriptedLlama(Scripted, LlamaTarget):
    """A target of llama.cpp's that follows a script."""


@cache
def engine_of(name: str) -> ScriptedModelEngine:
    tokenizer = thinking_tokenizer()
    context = FakeContext(num_cells=1 << 14, vocab_size=len(tokenizer))
    target = ScriptedLlama(context, PreTrainedConfig()).follow(tokenizer, answer)
    return ScriptedModelEngine(target, tokenizer, name=name, cost=fixed_cost(), executor=AtOnce())


@pytest.fixture(scope="module", autouse=True)
def _closed_at_the_end() -> Iterator[None]:
    yield
    for name in (SCRIPTED, OTHER):
        engine_of(name).close()
    engine_of.cache_clear()


class TestOnLlama(Offered, ChatModelIntegrationTests):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatPrecedent

    @property
    def chat_model_params(self) -> dict[str, Any]:
        ChatPrecedent.from_engine(engine_of(OTHER))  # a call may choose what runs already
        return {"model": SCRIPTED, "engines": EngineHolder(engine=engine_of(SCRIPTED))}
