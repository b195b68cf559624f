"""`precedent replay --actions`: which calls of recorded runs would have been predicted, and at what precision."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.command_line import precedent

from precedent_replay.actions import ActionSettings, replay_actions
from precedent_testing.embedders import HashEmbedder


def run_of(order: str, *, changes: bool = False) -> dict[str, Any]:
    """A recorded run: the user names an order, the agent looks it up, perhaps changes it, and looks it up again."""
    names = ["get_order", *(["change_order"] if changes else []), "get_order"]
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"Where is {order}?"}]
    for number, name in enumerate(names):
        function = {"name": name, "arguments": json.dumps({"order": order})}
        messages += [
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": str(number), "type": "function", "function": function}],
            },
            {"role": "tool", "content": "open", "tool_call_id": str(number)},
        ]
    return {"messages": [*messages, {"role": "assistant", "content": "It is open."}], "task_id": order, "group": order}


def log_of(path: Path, *runs: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(run) + "\n" for run in runs), encoding="utf-8")
    return path


def replayed(path: Path, **settings: Any) -> dict[str, Any]:
    return replay_actions([path], HashEmbedder(), ActionSettings(**settings)).as_dict()


def test_calls_of_like_runs_are_predicted(tmp_path: Path) -> None:
    log = log_of(tmp_path / "log.jsonl", *(run_of(f"W{number}") for number in range(10, 22)))
    found = replayed(log, tool_seconds=0.4, model_seconds=2.0)
    assert (found["answers"], found["calls"], found["read_only_calls"]) == (36, 24, 24)
    assert found["precision"] >= 0.9
    assert found["recall"] >= 0.8
    assert found["seconds_saved"] == pytest.approx(0.4 * found["used"])


def test_a_group_does_not_see_itself(tmp_path: Path) -> None:
    log = log_of(tmp_path / "log.jsonl", run_of("W1"), run_of("W1"))
    assert replayed(log, pool="same-task", least=0.3)["started"] > 0
    assert replayed(log, pool="other-tasks", least=0.3)["started"] == 0


def test_only_tools_that_read_count_and_the_others_void(tmp_path: Path) -> None:
    log = log_of(tmp_path / "log.jsonl", *(run_of(f"W{number}", changes=True) for number in range(10, 22)))
    found = replayed(log)
    assert list(found["tools"]) == ["get_order"]
    assert (found["calls"], found["read_only_calls"]) == (36, 24)
    assert replayed(log, allow=frozenset({"change_order"}))["tools"].keys() == {"change_order"}


def test_the_command_prints_a_table_and_writes_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = log_of(tmp_path / "log.jsonl", *(run_of(f"W{number}") for number in range(10, 22)))
    figures = tmp_path / "figures.json"
    assert precedent("replay", "--actions", log, "--embedder", "none", "--json", figures) == 0
    assert "get_order" in capsys.readouterr().out
    assert json.loads(figures.read_text(encoding="utf-8"))["read_only_calls"] == 24
    assert precedent("replay", "--actions", log, "--embedder", "none", "--html", tmp_path / "page.html") == 2
    assert "--actions" in capsys.readouterr().err
