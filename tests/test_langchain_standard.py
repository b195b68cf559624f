"""LangChain's own standard tests on a real tiny model that follows a script, in five ways of drafting.

Plain, with a draft model, from a cold and a warm cache, with a prediction. Everything is switched on but images, audio
and files, which `ChatPrecedent` refuses by name; nothing is marked as an expected failure. A grammar is at work where a
suite forces a call or asks for structured output.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from functools import cache
from typing import Any, Literal

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.load import load as langchain_load
from langchain_core.messages import AIMessage
from langchain_tests.integration_tests import ChatModelIntegrationTests, EmbeddingsIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests, EmbeddingsUnitTests
from langchain_tests.unit_tests.chat_models import ChatModelTests

from precedent.cache import NewCompletion, SpeculationCache
from precedent.engine import Engine
from precedent.langchain import ChatPrecedent, PrecedentEmbeddings
from precedent.langchain.engines import EngineHolder
from precedent.testing.embedders import HashEmbedder
from precedent.testing.scripted_model import scripted_model_engine

pytestmark = pytest.mark.filterwarnings("default")  # the suites use what LangChain itself has deprecated

Details = dict[Literal["invoke", "stream"], list[Any]]

CALLS = {
    "magic_function": '{"input": 3}',
    "magic_function_no_args": "{}",
    "get_weather": '{"location": "San Francisco"}',
    "greeting_generator": '{"answer_style": "pirate"}',
}

JOKE = {"setup": "Why do cats sit on keyboards?", "punchline": "To keep an eye on the mouse."}

TEXT = "one, two, three, and so on: a bun goes above and below a hamburger."
OTHER = "other-model"


def answer(prompt: str) -> str:
    """Calls the tool that a question needs unless its result is there, else says something."""
    for name, arguments in CALLS.items():
        if f'"{name}"' in prompt and "<tool_response>" not in prompt:
            return call(name, arguments)
    if "joke" in prompt.lower():
        return call("Joke", json.dumps(JOKE)) if '"Joke"' in prompt else json.dumps(JOKE)
    return TEXT


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@cache
def engine_of(name: str, draft_model: bool, cached: str) -> Engine:
    """An engine for all tests of a kind; with a warm cache it knows every answer, a cold one learns them."""
    store = SpeculationCache.open(embedder=HashEmbedder()) if cached else None
    engine = scripted_model_engine(answer, name=name, draft_model=draft_model, cache=store)
    for text in (TEXT, *(call(*pair) for pair in CALLS.items())) if cached == "warm" and store else ():
        ids = (*engine.tokenizer.encode(text, add_special_tokens=False), engine.tokenizer.eos_token_id)
        store.insert(NewCompletion(token_ids=ids, tokenizer=engine.tokenizer_fingerprint, model="", query=text))
    return engine


@pytest.fixture(scope="module", autouse=True)
def _closed_at_the_end() -> Iterator[None]:
    yield
    engine_of.cache_clear()
    gc.collect()


class Predicted(ChatPrecedent):
    """A chat model whose every call has a prediction, right for most of them."""

    def _submit(self, engine: Any, prompt_ids: Any, stop: Any, metadata: Any, kwargs: Any, **of_prompt: Any) -> Any:
        return super()._submit(engine, prompt_ids, stop, metadata, {**kwargs, "prediction": TEXT}, **of_prompt)


class Offered:
    """What the suites are told of the model, and a model for each of them."""

    draft_model, cached, speculation = False, "", True
    model_class: type[ChatPrecedent] = ChatPrecedent

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return self.model_class

    @property
    def chat_model_params(self) -> dict[str, Any]:
        ChatPrecedent.from_engine(engine_of(OTHER, False, ""))  # a call may choose what runs already
        holder = EngineHolder(engine=engine_of("scripted-model", self.draft_model, self.cached))
        return {"model": "scripted-model", "engines": holder, "speculation": self.speculation}

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supports_model_override(self) -> bool:
        return True

    @property
    def model_override_value(self) -> str:
        return OTHER

    @property
    def supports_anthropic_inputs(self) -> bool:
        return True

    @property
    def supported_usage_metadata_details(self) -> Details:
        return {"invoke": ["cache_read_input"], "stream": ["cache_read_input"]}

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        """The second of two equal requests: all of its prompt but the last token was read before."""
        model = self.chat_model_class(**self.chat_model_params)
        model.invoke("Hello there")
        if not stream:
            found = model.invoke("Hello there")
        else:
            first, *others = model.stream("Hello there")
            found = sum(others, first)
        assert found.usage_metadata["input_token_details"]["cache_read"] > 0
        return found


class TestUnit(Offered, ChatModelUnitTests):
    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "scripted"}

    @property
    def init_from_env_params(self) -> tuple[dict[str, str], dict[str, Any], dict[str, Any]]:
        environment = {"PRECEDENT_MODEL": "folder/name", "PRECEDENT_DRAFT_MODEL": "first-layers:2"}
        return environment, {}, {"model": "folder/name", "draft_model": "first-layers:2"}

    @pytest.fixture(autouse=True)
    def _admitted(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """`load` reads only classes that LangChain lists, or that it is given by name; this suite lists none."""
        name = "langchain_tests.unit_tests.chat_models.load"
        admit: Any = lambda obj, **settings: langchain_load(  # noqa: E731
            obj, **settings | {"allowed_objects": [ChatPrecedent]}
        )
        monkeypatch.setattr(name, admit)


class Plain(Offered):
    speculation = False


class Drafted(Offered):
    draft_model = True


class Cold(Offered):
    cached = "cold"


class Warm(Offered):
    cached = "warm"


class WithPrediction(Offered):
    model_class = Predicted


class TestPlain(Plain, ChatModelIntegrationTests): ...


class TestDrafted(Drafted, ChatModelIntegrationTests): ...


class TestCold(Cold, ChatModelIntegrationTests): ...


class TestWarm(Warm, ChatModelIntegrationTests): ...


class TestWithPrediction(WithPrediction, ChatModelIntegrationTests): ...


class TestStructuredByCalls(Plain, ChatModelTests):
    """The suite's tests of structured output once more, by forced calls instead of JSON."""

    @property
    def structured_output_kwargs(self) -> dict[str, Any]:
        return {"method": "function_calling"}

    test_structured_output = ChatModelIntegrationTests.test_structured_output
    test_structured_output_async = ChatModelIntegrationTests.test_structured_output_async
    test_structured_output_pydantic_2_v1 = ChatModelIntegrationTests.test_structured_output_pydantic_2_v1
    test_structured_output_optional_param = ChatModelIntegrationTests.test_structured_output_optional_param


