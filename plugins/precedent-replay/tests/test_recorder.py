"""The recorder beside LangChain's own fake chat models, and `precedent replay` on what it wrote."""

from __future__ import annotations

import json
import logging
import os
import re
import threading
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from langchain.agents import create_agent
from langchain_core.language_models import BaseChatModel
from langchain_core.language_models.fake_chat_models import (
    FakeListChatModel,
    FakeListChatModelError,
    GenericFakeChatModel,
)
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatResult, LLMResult
from langchain_core.tools import tool

from precedent import PrecedentRecorder
from precedent.text.traces import read_trajectories
from precedent_replay import recorder as module
from precedent_replay.run import Settings, replay
from precedent_testing.tiny_models import byte_tokenizer

CALL = {"name": "look_up", "args": {"order": "A 1"}, "id": "call-1", "type": "tool_call"}


@tool
def look_up(order: str) -> str:
    """Find an order."""
    return f"order {order} is on its way"


class ToolModel(GenericFakeChatModel):
    """A fake that lets tools be bound."""

    def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
        return self.bind(tools=[{"type": "function", "function": {"name": each.name}} for each in tools], **kwargs)


def lines(path: Path) -> list[dict[str, Any]]:
    """The records of a log."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def ask(recorder: PrecedentRecorder, answer: AIMessage | str, question: Any = "?", **config: Any) -> Any:
    """What a chat model that gives this answer says beside a recorder."""
    model = GenericFakeChatModel(messages=iter([answer]))
    return model.invoke(question, {"callbacks": [recorder], **config}).content


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "log.jsonl"


def test_a_call_becomes_one_line_in_openai_form(path: Path) -> None:
    usage = {"input_tokens": 3, "output_tokens": 4, "total_tokens": 7}
    said = AIMessage("", tool_calls=[CALL], usage_metadata=usage, response_metadata={"model_name": "gpt-x"})
    ask(PrecedentRecorder(path), said, [("system", "be kind"), ("human", "where is it?")])
    (record,) = lines(path)
    assert [list(message.values()) for message in record["messages"]] == [
        ["system", "be kind"],
        ["user", "where is it?"],
    ]
    function = {"name": "look_up", "arguments": '{"order": "A 1"}'}
    assert record["response"]["tool_calls"] == [{"type": "function", "id": "call-1", "function": function}]
    assert record["usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    assert record["model"] == "gpt-x"
    assert re.match(r"\d{4}-\d\d-\d\dT[\d:.]+\+00:00$", record["time"])
    assert path.stat().st_mode & 0o077 == 0


def test_a_stream_is_recorded_whole_and_once_or_dropped_where_it_is_abandoned_or_fails(path: Path) -> None:
    recorder = PrecedentRecorder(path)
    config: Any = {"callbacks": [recorder]}
    whole, abandoned = (GenericFakeChatModel(messages=iter(["on its way home"])).stream("?", config) for _ in range(2))
    assert len([chunk.content for chunk in whole]) > 2
    next(abandoned)
    abandoned.close()  # type: ignore[attr-defined]  # it is a generator
    with pytest.raises(FakeListChatModelError):
        list(FakeListChatModel(responses=["abc"], error_on_chunk_number=1).stream("?", config))
    assert [record["response"]["content"] for record in lines(path)] == ["on its way home"]
    assert not recorder._calls


def test_parallel_threads_write_whole_lines(path: Path) -> None:
    recorder = PrecedentRecorder(path)

    def talk(name: int) -> None:
        for turn in range(25):
            ask(recorder, "word " * 400, f"{name}.{turn}")

    threads = [threading.Thread(target=talk, args=(name,)) for name in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({record["messages"][0]["content"] for record in lines(path)}) == 150 == recorder.num_recorded


@pytest.mark.parametrize("at_the_model", [False, True])
def test_the_calls_of_an_agent_run_are_one_conversation(path: Path, at_the_model: bool) -> None:
    """By the agent's run where the handler hears of it, by the talk that goes on where it hears of the model alone."""
    recorder = PrecedentRecorder(path)
    model = ToolModel(messages=iter([AIMessage("", tool_calls=[CALL]), "on its way", "you are welcome"]))
    config: Any = {} if at_the_model else {"callbacks": [recorder]}
    if at_the_model:
        model.callbacks = [recorder]
    agent = create_agent(model, [look_up])
    state = agent.invoke({"messages": [HumanMessage("where is A 1?")]}, config)
    agent.invoke({"messages": [*state["messages"], HumanMessage("thanks")]}, config)
    first, _, last = found = lines(path)
    assert [len(record["messages"]) for record in found] == [1, 3, 5]
    assert len({record["conversation_id"] for record in found}) == 1
    assert first["tools"] == [{"type": "function", "function": {"name": "look_up"}}]
    assert [(message["role"], message["content"]) for message in last["messages"]] == [
        ("user", "where is A 1?"),
        ("assistant", ""),
        ("tool", "order A 1 is on its way"),
        ("assistant", "on its way"),
        ("user", "thanks"),
    ]
    assert last["messages"][1]["tool_calls"] == first["response"]["tool_calls"]
    assert first["workflow_step"] == "model"


def test_a_thread_id_names_the_conversation_and_group_by_the_customer(path: Path) -> None:
    recorder = PrecedentRecorder(path, group_by="customer")
    for question in ("one", "two"):
        ask(recorder, "yes", question, metadata={"thread_id": "t-9", "customer": "ann"})
    ask(recorder, "yes", "three")
    *named, other = [(record["conversation_id"], record.get("group")) for record in lines(path)]
    assert named == [("t-9", "ann")] * 2
    assert other[0] not in ("t-9", None)
    assert other[1] is None


