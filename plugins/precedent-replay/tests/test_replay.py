"""Replay on logs written here: what is measured, what each turn may see, and what the baselines do."""

from __future__ import annotations

import gzip
import itertools
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from precedent.cli.app import app
from precedent.drafters.matching.token_index import TokenIndex, reversed_context
from precedent.errors import PromptError
from precedent.pages.colours import SOURCES
from precedent.text.traces import read_trajectories
from precedent.tree import TreeBuilder, chain
from precedent_replay.baselines import suffix_tree
from precedent_replay.run import Settings, replay
from precedent_replay.simulate import accepted_path
from precedent_replay.turns import TurnReader
from precedent_testing.embedders import HashEmbedder
from precedent_testing.tiny_models import byte_tokenizer

CALL = {"function": {"name": "look_up", "arguments": '{"order": "A 1"}'}}


def conversation(task: str, order: int, *answers: str, group: str | None = None) -> dict[str, object]:
    """A log record: a question, then answers, each followed by a thank-you."""
    messages: list[dict[str, object]] = [{"role": "system", "content": "be kind"}, {"role": "user", "content": task}]
    for answer in answers:
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "thanks"}]
    record: dict[str, object] = {"task_id": task, "order": order, "messages": messages}
    return record if group is None else {**record, "group": group}


def written(path: Path, *records: dict[str, object]) -> Path:
    """A log file."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


ANSWER = "your order is on its way and will arrive on monday"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Two runs of one task and one of another, of two customers, not in time order."""
    return written(
        tmp_path / "log.jsonl",
        conversation("where is it", 2, ANSWER, group="ann"),
        conversation("where is it", 1, ANSWER, group="ann"),
        conversation("cancel it", 3, "it is cancelled", ANSWER, group="bob"),
    )


def measured(log: Path, **settings: object) -> dict[str, dict[str, float]]:
    """The reports of a replay by name."""
    tokenizer = byte_tokenizer()
    found = replay([log], [], tokenizer, HashEmbedder(), Settings(**settings)).as_dict()  # type: ignore[arg-type]
    return {row["name"]: row for row in found["drafters"]}  # type: ignore[union-attr,index,misc]


def test_trajectories_come_in_time_order(log: Path) -> None:
    """A file that is not sorted is read in the order of its `order` fields, plain or compressed."""
    packed = log.with_suffix(".jsonl.gz")
    packed.write_bytes(gzip.compress(log.read_bytes()))
    for path in (log, packed):
        assert [(t.task, t.group) for t in read_trajectories([path])] == [
            ("where is it", "ann"), ("where is it", "ann"), ("cancel it", "bob")
        ]  # fmt: skip
    assert [t.number for t in read_trajectories([log, packed])] == list(range(6))


def test_a_line_that_is_no_log_is_named(tmp_path: Path) -> None:
    for text, reason in (("{", "is not JSON"), ('{"a": 1}', "not a chat trace"), ('{"inputs": {}}', "LangSmith")):
        path = tmp_path / "bad.jsonl"
        path.write_text('{"messages": []}\n' + text + "\n")
        with pytest.raises(PromptError, match=f"line 2 .*{reason}"):
            list(read_trajectories([path]))
    with pytest.raises(PromptError, match="cannot read"):
        list(read_trajectories([tmp_path / "missing.jsonl"]))


