"""`precedent bench`: every mode and scenario on a tiny model, and the prompts and poison that it is fed."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.command_line import precedent
from helpers.golden import Golden, shape
from helpers.saved_models import saved

from precedent.engine.options import EngineOptions
from precedent.errors import PromptError
from precedent.planning import costs as cost_curve
from precedent.target import TargetModel
from precedent_replay import bench_lineup
from precedent_replay.bench import MODES
from precedent_replay.bench_lineup import POISONED_PER_PROMPT, Lineup, Timing
from precedent_replay.bench_prompts import trace_prompts
from precedent_replay.bench_report import summary
from precedent_testing.embedders import HashEmbedder
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm

OURS = ("plain", "ours", "ours-cold", "adversarial", "null", "oracle")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a tiny chat model."""
    model = tiny_causal_lm(dtype=torch.float32, scale=2.0, num_hidden_layers=2)
    return str(saved(tmp_path_factory.mktemp("model"), model))


def said(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text}


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tasks of two trials each; eleven assistant turns in every conversation."""
    file = tmp_path_factory.mktemp("traces") / "talks.jsonl"
    lines = []
    for task, trial in (("0", 0), ("1", 0), ("0", 1), ("1", 1)):
        messages = [said("system", "be kind")]
        for turn in range(11):
            messages += [said("user", f"q {task}{trial} {turn}"), said("assistant", f"a {turn}")]
        lines.append(json.dumps({"task_id": task, "trial": trial, "messages": messages}))
    file.write_text("\n".join(lines), encoding="utf-8")
    return file


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_lineup, "resolve", lambda embedder: HashEmbedder())
    monkeypatch.setattr(cost_curve, "START_UP_SECONDS", 0.0)


def test_every_mode_gives_the_plain_answers_and_its_figures(
    model: str,
    traces: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    golden: Golden,
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    results = tmp_path / "bench.json"
    sizes = ("--prompts", 2, "--warm", 2, "--max-tokens", 40, "--dtype", "float64", "--draft-model", "first-layers:1")
    status = precedent("bench", "--target", model, "--traces", traces, "--modes", "all", *sizes, "--json", results)
    shown = capsys.readouterr().out
    assert status == 0
    written = json.loads(results.read_text(encoding="utf-8"))
    golden("transcripts/commands-bench", {"bench": shape(written)})
    figures = {mode["name"]: mode for mode in written["modes"]}
    assert tuple(figures) == MODES
    assert all(mode["identical_outputs"] == [2, 2] for mode in figures.values())
    assert figures["plain"]["tokens_per_step"] == figures["null"]["tokens_per_step"] == 1.0
    assert figures["oracle"]["tokens_per_step"] >= 1.0
    for name, mode in figures.items():
        assert mode["name"] in shown
        assert mode["speedup_vs_plain"] == mode["speedup_vs"]["plain"]
        assert set(mode["speedup_vs"]) == {"plain", "generate", "prompt-lookup", "assisted"}
        assert (mode["milliseconds_outside_forward_per_step"] is not None) == (name in OURS)
        for measured in ("first_token_seconds", "between_tokens_seconds", "request_seconds"):
            assert 0 <= mode[f"{measured}_p50"] <= mode[f"{measured}_p95"]
        assert mode["request_seconds"] >= mode["request_seconds_p95"]
        assert mode["request_speedup_vs_plain"] > 0
    assert figures["plain"]["request_speedup_vs_plain"] == 1.0
    assert written["prompts"]["source"] == "talks.jsonl"
    assert written["prompts"]["measured"] == written["prompts"]["warming"] == 2
    assert written["machine"]["dtype"] == "float64"
    assert "0 too long and left out" in " ".join(shown.split())
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_requests_at_once_are_measured_alone_unless_modes_are_named(
    model: str, traces: Path, tmp_path: Path, golden: Golden, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "bench.json"
    sizes = ("--prompts", 5, "--warm", 1, "--max-tokens", 6)
    wanted = ("--concurrency", 2)
    assert precedent("bench", "--target", model, "--traces", traces, *sizes, *wanted, "--json", results) == 0
    written = json.loads(results.read_text(encoding="utf-8"))
    golden("transcripts/commands-bench-concurrency", {"bench --concurrency": shape(written["concurrency"])})
    assert written["modes"] == []
    assert (written["concurrency"]["requests_at_once"], written["concurrency"]["requests"]) == (2, 4)
    assert written["concurrency"]["ratio"] > 0
    assert written["concurrency"]["prompts_read"]["tokens_per_second_at_once"] > 0
    assert "2 requests at once" in " ".join(capsys.readouterr().out.split())


def test_steps_are_timed_by_number_of_rows_and_prompts_by_length(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], golden: Golden
) -> None:
    widths: list[tuple[int, int]] = []
    score = TargetModel.score

    def counted(self: TargetModel, batch: Any) -> Any:
        widths.extend((len(slot.token_ids), 1 + len(tree)) for slot, tree in batch)
        return score(self, batch)

    monkeypatch.setattr(TargetModel, "score", counted)
    results = tmp_path / "rows.json"
    assert precedent("bench", "--target", model, "--rows", "8,1,2", "--context", 40, "--json", results) == 0
    written = json.loads(results.read_text(encoding="utf-8"))
    golden("transcripts/commands-bench-rows", {"bench --rows": shape(written)})
    assert [each["rows"] for each in written["rows"]] == [1, 2, 8]
    assert all(each["milliseconds"] > 0 for each in written["rows"])
    assert written["prefill_tokens_per_second"] > 0
    assert {"processor", "cores", "instructions", "load", "threads"} <= written["machine"].keys()
    assert set(widths) == {(40, 1), (40, 2), (40, 8)}
    assert widths[:6] == [(40, 1), (40, 2), (40, 8)] * 2
    assert "prompts:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--modes", "assisted"], "mode 'assisted' needs --draft-model"),
        (["--draft-device", "cpu"], "give --draft-model as well"),
        (["--topics", "--traces", "{traces}"], "give one of them"),
        (["--concurrency", "9"], "at least as many --prompts (8)"),
        (["--concurrency", "1"], "needs 2 or more"),
        (["--rows", "1,0"], "--rows takes numbers of rows from 1 on"),
        (["--rows", "1,x"], "--rows takes numbers of rows from 1 on"),
        (["--rows", "1", "--topics"], "--rows times steps alone"),
        (["--compare"], "--compare times steps alone: give --rows as well"),
    ],
)
def test_bad_usage_is_one_line_and_status_2(
    arguments: list[str],
    says: str,
    traces: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert precedent("bench", *(argument.format(traces=traces) for argument in arguments)) == 2
    shown = capsys.readouterr()
    assert says in shown.err
    assert shown.err.count("\n") == 1
    assert shown.out == ""


def test_the_cache_is_warmed_by_other_trials_of_the_measured_tasks(traces: Path) -> None:
    tokenizer = byte_tokenizer()
    found = trace_prompts(traces, tokenizer, 2, 4, 1000, truncate=False)
    measured, warming = ([tokenizer.decode(ids) for ids in some] for some in (found.measured, found.warming))
    assert [text.splitlines()[3][:4] for text in measured] == ["q 01", "q 11"]
    assert [text.splitlines()[3][:4] for text in warming] == ["q 00", "q 10"] * 2
    nearest = [text.count("<|im_start|>") for text in warming[:2]]
    assert nearest == [text.count("<|im_start|>") for text in measured]


def test_long_prompts_are_left_out_or_lose_their_oldest_messages(traces: Path) -> None:
    tokenizer, longest = byte_tokenizer(), 150
    left_out = trace_prompts(traces, tokenizer, 30, 0, longest, truncate=False)
    assert max(map(len, left_out.measured)) <= longest
    assert left_out.left_out == 22 - len(left_out.measured) > 0
    assert left_out.truncated == 0
    shortened = trace_prompts(traces, tokenizer, 30, 0, longest, truncate=True)
    assert (len(shortened.measured), shortened.left_out, shortened.truncated) == (22, 0, left_out.left_out)
    assert max(map(len, shortened.measured)) <= longest
    texts = [tokenizer.decode(ids) for ids in shortened.measured]
    assert all("be kind" in text for text in texts)
    assert {text.splitlines()[-2].split()[-1].removesuffix("<|im_end|>") for text in texts} == {
        str(turn) for turn in range(11)
    }
    with pytest.raises(PromptError, match="at most 20 tokens"):
        trace_prompts(traces, tokenizer, 30, 0, 20, truncate=True)


def test_poison_lies_under_the_right_prompt_and_is_never_right_twice_in_a_row(model: str) -> None:
    lineup = Lineup(model, EngineOptions(), 12)
    answer = tuple(range(20, 32))
    cache = lineup.poisoned_cache({(1, 2, 3): answer})
    stored = cache.list(limit=None)
    poisoned = [one for one in stored if one.prompt_fingerprint]
    assert len(poisoned) == POISONED_PER_PROMPT < len(stored)
    for one in poisoned:
        right = [got == wanted for got, wanted in zip(one.token_ids, answer, strict=True)]
        assert 4 <= sum(right) <= 8
        assert sum(a and b for a, b in pairwise(right)) <= 1  # a random token may be right


def test_gaps_count_every_token_and_speed_is_the_median_of_ratios() -> None:
    slow = Timing((1, 2, 3, 4), ((1.0, 1), (2.0, 1), (3.0, 1), (4.0, 1)), 4.0, 3)
    fast = Timing((1, 2, 3, 4), ((0.5, 2), (1.0, 2)), 1.0, 1, 0.002)
    assert slow.gaps == [1.0, 1.0, 1.0]
    assert fast.gaps == [0.0, 0.5, 0.0]
    figures = summary("ours", {"plain": [slow, slow], "ours": [fast, slow]})
    assert figures["speedup_vs_plain"] == pytest.approx((4.0 + 1.0) / 2)
    assert figures["first_token_seconds_p50"] == pytest.approx(0.75)
    assert figures["tokens_per_step"] == pytest.approx(5 / 4)
    assert figures["milliseconds_outside_forward_per_step"] == pytest.approx(0.5)
    assert figures["request_seconds"] == 1.0 + 4.0
    assert figures["request_speedup_vs_plain"] == pytest.approx((4.0 + 4.0) / (1.0 + 4.0))
