"""What a recorder does not write: what cannot be redacted, what fits no file, what fills memory."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from uuid import uuid4

import pytest
from helpers.recorded import CALL, lines, says
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, LLMResult

from precedent import ConfigError, PrecedentRecorder
from precedent.text.traces import read_trajectories
from precedent_replay import recorder as module


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the log goes."""
    return tmp_path / "log.jsonl"


def test_redaction_reaches_every_text_before_it_is_written(path: Path) -> None:
    recorder = PrecedentRecorder(path, redact=lambda text: re.sub(r"A \d", "[order]", text))
    history = [
        HumanMessage([{"type": "text", "text": "where is A 1?"}]),
        AIMessage("", tool_calls=[CALL]),
        ToolMessage("A 1 is late", tool_call_id="call-1"),
    ]
    says(AIMessage("A 1!", tool_calls=[CALL])).invoke(history, {"callbacks": [recorder]})
    assert "A 1" not in path.read_text()
    assert path.read_text().count("[order]") == 5


def test_what_cannot_be_redacted_is_not_written(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """And the chain goes on; the failure is said once."""

    def fail(text: str) -> str:
        raise KeyError(text)

    recorder = PrecedentRecorder(path, redact=fail)
    with caplog.at_level(logging.WARNING):
        assert [says("yes").invoke("?", {"callbacks": [recorder]}).content for _ in range(3)] == ["yes"] * 3
    assert path.read_text() == ""
    assert recorder.num_lost == 3
    assert len([r for r in caplog.records if "not recorded" in r.message]) == 1


def test_a_closed_or_full_file_never_reaches_the_caller(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line that was written half is marked, and the next one stands alone."""
    recorder = PrecedentRecorder(path)
    whole = os.write
    monkeypatch.setattr(module.os, "write", lambda file, data: whole(file, data[:20]))
    assert says("lost").invoke("?", {"callbacks": [recorder]}).content == "lost"
    monkeypatch.undo()
    says("kept").invoke("?", {"callbacks": [recorder]})
    with pytest.warns(UserWarning, match="line 1 is torn"):
        assert [run.messages[-1]["content"] for run in read_trajectories([path])] == ["kept"]
    recorder.close()
    assert says("late").invoke("?", {"callbacks": [recorder]}).content == "late"
    assert (recorder.num_recorded, recorder.num_lost) == (1, 2)


def test_a_log_torn_by_a_crash_is_read_and_continued(path: Path) -> None:
    with PrecedentRecorder(path) as recorder:
        for answer in ("one", "two"):
            says(answer).invoke("?", {"callbacks": [recorder]})
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.warns(UserWarning, match="line 2 is torn"):
        assert [run.messages[-1]["content"] for run in read_trajectories([path])] == ["one"]
    with PrecedentRecorder(path) as recorder:
        says("three").invoke("?", {"callbacks": [recorder]})
    with pytest.warns(UserWarning, match="line 2 is torn"):
        assert [run.messages[-1]["content"] for run in read_trajectories([path])] == ["one", "three"]


def test_a_file_that_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot write the log"):
        PrecedentRecorder(tmp_path / "missing" / "log.jsonl")


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