def test_of_pictures_only_the_kind_is_kept_and_broken_calls_are_kept_raw(path: Path) -> None:
    broken = {"name": "look_up", "args": "{oops", "id": "1", "error": None, "type": "invalid_tool_call"}
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    question = HumanMessage([{"type": "text", "text": "what is it?"}, picture])
    ask(PrecedentRecorder(path), AIMessage("", invalid_tool_calls=[broken]), [question])
    (record,) = lines(path)
    assert "AAAA" not in path.read_text()
    assert record["messages"][0]["content"][1] == {"type": "image_url", "omitted": True}
    assert record["response"]["tool_calls"][0]["function"] == {"name": "look_up", "arguments": "{oops"}


class Steady(BaseChatModel):
    """Answers the same question alike, each time with a tool call first."""

    @property
    def _llm_type(self) -> str:
        return "steady"

    def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
        return self

    def _generate(self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> ChatResult:
        order = re.findall(r"[A-Z] \d+", str(messages[0].content))[0]
        if isinstance(messages[-1], ToolMessage):
            said = AIMessage(f"I looked it up for you: your order {order} is on its way and arrives on monday.")
        else:
            said = AIMessage("", tool_calls=[{**CALL, "args": {"order": order}}])
        return ChatResult(generations=[ChatGeneration(message=said)])


def test_replay_reads_what_was_recorded(path: Path) -> None:
    """Six runs of an agent, interleaved: conversations in one piece, calls apart from text, every answer once."""
    with PrecedentRecorder(path) as recorder:
        agent = create_agent(Steady(), [look_up])
        questions = [{"messages": [HumanMessage(f"where is order {name} {n}?")]} for n, name in enumerate("ABCDEF")]
        agent.batch(questions, {"callbacks": [recorder], "max_concurrency": 3})
    runs = list(read_trajectories([path]))
    assert [run.number for run in runs] == [n for n in range(6) for _ in range(2)]
    assert len({run.group for run in runs}) == 6
    found = replay([path], [], byte_tokenizer(), None, Settings()).as_dict()
    together = found["drafters"][-1]
    assert [together["kinds"][kind]["turns"] for kind in ("tool_calls", "text")] == [6, 6]
    assert min(together["tokens_per_step_tool_calls"], together["tokens_per_step_text"]) > 2


def test_redaction_reaches_every_text_before_it_is_written(path: Path) -> None:
    recorder = PrecedentRecorder(path, redact=lambda text: re.sub(r"A \d", "[order]", text))
    history = [
        HumanMessage([{"type": "text", "text": "where is A 1?"}]),
        AIMessage("", tool_calls=[CALL]),
        ToolMessage("A 1 is late", tool_call_id="call-1"),
    ]
    ask(recorder, AIMessage("A 1!", tool_calls=[CALL]), history)
    assert "A 1" not in path.read_text()
    assert path.read_text().count("[order]") == 5


def test_what_cannot_be_redacted_is_not_written(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """And the chain goes on; the failure is said once."""

    def fail(text: str) -> str:
        raise KeyError(text)

    recorder = PrecedentRecorder(path, redact=fail)
    with caplog.at_level(logging.WARNING):
        assert [ask(recorder, "yes") for _ in range(3)] == ["yes"] * 3
    assert path.read_text() == ""
    assert recorder.num_lost == 3
    assert len([r for r in caplog.records if "not recorded" in r.message]) == 1


def answers(path: Path, torn: int) -> list[str]:
    """The answers in a log with one line that was cut short."""
    with pytest.warns(UserWarning, match=f"line {torn} is torn"):
        return [run.messages[-1]["content"] for run in read_trajectories([path])]


def test_a_closed_or_full_file_never_reaches_the_caller(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line that was written half is marked, and the next one stands alone."""
    recorder, whole = PrecedentRecorder(path), os.write
    monkeypatch.setattr(module.os, "write", lambda file, data: whole(file, data[:20]))
    assert ask(recorder, "lost") == "lost"
    monkeypatch.undo()
    ask(recorder, "kept")
    assert answers(path, 1) == ["kept"]
    recorder.close()
    assert ask(recorder, "late") == "late"
    assert (recorder.num_recorded, recorder.num_lost) == (1, 2)


def test_a_log_torn_by_a_crash_is_read_and_continued(path: Path) -> None:
    with PrecedentRecorder(path) as recorder:
        for answer in ("one", "two"):
            ask(recorder, answer)
    path.write_bytes(path.read_bytes()[:-30])
    assert answers(path, 2) == ["one"]
    with PrecedentRecorder(path) as recorder:
        ask(recorder, "three")
    assert answers(path, 2) == ["one", "three"]


def test_memory_is_bounded(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that never end, chains that never end and conversations beyond the limit are forgotten, oldest first."""
    monkeypatch.setattr(module, "REMEMBERED", 5)
    recorder = PrecedentRecorder(path)
    runs = [uuid4() for _ in range(9)]
    for run in runs:
        recorder.on_chain_start({}, {}, run_id=run)
        recorder.on_chat_model_start({}, [[HumanMessage("?")]], run_id=run, parent_run_id=run)
    for run in runs:
        recorder.on_llm_end(LLMResult(generations=[[ChatGeneration(message=AIMessage("!"))]]), run_id=run)
    assert [record["id"] for record in lines(path)] == [str(run) for run in runs[-5:]]
    assert max(len(recorder._roots), len(recorder._conversations), len(recorder._calls)) <= 5
