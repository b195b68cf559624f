"""What a call of ChatPrecedent can ask for beyond an answer, and how a model is written down and traced."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.scripted_kinds import MODELS
from langchain_core.callbacks import UsageMetadataCallbackHandler
from langchain_core.load import dumpd, dumps, load
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider

from precedent import SpeculationCache, SpeculationConfig, Templates
from precedent.errors import ConfigError, UnsupportedError
from precedent.langchain import ChatPrecedent, PrecedentLLM
from precedent.text.prompt import hermes_template
from precedent_testing.embedders import HashEmbedder
from precedent_testing.scripted_engine import ScriptedEngine, chatml_tokenizer

TOKENIZER = chatml_tokenizer(chat_template=hermes_template())


def scripted(*answers: str, kind: Any = ChatPrecedent, name: str = "scripted", **fields: Any) -> Any:
    return kind.from_engine(ScriptedEngine(TOKENIZER, answers, model_name=name), **fields)


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
    model = scripted("a", logprobs=True)
    assert "logprobs" not in model.invoke("hi", logprobs=False).response_metadata
    assert model.engine.requests[0].sampling.logprobs is None, "nobody pays for those that were not asked for"


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


async def test_a_call_may_choose_a_model_that_runs() -> None:
    other = scripted("x", "y", "z", name="the-other")
    model = scripted("from my own")
    message = model.invoke("hi", model="the-other")
    assert (message.content, message.response_metadata["model_name"]) == ("x", "the-other")
    assert (await model.ainvoke("hi", model="the-other")).content == "y"
    assert "".join(str(chunk.content) for chunk in model.stream("hi", model="the-other")) == "z"
    twin = scripted("x", name="the-other")
    with pytest.raises(UnsupportedError, match="names 2 loaded engines"):
        model.invoke("hi", model="the-other")
    assert other.engine is not twin.engine


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
    assert (kwargs["speculation_cache"], kwargs["embedder"]) == (str(tmp_path / "c.db"), None)
    assert dumpd(scripted("a"))["kwargs"]["model"] == "scripted", "weights that were handed over, by their name"
    assert "engines" not in dumps(scripted("a"))


def test_the_environment_fills_in_what_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRECEDENT_MODEL", "folder/name")
    monkeypatch.setenv("PRECEDENT_SPECULATION_CACHE", "orders.db")
    assert ChatPrecedent().model == PrecedentLLM().model == "folder/name"
    assert ChatPrecedent(model="mine").speculation_cache == "orders.db"
    assert ChatPrecedent(model_name="mine").model == "mine"
    assert scripted("a").speculation_cache is None, "an engine that runs has its cache already"


# Tracing


@MODELS
def test_a_call_is_described_on_the_span_around_it(kind: Any) -> None:
    with TracerProvider().get_tracer("test").start_as_current_span("call") as span:
        list(scripted("ab", kind=kind).stream("hi", max_tokens=7))
    assert isinstance(span, ReadableSpan)
    expected = {
        "gen_ai.operation.name": "chat" if kind is ChatPrecedent else "text_completion",
        "gen_ai.provider.name": "precedent",
        "gen_ai.request.model": "scripted",
        "gen_ai.response.model": "scripted",
        "gen_ai.request.max_tokens": 7,
        "gen_ai.request.temperature": 0.0,
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.output_tokens": 3,
        "precedent.speculation.mode": "greedy",
    }
    attributes = dict(span.attributes or {})
    assert {key: attributes.get(key) for key in expected} == expected
    assert "gen_ai.request.seed" not in attributes, "a setting that was not made is not told"


async def test_a_stream_is_described_on_the_span_in_which_it_began() -> None:
    model = scripted("ab", "cd")
    with TracerProvider().get_tracer("test").start_as_current_span("outer") as outer:
        stream = model.astream("hi")
        await anext(stream)
    async for _ in stream:
        pass
    assert isinstance(outer, ReadableSpan)
    assert trace.get_current_span() is not outer
    assert (outer.attributes or {})["gen_ai.request.model"] == "scripted"


def test_traces_tell_versions_usage_and_the_model_that_was_chosen() -> None:
    handler, model = UsageMetadataCallbackHandler(), scripted("ab", "ab")
    model.invoke("hi", {"callbacks": [handler]})
    list(model.stream("hi", {"callbacks": [handler]}))
    assert handler.usage_metadata["scripted"]["output_tokens"] == 6
    assert set(model.metadata["lc_versions"]) >= {"langchain-core", "precedent-llm"}
    assert model._get_ls_params(model="other")["ls_model_name"] == "other"
