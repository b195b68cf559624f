"""Which logs a replay reads: conversations that belong together, in several formats, never held in memory."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import pytest
from helpers.replayed import rows, written

from precedent.errors import PromptError
from precedent.text.traces import read_trajectories


def call(conversation: str, said: str, history: Sequence[str] = ()) -> dict[str, object]:
    """One call of a conversation as a recorder writes it."""
    messages = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(("hello", *history))]
    response = {"role": "assistant", "content": said}
    return {"conversation_id": conversation, "messages": messages, "response": response}


def test_calls_of_one_conversation_come_together_and_hide_one_another(tmp_path: Path) -> None:
    """However they were interleaved; in `same-task` a call must not see what its own conversation says later."""
    long = "this is a rather long answer that nobody else gives"
    mixed = [call("a", long), call("b", "short"), call("a", long, (long, "again")), call("b", "bye", ("short", "ok"))]
    log = written(tmp_path / "log.jsonl", mixed)
    runs = list(read_trajectories([log]))
    assert [(run.number, run.group) for run in runs] == [(0, "a"), (0, "a"), (1, "b"), (1, "b")]
    assert all(run.only_last for run in runs)
    recall = rows(log, pool="same-task")["recall"]
    assert recall["tokens_per_step"] == 1.0
    assert rows(log, pool="online")["recall"]["kinds"]["text"]["turns"] == 4


def test_completions_and_wrapped_requests_are_read(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    answer = {"choices": [{"message": {"role": "assistant", "content": "hello"}}]}
    log = written(tmp_path / "log.jsonl", [{"request": {"messages": messages, "tools": []}, "response": answer}])
    (run,) = read_trajectories([log])
    assert run.messages[-1] == {"role": "assistant", "content": "hello"}
    with pytest.raises(PromptError, match="line 1 has a `response`"):
        list(read_trajectories([written(log, [{"messages": messages, "response": "hello"}])]))


def test_langsmith_runs_of_one_thread_belong_together(tmp_path: Path) -> None:
    """By the thread in their metadata, else by the trace; a session is a whole project."""
    run = {"inputs": {"messages": [{"role": "user", "content": "hi"}]}, "outputs": {"output": {"content": "hello"}}}
    threads = [{**run, "session_id": "project", "extra": {"metadata": {"thread_id": name}}} for name in "aba"]
    traces = [{**run, "session_id": "project", "trace_id": name} for name in "cd"]
    found = list(read_trajectories([written(tmp_path / "log.jsonl", [*threads, *traces])]))
    assert [(each.number, each.task) for each in found] == [(0, "a"), (0, "a"), (1, "b"), (2, "c"), (3, "d")]


def test_a_log_in_order_of_time_is_never_held_in_memory(tmp_path: Path) -> None:
    big = [{"order": n, "messages": [{"role": "user", "content": "x" * 20_000}]} for n in range(300)]
    log = written(tmp_path / "log.jsonl", big)
    size = log.stat().st_size
    del big
    tracemalloc.start()
    try:
        assert sum(1 for _ in read_trajectories([log])) == 300
        assert tracemalloc.get_traced_memory()[1] < size / 8
    finally:
        tracemalloc.stop()
