"""The GPU benchmark runs from end to end in its small shape on a CPU; what it finds there means nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers import forked

BENCH = Path(__file__).parent / "benchmarks" / "bench_gpu.py"


def run(folder: Path, *arguments: str) -> dict[str, Any]:
    """What a small run found, by part."""
    files = [f"--{name}={folder / name}" for name in ("json", "markdown", "svg")]
    done = forked.run([BENCH, "--small", "--device", "cpu", *files, *arguments])
    assert done.returncode == 0, done.stderr
    return {part["name"]: part for part in json.loads((folder / "json").read_text())["figures"]["parts"]}


def chat(task: int, answer: str) -> str:
    messages = [
        {"role": "user", "content": f"Where is order {task}?"},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": "Thank you."},
        {"role": "assistant", "content": "You are welcome. " + answer},
    ]
    return json.dumps({"messages": messages, "task_id": task})


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("bench")
    traces = folder / "traces.jsonl"
    traces.write_text("\n".join(chat(task, "The order left on Monday.") for task in (1, 1, 2)) + "\n")
    return folder, run(folder, "--traces", str(traces), "--turns", "4")


@pytest.mark.slow
def test_every_part_runs_to_its_end(found: tuple[Path, dict[str, Any]]) -> None:
    folder, parts = found
    assert {name: part["stopped"] for name, part in parts.items()} == dict.fromkeys(parts)
    assert set(parts) == {"steps", "attention", "verification", "decoding", "batches", "bitwise", "pair", "traces"}
    assert len(parts["steps"]["rows"]) == 2 * 5
    assert all(row["graph_ms"] > 0 and row["times_the_floor"] > 0 for row in parts["steps"]["rows"])
    assert (folder / "svg").read_text().count("<circle") == 10
    assert "### Verification" in (folder / "markdown").read_text()


@pytest.mark.slow
def test_every_attention_that_runs_is_right_and_only_triton_may_be_absent(found: tuple[Path, dict[str, Any]]) -> None:
    rows = found[1]["attention"]["rows"]
    assert {row["variant"] for row in rows} == {"split", "triton", "ordered", "ordered-triton"}
    assert all(row["error"] < 1e-5 for row in rows if "error" in row)
    assert {row["variant"] for row in rows if "failed" in row} <= {"triton", "ordered-triton"}


@pytest.mark.slow
def test_texts_with_the_promise_are_those_of_plain_decoding(found: tuple[Path, dict[str, Any]]) -> None:
    *timed, texts = found[1]["bitwise"]["rows"]
    assert len(timed) == 2 * 3 + 1
    assert (texts["texts"], texts["equal"]) == (8, 8)


@pytest.mark.slow
def test_every_way_to_decode_is_measured(found: tuple[Path, dict[str, Any]]) -> None:
    rows = found[1]["decoding"]["rows"]
    assert len(rows) == 5
    assert [row["way"] for row in rows if "failed" in row] == []


@pytest.mark.slow
def test_recorded_answers_decide_what_is_accepted(found: tuple[Path, dict[str, Any]]) -> None:
    """The same answer stands in the pool of the same task, so that it comes in a few steps."""
    rows = {(row["drafting"], row["pool"], row["batch"]): row for row in found[1]["traces"]["rows"]}
    assert {batch for *_, batch in rows} == {1, 2}
    assert all(row["turns"] == 4 for row in rows.values())
    assert all(row["forwards_of_fixed_size"] > 0 for row in rows.values())
    for session, pool, _ in rows:
        assert rows[session, pool, 1]["tokens_per_step"] == rows[session, pool, 2]["tokens_per_step"]
    assert rows["ours", "same-task", 1]["tokens_per_step"] > 3
    assert 1 < rows["prompt lookup", "none", 1]["tokens_per_step"] < rows["ours", "same-task", 1]["tokens_per_step"]


@pytest.mark.slow
def test_wrong_answers_are_proposed_and_bring_nothing(found: tuple[Path, dict[str, Any]]) -> None:
    rows = [row for row in found[1]["traces"]["rows"] if row["pool"] == "wrong answers"]
    assert len(rows) == 2
    assert all(row["nodes_per_step"] > 0 for row in rows)
    assert all(1 <= row["tokens_per_step"] < 1.1 for row in rows)


@pytest.mark.slow
def test_an_agent_is_served_in_every_way(found: tuple[Path, dict[str, Any]]) -> None:
    pytest.importorskip("precedent_demo")
    rows = {row["way"]: row for row in found[1]["pair"]["rows"]}
    assert list(rows) == ["plain", "draft-only", "draft-only, pearl", "cache-only", "both"]
    assert [row for row in rows.values() if "failed" in row] == []
    assert all(row["requests"] == row["requests_word_for_word_as_plain"] == 1 for row in rows.values())
    assert {row["tokens"] for row in rows.values()} == {rows["plain"]["tokens"]}
    assert rows["plain"]["tokens_per_step"] == 1 < max(row["tokens_per_step"] for row in rows.values())


def test_what_there_was_no_time_for_is_said(tmp_path: Path) -> None:
    parts = run(tmp_path, "--minutes", "0", "--parts", "steps", "batches")
    assert {name: (part["rows"], part["stopped"]) for name, part in parts.items()} == {
        "steps": ([], "the time was up"),
        "batches": ([], "the time was up"),
    }
