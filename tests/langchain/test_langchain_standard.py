"""LangChain's own standard tests on a real tiny model that follows a script, in five ways of drafting.

From a warm cache with a draft model, and exhaustively plain, with a draft model, a cold cache and a prediction alone.
Nothing is marked as an expected failure, and skipped are only the tests of pictures, sound, files and recorded servers.
The suites ask little of an answer, so the engine looks at prompts: what a user, a tool or an earlier call said must be
there (`precedent_testing.overheard`).
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import pytest
from helpers.scripted_models import damaged
from helpers.standard_answers import TEXT, engine_of
from helpers.standard_suite import OTHER, SCRIPTED, Details, Offered, admit
from langchain_core.language_models import BaseChatModel
from langchain_core.tools import tool
from langchain_tests.integration_tests import ChatModelIntegrationTests, EmbeddingsIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests, EmbeddingsUnitTests
from langchain_tests.unit_tests.chat_models import ChatModelTests

from precedent.cache import SpeculationCache
from precedent.engine.engine import Engine
from precedent.langchain import ChatPrecedent, PrecedentEmbeddings
from precedent.langchain.engines import EngineHolder
from precedent.target.load.source import DEMO_TARGET
from precedent_testing.embedders import HashEmbedder

pytestmark = pytest.mark.filterwarnings("default")  # the suites use what LangChain itself has deprecated


@pytest.fixture(scope="module", autouse=True)
def _closed_at_the_end() -> Iterator[None]:
    yield
    if demo_engine.cache_info().currsize:
        demo_engine().close()
    demo_engine.cache_clear()
    engine_of.cache_clear()
    gc.collect()


class Predicted(ChatPrecedent):
    """A chat model whose every call has a prediction, right for most of them."""

    def _submit(self, engine: Any, prompt: Any, settings: Any, *others: Any) -> Any:
        return super()._submit(engine, prompt, {**settings, "prediction": TEXT}, *others)


class InProcess(Offered):
    """A model in this process for each suite."""

    draft_model, cached, speculation = False, "", True
    model_class: type[ChatPrecedent] = ChatPrecedent

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return self.model_class

    @property
    def chat_model_params(self) -> dict[str, Any]:
        ChatPrecedent.from_engine(engine_of(OTHER, False, ""))  # a call may choose what runs already
        holder = EngineHolder(engine=engine_of(SCRIPTED, self.draft_model, self.cached))
        return {"model": SCRIPTED, "engines": holder, "speculation": self.speculation}


class TestUnit(InProcess, ChatModelUnitTests):
    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "scripted"}

    @property
    def init_from_env_params(self) -> tuple[dict[str, str], dict[str, Any], dict[str, Any]]:
        environment = {"PRECEDENT_MODEL": "folder/name", "PRECEDENT_DRAFT_MODEL": "first-layers:2"}
        return environment, {}, {"model": "folder/name", "draft_model": "first-layers:2"}

    @pytest.fixture(autouse=True)
    def _admitted(self, monkeypatch: pytest.MonkeyPatch) -> None:
        admit(monkeypatch, ChatPrecedent)


class Drafted(InProcess):
    draft_model = True


class Warm(InProcess):
    draft_model, cached = True, "warm"


class WithPrediction(InProcess):
    model_class = Predicted


@pytest.mark.exhaustive
class TestPlain(InProcess, ChatModelIntegrationTests):
    speculation = False


class TestWarm(Warm, ChatModelIntegrationTests): ...


@pytest.mark.exhaustive
class TestDrafted(Drafted, ChatModelIntegrationTests): ...


@pytest.mark.exhaustive
class TestCold(InProcess, ChatModelIntegrationTests):
    cached = "cold"


@pytest.mark.exhaustive
class TestWithPrediction(WithPrediction, ChatModelIntegrationTests): ...


class TestStructuredByCalls(Drafted, ChatModelTests):
    """The suite's tests of structured output again, by a forced call instead of a grammar for the text."""

    @property
    def structured_output_kwargs(self) -> dict[str, Any]:
        return {"method": "function_calling"}

    test_structured_output = ChatModelIntegrationTests.test_structured_output
    test_structured_output_async = ChatModelIntegrationTests.test_structured_output_async
    test_structured_output_pydantic_2_v1 = ChatModelIntegrationTests.test_structured_output_pydantic_2_v1
    test_structured_output_optional_param = ChatModelIntegrationTests.test_structured_output_optional_param


