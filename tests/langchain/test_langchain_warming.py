"""Answers given before: `warm` stores them as the model would have generated them, RecordingCache as they pass."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.scripted_models import calling, look_up
from langchain_core.caches import BaseCache, InMemoryCache
from langchain_core.language_models import FakeListChatModel
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, Generation
from langchain_tests.integration_tests import AsyncCacheTestSuite, SyncCacheTestSuite

from precedent import PrecedentRecorder, SpeculationCache
from precedent.cache import prompt_fingerprint
from precedent.errors import ConfigError, PromptError, UnsupportedError
from precedent.langchain import ChatPrecedent, RecordingCache
from precedent_testing.embedders import HashEmbedder
from precedent_testing.scripted_engine import conversations
from precedent_testing.scripted_model import scripted_model_engine

CALL = calling(number="7")
QUESTION = "Where is order 7?"


SCRIPT = conversations(
    [("user", QUESTION), ("assistant", CALL), ("tool", "order 7 is open"), ("assistant", "It is open.")],
    [("user", "Do you know?"), ("assistant", "I do not know.")],
    [("user", "What was it?"), ("assistant", "I do not know.")],
)


@pytest.fixture
def llm() -> Iterator[ChatPrecedent]:
    engine = scripted_model_engine(SCRIPT, cache=SpeculationCache.open(embedder=HashEmbedder()))
    yield ChatPrecedent.from_engine(engine, tenant="acme")
    engine.close()


def stored(llm: ChatPrecedent) -> list[Any]:
    assert llm.engine.cache is not None
    return sorted(llm.engine.cache.list(), key=lambda one: one.id)


TALK = [
    HumanMessage(QUESTION),
    AIMessage("", tool_calls=[{"name": "look_up", "args": {"number": "7"}, "id": "call_1"}]),
    ToolMessage("order 7 is open", tool_call_id="call_1"),
    AIMessage("It is open."),
]
HI = {"role": "user", "content": "hi"}
X = {"role": "assistant", "content": "x"}
TEXT = {"type": "text", "text": "a"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def test_warmed_answers_are_the_ones_that_the_model_generates(llm: ChatPrecedent) -> None:
    assert llm.warm([TALK], tools=[look_up]) == 2
    warmed = stored(llm)
    bound = llm.bind_tools([look_up])
    called = bound.invoke(QUESTION)
    bound.invoke([*TALK[:1], called, ToolMessage("order 7 is open", tool_call_id=called.tool_calls[0]["id"])])
    again = stored(llm)
    assert [one.token_ids for one in again] == [one.token_ids for one in warmed], "the same answers: nothing is new"
    assert [one.count for one in again] == [2, 2]
    assert called.response_metadata["speculation"]["accepted_by_source"]["recall"] > 0


def test_warming_says_whose_answers_they_are(llm: ChatPrecedent) -> None:
    llm.warm([[("user", "Hello"), ("assistant", "Good day.")]], tenant="bolt", workflow_step="greeting")
    (one,) = stored(llm)
    assert (one.tenant, one.workflow_step, one.text, one.query) == ("bolt", "greeting", "Good day.", "user: Hello")
    prompt = llm.engine.tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello"}], add_generation_prompt=True
    )
    assert one.prompt_fingerprint == prompt_fingerprint(prompt["input_ids"])


def test_a_log_of_another_model_warms(llm: ChatPrecedent, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    with PrecedentRecorder(log) as recorder:
        other = FakeListChatModel(responses=["first answer", "second answer"])
        config: Any = {"callbacks": [recorder]}
        said = other.invoke("one", config)
        other.invoke([HumanMessage("one"), said, HumanMessage("two")], config)
    assert llm.warm(log) == 2, "each call is one line, and only its own answer counts"
    assert [one.text for one in stored(llm)] == ["first answer", "second answer"]


def test_every_answer_of_a_whole_conversation_and_of_other_models_warms(llm: ChatPrecedent, tmp_path: Path) -> None:
    foreign = [{"type": "web_search_call", "id": "ws_1"}, {"type": "server_tool_use", "id": "s1", "name": "x"}]
    answers: list[Any] = [{"content": [block, TEXT]} for block in foreign]
    answers += [{"content": None, "refusal": "a"}, {"content": "a", "tool_calls": None, "name": None}]
    conversation = [one for answer in answers for one in (HI, {"role": "assistant", **answer})]
    log = tmp_path / "log.jsonl"
    log.write_text(json.dumps({"messages": conversation}) + "\n")
    assert llm.warm(str(log)) == llm.warm([conversation]) == len(answers)


@pytest.mark.parametrize(
    "odd",
    [
        "[" * 100_000,
        json.dumps({"messages": [{"role": "user", "content": [IMAGE]}, X]}),
        json.dumps({"messages": [HI, 3]}),
        json.dumps({"messages": [HI], "response": {"choices": [3]}}),
    ],
    ids=lambda odd: odd[:60],
)
def test_a_line_that_cannot_be_read_is_skipped_and_named(
    llm: ChatPrecedent, tmp_path: Path, caplog: pytest.LogCaptureFixture, odd: str
) -> None:
    good, log = json.dumps({"messages": [HI, X]}), tmp_path / "log.jsonl"
    log.write_text(f"{good}\n{odd}\n{good}\n")
    with caplog.at_level(logging.WARNING):
        assert llm.warm(log) == 2
    (said,) = (record.getMessage() for record in caplog.records if "skipped" in record.getMessage())
    assert said.startswith(f"skipped answers of {log}: 1, the first because of {log} line 2")


def test_a_list_that_cannot_be_read_is_named_by_its_number(llm: ChatPrecedent) -> None:
    good = [("user", "hi"), ("ai", "x")]
    picture = [HumanMessage([IMAGE]), AIMessage("x")]
    with pytest.raises(UnsupportedError, match="conversation 2: message 1 holds a block of type 'image_url'"):
        llm.warm([good, picture])
    with pytest.raises(PromptError, match="conversation 3: "):
        llm.warm([good, good, [("narrator", "x")]])
    assert llm.model_copy(update={"media": "placeholder"}).warm([picture]) == 1
    wrongs: list[Any] = [TALK, 3, None, [3], TALK[0], {"messages": TALK}]
    for wrong in wrongs:
        with pytest.raises(ConfigError, match="give one list for each conversation"):
            llm.warm(wrong)


# RecordingCache


def test_answers_of_an_old_cache_warm_as_they_are_found(llm: ChatPrecedent, monkeypatch: pytest.MonkeyPatch) -> None:
    old = InMemoryCache()
    other = FakeListChatModel(responses=["An old answer."], cache=old)
    other.invoke("What was it?")
    monkeypatch.setattr(old, "update", None)  # nothing new may come in
    cache = RecordingCache(old, llm)
    asking = other.model_copy(update={"cache": cache})
    assert asking.invoke("What was it?").content == asking.invoke("What was it?").content == "An old answer."
    assert [(one.text, one.tenant) for one in stored(llm)] == [("An old answer.", "acme")]
    assert cache.num_recorded == 1, "found again, it is known"
    message = llm.invoke("What was it?", max_tokens=3)
    assert message.response_metadata["speculation"]["drafted_by_source"].get("recall", 0) > 0


async def test_new_answers_of_other_models_warm_and_own_ones_are_left_to_the_engine(llm: ChatPrecedent) -> None:
    cache = RecordingCache(InMemoryCache(), llm)
    await FakeListChatModel(responses=["Fresh."], cache=cache).ainvoke("hi")
    assert [one.text for one in stored(llm)] == ["Fresh."]
    own = llm.model_copy(update={"cache": cache})
    assert own.invoke("Do you know?").content == own.invoke("Do you know?").content == "I do not know."
    assert cache.num_recorded == 1
    assert [one.count for one in stored(llm)] == [1, 1], "the engine stored its own answer, once"


def test_what_is_no_chat_is_cached_and_nothing_raises(llm: ChatPrecedent, caplog: pytest.LogCaptureFixture) -> None:
    cache = RecordingCache(InMemoryCache(), llm)
    answers: list[Any] = [[Generation(text="a text")], [ChatGeneration(message=AIMessage("x"))]]
    with caplog.at_level(logging.DEBUG, logger="precedent.langchain.recorded"):
        for number, answer in enumerate(answers):
            cache.update(f"no messages {number}", "model", answer)
            assert cache.lookup(f"no messages {number}", "model") == answer
    assert cache.num_recorded == 0
    assert "an answer was not recorded" in caplog.text


class TestSync(SyncCacheTestSuite):
    @pytest.fixture
    def cache(self, llm: ChatPrecedent) -> BaseCache:
        return RecordingCache(InMemoryCache(), llm)


class TestAsync(AsyncCacheTestSuite):
    @pytest.fixture
    async def cache(self, llm: ChatPrecedent) -> BaseCache:
        return RecordingCache(InMemoryCache(), llm)