def test_langsmith_runs_are_read(tmp_path: Path) -> None:
    """Both what LangChain serialises and plain messages; only the recorded answer is measured, not the history."""
    serialised = {"lc": 1, "id": ["langchain", "schema", "messages", "HumanMessage"], "kwargs": {"content": "hi"}}
    answer = {"id": ["AIMessage"], "kwargs": {"content": "", "tool_calls": [{"name": "look_up", "args": {"order": 1}}]}}
    history = {"role": "assistant", "content": "earlier"}
    run = {
        "inputs": {"messages": [[history, serialised]]},
        "outputs": {"generations": [[{"message": answer}]]},
        "extra": {"invocation_params": {"tools": [{"type": "function"}]}},
    }

    (found,) = read_trajectories([written(tmp_path / "runs.jsonl", run)])
    turns = list(TurnReader(byte_tokenizer()).turns(found))
    assert [message["role"] for message in found.messages] == ["assistant", "user", "assistant"]
    assert found.tools == ({"type": "function"},)
    assert [(turn.calls_tools, turn.text) for turn in turns] == [
        (True, '<tool_call>\n{"name": "look_up", "arguments": {"order": 1}}\n</tool_call>')
    ]


def test_turns_hold_the_prompt_before_and_the_answer_with_its_end(log: Path) -> None:
    """Prompt and answer of a turn are the prompt's beginning of the next."""
    tokenizer = byte_tokenizer()
    reader = TurnReader(tokenizer)
    *_, trajectory = read_trajectories([log])
    first, second = reader.turns(trajectory)
    whole = (*first.prompt_ids, *first.token_ids)
    assert second.prompt_ids[: len(whole)] == whole
    assert first.token_ids[-1] == reader.end_token_id
    assert first.text == "it is cancelled"
    assert "cancel it" in first.query


def test_pools_show_what_they_say(log: Path) -> None:
    """The third turn that says the known answer: seen online and by same-task; the first one only by same-task."""
    steps = {pool: measured(log, pool=pool)["recall+prompt"]["tokens_per_step"] for pool in ("none", "online")}
    assert steps["none"] < steps["online"]
    oracle = measured(log, pool="same-task", groups=frozenset({"ann"}))
    others = measured(log, pool="other-tasks", groups=frozenset({"ann"}))
    assert oracle["recall"]["tokens_per_step"] > others["recall"]["tokens_per_step"] > 1.5  # bob said it as well
    alone = measured(log, pool="other-tasks", groups=frozenset({"bob"}))
    assert alone["recall"]["tokens_per_step"] > 1.2


def test_a_turn_never_sees_itself(tmp_path: Path) -> None:
    """Hidden are all turns of the trajectory in `same-task`, all of the group in `other-tasks`."""
    log = written(tmp_path / "log.jsonl", *(conversation(f"t{n}", n, ANSWER, group="ann") for n in range(2)))
    assert measured(log, pool="same-task")["recall"]["tokens_per_step"] > 2
    assert measured(log, pool="other-tasks")["recall"]["tokens_per_step"] == 1.0
    single = written(tmp_path / "single.jsonl", conversation("t", 0, ANSWER))
    assert "suffix" not in measured(single, pool="same-task")["suffix"]["accepted_by_source"]


def test_a_warm_log_is_in_every_pool(log: Path, tmp_path: Path) -> None:
    new = written(tmp_path / "new.jsonl", conversation("something new", 0, ANSWER))
    tokenizer = byte_tokenizer()
    for pool in ("online", "none"):
        settings = Settings(pool=pool)
        cold = replay([new], [], tokenizer, HashEmbedder(), settings).reports["recall"].all
        warm = replay([new], [log], tokenizer, HashEmbedder(), settings).reports["recall"].all
        assert cold.tokens_per_step == 1.0 < warm.tokens_per_step


def test_the_limit_counts_measured_turns(log: Path) -> None:
    tokenizer = byte_tokenizer()
    found = replay([log], [], tokenizer, None, Settings(limit=3))
    assert found.turns == 3
    assert all(report.all.turns == 3 for report in found.reports.values())
    assert found.tokens == sum(
        len(turn.token_ids)
        for turn in itertools.islice(
            (t for run in read_trajectories([log]) for t in TurnReader(tokenizer).turns(run)), 3
        )
    )