def test_only_what_needs_pictures_sound_or_a_recorded_server_is_skipped() -> None:
    """A property that is off makes the suite skip in silence: these are all that may be."""
    offered = {name for name in dir(ChatModelTests) if name.startswith(("supports_", "enable_", "has_", "returns_"))}
    assert {name for name in offered if getattr(TestPlain(), name) is False} == {
        "supports_image_inputs", "supports_image_urls", "supports_pdf_inputs", "supports_audio_inputs",
        "supports_video_inputs", "supports_image_tool_message", "supports_pdf_tool_message", "enable_vcr_tests",
    }  # fmt: skip


@tool
def my_adder_tool(a: int, b: int) -> int:
    """Add two numbers, as the suite's own tool of this name."""
    return a + b


@pytest.mark.parametrize(
    "lost", [{"role": "tool", "content": ""}, {"role": "assistant", "tool_calls": []}], ids=["results", "earlier calls"]
)
@pytest.mark.parametrize("case", ["tool_message_histories_string_content", "agent_loop"])
def test_a_suite_does_not_pass_without_what_was_said(
    monkeypatch: pytest.MonkeyPatch, lost: dict[str, Any], case: str
) -> None:
    """Results that are emptied, or calls that are dropped, on the way to the prompt."""
    suite = TestPlain()
    arguments = {"my_adder_tool": my_adder_tool} if case != "agent_loop" else {}
    ask = partial(getattr(suite, f"test_{case}"), ChatPrecedent(**suite.chat_model_params), **arguments)
    ask()

    damaged(monkeypatch, lambda turns: [{**turn, **lost} if turn["role"] == lost["role"] else turn for turn in turns])
    with pytest.raises(AssertionError, match="the prompt is not what LangChain was asked"):
        ask()


@pytest.mark.parametrize(
    ("kind", "figure", "source"),
    [
        (Drafted, "drafted_by_source", "draft-model"),
        (Warm, "accepted_by_source", "recall"),
        (WithPrediction, "accepted_by_source", "prediction"),
    ],
)
def test_the_matrix_drafts_as_its_names_say(kind: type[InProcess], figure: str, source: str) -> None:
    """Else five suites would show what one shows. On a new engine: one that knows better asks no bad draft model."""
    engine = engine_of.__wrapped__("new", kind.draft_model, kind.cached)
    message = kind.model_class.from_engine(engine).invoke("Count.")
    assert source in message.response_metadata["speculation"][figure]
    engine.close()


# Embeddings


class OfEmbeddings:
    embeddings_class = PrecedentEmbeddings

    @property
    def embedding_model_params(self) -> dict[str, Any]:
        return {"model": HashEmbedder()}


class TestEmbeddingsUnit(OfEmbeddings, EmbeddingsUnitTests):  # type: ignore[misc]  # an attribute for a property
    @property
    def init_from_env_params(self) -> tuple[dict[str, str], dict[str, Any], dict[str, Any]]:
        return {"PRECEDENT_EMBEDDER": "folder/name"}, {}, {"name": "folder/name"}


class TestEmbeddingsIntegration(OfEmbeddings, EmbeddingsIntegrationTests): ...  # type: ignore[misc]


# On the demo model with its draft model: `make test-integration` says how many pass


@cache
def demo_engine() -> Engine:
    cache = SpeculationCache.open(embedder=HashEmbedder())
    return Engine.load(DEMO_TARGET, draft_model="first-layers:4", cache=cache)


class OneCall(ChatPrecedent):
    """The suite expects one call per answer; a small model that may call again goes on calling."""

    def bind_tools(self, tools: Any, *, tool_choice: Any = None, **settings: Any) -> Any:
        return super().bind_tools(tools, tool_choice=tool_choice, **{"parallel_tool_calls": False, **settings})


@pytest.mark.integration
@pytest.mark.model
class TestDemoPair(Offered, ChatModelIntegrationTests):
    """What these cases ask beyond an interface (the right tool, the right argument) is asked of 135 million parameters.

    A forced call or a schema leaves them no other form. The model does not think, and one model is loaded, not two.
    """

    chat_model_class = OneCall
    model_override_value = DEMO_TARGET

    @property
    def chat_model_params(self) -> dict[str, Any]:
        """Greedy text of a model of this size falls into loops; the seed makes sampled text the same every time."""
        sampling = {"temperature": 0.5, "seed": 1, "max_tokens": 200}
        return {"model": DEMO_TARGET, "engines": EngineHolder(engine=demo_engine()), **sampling}

    @property
    def supported_usage_metadata_details(self) -> Details:
        return {"invoke": ["cache_read_input"], "stream": ["cache_read_input"]}