@pytest.mark.parametrize(
    ("kind", "figure", "source"),
    [
        (Drafted, "drafted_by_source", "draft-model"),
        (Warm, "accepted_by_source", "recall"),
        (WithPrediction, "accepted_by_source", "prediction"),
    ],
)
def test_the_matrix_drafts_as_its_names_say(kind: type[Offered], figure: str, source: str) -> None:
    """Else five suites would show what one shows. On a new engine: one that knows better asks no bad draft model."""
    engine = engine_of.__wrapped__("new", kind.draft_model, kind.cached)
    message = kind.model_class.from_engine(engine).invoke("Count.")
    assert source in message.response_metadata["speculation"][figure]
    engine.close()


class TestEmbeddingsUnit(EmbeddingsUnitTests):
    @property
    def embeddings_class(self) -> type[PrecedentEmbeddings]:
        return PrecedentEmbeddings

    @property
    def embedding_model_params(self) -> dict[str, Any]:
        return {"model": HashEmbedder()}

    @property
    def init_from_env_params(self) -> tuple[dict[str, str], dict[str, Any], dict[str, Any]]:
        return {"PRECEDENT_EMBEDDER": "folder/name"}, {}, {"name": "folder/name"}


class TestEmbeddingsIntegration(EmbeddingsIntegrationTests):
    @property
    def embeddings_class(self) -> type[PrecedentEmbeddings]:
        return PrecedentEmbeddings

    @property
    def embedding_model_params(self) -> dict[str, Any]:
        return {"model": HashEmbedder()}