def naive_suffix_tree(texts: list[list[int]], context: list[int], alpha: float, most: int) -> float:
    """The best score over all match lengths, by counting continuations one prefix at a time."""
    best = 0.0
    for length in range(1, len(context) + 1):
        size, end = min(most, int(alpha * length)), context[-length:]
        behind = [
            text[at + length :] for text in texts for at in range(len(text) - length) if text[at : at + length] == end
        ]
        waiting, score = {(): (1.0, behind)}, 0.0
        for picked in range(size + 1):
            ready = [path for path in waiting if waiting[path][0] >= 0.1]
            if not ready:
                break
            path = max(ready, key=lambda p: waiting[p][0])
            chance, rests = waiting.pop(path)
            score += chance if path else 0.0
            if picked == size:
                break
            counts = Counter(rest[len(path)] for rest in rests if len(rest) > len(path))
            for token, count in counts.items():
                below = [rest for rest in rests if len(rest) > len(path) and rest[len(path)] == token]
                waiting[(*path, token)] = (chance * count / len(rests), below)
        best = max(best, score)
    return best


@pytest.mark.parametrize("alpha", [1.0, 4.0])
def test_suffix_decoding_equals_counting_by_hand(alpha: float) -> None:
    """The score of the chosen tree is the best over all match lengths, and its nodes are as many as allowed."""
    rng = np.random.default_rng(3)
    for _ in range(40):
        texts = [rng.integers(0, 3, rng.integers(2, 14)).tolist() for _ in range(4)]
        index = TokenIndex()
        for number, text in enumerate(texts):
            index.append(number, text)
        context = rng.integers(0, 3, 6).tolist()
        tokens, parents, score = suffix_tree(index, reversed_context(context), alpha, 8)
        assert score == pytest.approx(naive_suffix_tree(texts, context, alpha, 8))
        assert len(tokens) <= 8
        assert all(parent < node for node, parent in enumerate(parents.tolist()))


def test_the_accepted_path_is_the_longest_along_the_answer() -> None:
    """An end token in the tree is accepted like any other; nothing behind it can be."""
    assert accepted_path(chain([1, 2, 3]), [1, 2, 3]) == [0, 1, 2]
    assert accepted_path(chain([1, 2, 3, 4]), [1, 2, 3]) == [0, 1, 2]
    builder = TreeBuilder()
    builder.add_fixed_tree([5, 1, 2], [-1, -1, 1], [("x",)] * 3)
    assert accepted_path(builder.build(), [1, 2, 9]) == [1, 2]
    assert accepted_path(builder.build(), [7, 2, 9]) == []


def test_the_command_prints_a_table_and_writes_its_files(log: Path, tmp_path: Path, tokenizer_folder: Path) -> None:
    """JSON with the keys of the contract, a page with colours, and the calibration."""
    out, page = tmp_path / "out.json", tmp_path / "page.html"
    words = f"replay {log} --tokenizer {tokenizer_folder} --embedder none --baselines suffix-tree"
    result = CliRunner().invoke(app, f"{words} --json {out} --html {page} --calibration".split())
    assert result.exit_code == 0, result.output
    found = json.loads(out.read_text())
    assert {"turns", "tokens", "drafters", "calibration"} <= found.keys()
    names = [row["name"] for row in found["drafters"]]
    assert names == ["prompt-lookup", "suffix", "suffix-tree", "recall", "prompt", "recall+prompt"]
    contract = {"name", "tokens_per_step", "tokens_per_step_tool_calls", "tokens_per_step_text"}
    assert contract | {"draft_tokens_per_step", "microseconds_per_step"} <= found["drafters"][0].keys()
    assert "Brier" in result.output
    assert f'<span style="background:{SOURCES["recall"].page}" title="recall">' in page.read_text()


@pytest.fixture
def tokenizer_folder(log: Path, tmp_path: Path) -> Path:
    """A tokenizer as transformers loads it."""
    folder = tmp_path / "tokenizer"
    byte_tokenizer().save_pretrained(folder)
    return folder
