"""What a call of ChatPrecedent can ask for beyond an answer, and what LangChain can ask of the model without a call."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.callbacks import UsageMetadataCallbackHandler
from langchain_core.load import dumpd, dumps, load
from langchain_core.messages import AIMessage
from langchain_core.rate_limiters import InMemoryRateLimiter
from langchain_core.runnables import ConfigurableField
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider

from precedent import SpeculationCache, SpeculationConfig, Templates
from precedent.errors import ConfigError, ModelLoadError, UnsupportedError
from precedent.langchain import ChatPrecedent, PrecedentLLM
from precedent.langchain import profile as profiles
from precedent.text.prompt import hermes_template
from precedent_testing.embedders import HashEmbedder
from precedent_testing.scripted_engine import ScriptedEngine, chatml_tokenizer

TOKENIZER = chatml_tokenizer(chat_template=hermes_template())


def scripted(*answers: str, **fields: Any) -> ChatPrecedent:
    return ChatPrecedent.from_engine(ScriptedEngine(TOKENIZER, answers), **fields)


# Log-probabilities


async def test_logprobs_have_openais_shape_on_every_way() -> None:
    asked = {"logprobs": True, "top_logprobs": 1}
    message = scripted("né").invoke("hi", **asked)
    content = message.response_metadata["logprobs"]["content"]
    assert [one["token"] for one in content[:2]] == ["n", "�"]
    assert [one["bytes"] for one in content[:2]] == [[110], None], "half of a character has no bytes of its own"
    assert content[0]["top_logprobs"] == [{"token": "n", "bytes": [110], "logprob": 0.0}]
    assert len(content) == message.usage_metadata["output_tokens"], "one for each token, the end token included"
    first, *others = scripted("né").stream("hi", **asked)
    assert sum(others, first).response_metadata["logprobs"] == {"content": content}
    assert (await scripted("né", **asked).ainvoke("hi")).response_metadata["logprobs"] == {"content": content}
    json.dumps(message.response_metadata)


def test_nobody_pays_for_logprobs_that_were_not_asked_for() -> None:
    model = scripted("a", "b", logprobs=True)
    assert "logprobs" not in model.invoke("hi", logprobs=False).response_metadata
    assert model.engine.requests[0].sampling.logprobs is None
    assert "logprobs" in model.invoke("hi").response_metadata


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"top_logprobs": 3}, "top_logprobs=3 needs logprobs=True"),
        ({"logprobs": 5}, "logprobs=5 must be True or False"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs=21 must be a number of tokens, at most 20"),
        ({"logprobs": True, "top_logprobs": "a"}, "top_logprobs='a' must be a number of tokens"),
    ],
)
def test_a_wrong_wish_for_logprobs_is_one_line(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        scripted("a").invoke("hi", **asked)


# Another model for one call


def test_a_call_may_choose_a_model_that_runs() -> None:
    other = ScriptedEngine(TOKENIZER, ["from the other"], model_name="the-other")
    ChatPrecedent.from_engine(other)
    message = scripted("from my own").invoke("hi", model="the-other")
    assert message.content == "from the other"
    assert message.response_metadata["model_name"] == "the-other"


async def test_async_and_streamed_calls_choose_as_well() -> None:
    other = ScriptedEngine(TOKENIZER, ["x", "y"], model_name="the-second")
    ChatPrecedent.from_engine(other)
    model = scripted()
    assert (await model.ainvoke("hi", model="the-second")).content == "x"
    assert "".join(str(chunk.content) for chunk in model.stream("hi", model="the-second")) == "y"


def test_a_name_of_two_engines_is_refused() -> None:
    twins = [ScriptedEngine(TOKENIZER, ["x"], model_name="twin") for _ in range(2)]
    for twin in twins:
        ChatPrecedent.from_engine(twin)
    with pytest.raises(UnsupportedError, match="names 2 loaded engines"):
        scripted("a").invoke("hi", model="twin")


def test_one_answer_per_request() -> None:
    with pytest.raises(UnsupportedError, match="n=2 is not supported"):
        scripted("a").invoke("hi", n=2)


# Written down


@pytest.mark.filterwarnings("ignore::langchain_core._api.beta_decorator.LangChainBetaWarning")
def test_a_model_is_written_without_weights_and_read_back() -> None:
    model = ChatPrecedent(
        model="folder/name",
        draft_model="first-layers:2",
        speculation_cache="orders.db",
        temperature=0.5,
        stop=["x"],
        speculation=SpeculationConfig(max_nodes=4),
        templates=Templates(["Order {number}."]),
        model_kwargs={"revision": "main", "token": "hf_secret"},
        api_key="sk-secret",
    )
    written = dumpd(model)
    assert "secret" not in json.dumps(written)
    assert "not_implemented" not in json.dumps(written)
    again = load(written, allowed_objects=[ChatPrecedent], valid_namespaces=["precedent"])
    speculation = written["kwargs"]["speculation"]
    assert again._identifying_params == {**model._identifying_params, "speculation": speculation}
    assert SpeculationConfig.from_dict(speculation).max_nodes == 4
    assert again.model_kwargs == {"revision": "main"}
    assert again._engine_options().draft_model == "first-layers:2"


def test_objects_that_only_speed_up_are_left_out_and_a_cache_is_its_path(tmp_path: Path) -> None:
    with SpeculationCache.open(tmp_path / "c.db", embedder=HashEmbedder()) as cache:
        kwargs = dumpd(ChatPrecedent(model="m", speculation_cache=cache, embedder=HashEmbedder()))["kwargs"]
    assert kwargs["speculation_cache"] == str(tmp_path / "c.db")
    assert kwargs["embedder"] is None


def test_weights_handed_over_are_written_by_their_name() -> None:
    assert dumpd(scripted("a"))["kwargs"]["model"] == "scripted"
    assert "engines" not in dumps(scripted("a"))


def test_the_environment_fills_in_what_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRECEDENT_MODEL", "folder/name")
    monkeypatch.setenv("PRECEDENT_SPECULATION_CACHE", "orders.db")
    assert ChatPrecedent().model == PrecedentLLM().model == "folder/name"
    assert ChatPrecedent(model="mine").speculation_cache == "orders.db"
    assert ChatPrecedent(model_name="mine").model == "mine"
    assert scripted("a").speculation_cache is None, "an engine that runs has its cache already"


# The profile


def test_the_profile_of_a_folder_and_of_an_engine(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "max_position_embeddings": 4096}')
    (tmp_path / "chat_template.jinja").write_text("{% if tools %}{{ tools }}{% endif %}<think></think>")
    profile = ChatPrecedent(model=str(tmp_path)).profile
    assert profile is not None
    assert (profile["max_input_tokens"], profile["tool_calling"], profile["reasoning_output"]) == (4096, True, True)
    assert profile["image_inputs"] is False
    assert scripted("a").profile["max_input_tokens"] == 100_000
    assert scripted("a").profile["reasoning_output"] is False


def test_a_model_that_is_not_here_has_no_profile_and_is_not_asked_for() -> None:
    assert ChatPrecedent(model="nobody/nothing").profile is None
    assert profiles.profile_of_files("not a name at all: //") is None


# Tracing


@pytest.fixture
def span() -> Iterator[ReadableSpan]:
    with TracerProvider().get_tracer("test").start_as_current_span("call") as current:
        assert isinstance(current, ReadableSpan)
        yield current


EXPECTED = {
    "gen_ai.operation.name": "chat",
    "gen_ai.provider.name": "precedent",
    "gen_ai.request.model": "scripted",
    "gen_ai.response.model": "scripted",
    "gen_ai.request.max_tokens": 7,
    "gen_ai.request.temperature": 0.0,
    "gen_ai.response.finish_reasons": ("stop",),
    "gen_ai.usage.output_tokens": 3,
    "gen_ai.usage.cache_read.input_tokens": 3,
    "precedent.speculation.mode": "greedy",
}


def test_a_call_is_described_on_the_span_around_it(span: ReadableSpan) -> None:
    scripted("ab").invoke("hi", max_tokens=7)
    attributes = dict(span.attributes or {})
    assert {key: attributes.get(key) for key in EXPECTED} == EXPECTED
    assert "gen_ai.request.seed" not in attributes, "a setting that was not made is not told"


async def test_a_stream_is_described_on_the_span_in_which_it_began() -> None:
    tracer = TracerProvider().get_tracer("test")
    model = scripted("ab", "cd")
    with tracer.start_as_current_span("outer") as outer:
        stream = model.astream("hi")
        await anext(stream)
    async for _ in stream:
        pass
    assert isinstance(outer, ReadableSpan)
    assert trace.get_current_span() is not outer
    assert (outer.attributes or {})["gen_ai.request.model"] == "scripted"


def test_traces_tell_versions_and_the_model_that_was_chosen() -> None:
    model = scripted("a")
    assert model.metadata is not None
    assert set(model.metadata["lc_versions"]) >= {"langchain-core", "precedent-llm"}
    assert model._get_ls_params(model="other")["ls_model_name"] == "other"


def test_usage_is_counted_by_langchains_own_handler() -> None:
    handler = UsageMetadataCallbackHandler()
    model = scripted("ab", "ab")
    model.invoke("hi", {"callbacks": [handler]})
    list(model.stream("hi", {"callbacks": [handler]}))
    assert handler.usage_metadata["scripted"]["output_tokens"] == 6


# What LangChain does around a call


class Waiting(InMemoryRateLimiter):
    """Counts how often it was asked."""

    asked = 0

    def acquire(self, *, blocking: bool = True) -> bool:
        self.asked += 1
        return True


def test_a_rate_limiter_is_asked_before_every_call() -> None:
    limiter = Waiting(requests_per_second=1000)
    model = scripted("a", "b", rate_limiter=limiter)
    model.invoke("hi")
    list(model.stream("hi"))
    assert limiter.asked == 2


def test_configurable_fields_of_a_model_keep_its_engine() -> None:
    model = scripted("a", "b")
    configurable = model.configurable_fields(
        temperature=ConfigurableField(id="temperature"), max_tokens=ConfigurableField(id="most")
    )
    for temperature in (0.0, 0.5):
        message = configurable.with_config(configurable={"temperature": temperature, "most": 5}).invoke("hi")
        assert isinstance(message, AIMessage)
    assert [request.sampling.temperature for request in model.engine.requests] == [0.0, 0.5]
    assert [request.sampling.max_tokens for request in model.engine.requests] == [5, 5]


def test_the_switch_turns_speculation_off_in_a_running_process(monkeypatch: pytest.MonkeyPatch) -> None:
    from precedent.engine.checks import unless_switched_off

    config = SpeculationConfig(max_nodes=7)
    monkeypatch.delenv("PRECEDENT_SPECULATION", raising=False)
    assert unless_switched_off(config) is config
    monkeypatch.setenv("PRECEDENT_SPECULATION", "off")
    assert unless_switched_off(config) == SpeculationConfig(max_nodes=7, enabled=False, write_back=False)
    monkeypatch.setenv("PRECEDENT_SPECULATION", "of")
    with pytest.raises(ConfigError, match="PRECEDENT_SPECULATION='of' is neither 'on' nor 'off'"):
        unless_switched_off(config)


def test_model_kwargs_reach_the_loading_of_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def load_target(name: str, **settings: Any) -> Any:
        asked.update(settings, name=name)
        raise ModelLoadError("far enough")

    monkeypatch.setattr("precedent.engine.loading.load_target", load_target)
    with pytest.raises(ModelLoadError, match="far enough"):
        ChatPrecedent(model="m", model_kwargs={"revision": "v2"}).invoke("hi")
    assert (asked["name"], asked["model_kwargs"]) == ("m", {"revision": "v2"})


@pytest.mark.parametrize("settings", [{"device": "cpu"}, {"model_kwargs": {"revision": "main"}}])
def test_what_was_loaded_cannot_be_loaded_otherwise(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="cannot be set for a model object"):
        ChatPrecedent.from_model(object(), TOKENIZER, **settings)
