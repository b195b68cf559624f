"""A judge's training: labels are what plain decoding says, a kill changes nothing, and what is learned from them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.command_line import precedent
from helpers.golden import Golden, shape
from helpers.tiny_draft import tiny_target
from helpers.tiny_judge import (
    MAX_TOKENS,
    RECIPE,
    RUNS,
    chat_model,
    outcome,
    tiny_draft,
    train_tiny_judge,
    value_of,
)

from precedent.config import SamplingParams, SpeculationConfig
from precedent.engine.engine import Engine
from precedent.engine.options import EngineOptions
from precedent.errors import ConfigError, ModelLoadError, PromptError, UnsupportedError
from precedent.planning.costs import CostCurve
from precedent.text.prompt import render_prompt
from precedent.text.traces import Trajectory
from precedent_research.fitting import (
    Examples,
    area_under_curve,
    fit,
    folded,
    probabilities_of,
    threshold_of,
)
from precedent_research.judge import JUDGE_FILE, OF_ROWS, Rejected, TrainedJudge, features_of
from precedent_research.judge_training import LABELS_FOLDER, WORK_FOLDER, Piece, report_of
from precedent_research.reruns import Replaced, RerunEngine, Turn, last_lines, load_outcome, prompts_of
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm

TOKENIZER, TARGET = byte_tokenizer(), tiny_target()
PLAIN = EngineOptions(speculation=SpeculationConfig(enabled=False, write_back=False))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained judge that reads rows and hidden states."""
    out = tmp_path_factory.mktemp("judges") / "judge"
    train_tiny_judge(out, replace(RECIPE, features=(*OF_ROWS, "hidden")))
    return out


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """Plain decoding of the target."""
    with closing(Engine(tiny_target(), TOKENIZER, PLAIN, name="tiny", cost=CostCurve())) as running:
        yield running


def pieces(folder: Path) -> list[Piece]:
    """The labels of a finished training."""
    return [Piece.load(path) for path in sorted((folder / LABELS_FOLDER).glob("run-*.json"))]


@torch.no_grad()
def said(messages: list[dict[str, str]], prefix: tuple[int, ...] = ()) -> tuple[int, ...]:
    """The answer that begins with these tokens, by transformers alone."""
    prompt, answer = render_prompt(TOKENIZER, messages), list(prefix)
    while len(answer) < MAX_TOKENS and TOKENIZER.eos_token_id not in answer:
        answer.append(int(TARGET(torch.tensor([[*prompt, *answer]])).logits[0, -1].argmax()))
    return tuple(answer)


def served(run: Trajectory, turn: int = -1, prefix: tuple[int, ...] = ()) -> tuple[list[tuple[int, ...]], int]:
    """`outcome` once more, by transformers alone: the answers, one of them with a given beginning, and their value."""
    messages, answers, texts = [dict(run.messages[0])], [], []
    for number in range(2):
        answers.append(said(messages, prefix if number == turn else ()))
        texts.append(TOKENIZER.decode(answers[-1], skip_special_tokens=True))
        messages += [{"role": "assistant", "content": texts[-1]}, {"role": "user", "content": f"So {len(texts[-1])}?"}]
    return answers, value_of(*texts)


def test_every_label_says_whether_plain_decoding_from_there_comes_to_another_outcome(folder: Path) -> None:
    labels = [(run, each) for run, piece in zip(RUNS, pieces(folder), strict=True) for each in piece.labels]
    assert len(labels) == 24
    assert 3 < sum(each.changed for _, each in labels) < 21
    for run, each in labels[::3]:
        (answers, expected), mismatch = served(run), each.mismatch
        prefix = (*answers[mismatch.turn][: mismatch.place], mismatch.token)
        assert each.changed == (served(run, mismatch.turn, prefix)[1] != expected), mismatch


def test_features_are_those_of_both_models_own_rows(folder: Path, engine: Engine) -> None:
    """Against transformers: the row before the token, and the hidden state behind it."""
    draft, recorded = tiny_draft(), RerunEngine(engine)
    for run, piece in list(zip(RUNS, pieces(folder), strict=True))[:2]:
        with recorded.recording() as turns:
            outcome(run, chat_model(recorded))
        for each in piece.labels:
            mismatch, turn = each.mismatch, turns[each.mismatch.turn]
            ids = torch.tensor([[*turn.prompt_ids, *turn.answer_ids[: mismatch.place], mismatch.token]])
            with torch.no_grad():
                of_target, of_draft = TARGET(ids, output_hidden_states=True), draft(ids)
            rows = of_target.logits[0, -2], of_draft.logits[0, -2]
            assert mismatch.token == int(rows[1].argmax()) != turn.answer_ids[mismatch.place]
            seen = Rejected(mismatch.token, *rows, of_target.hidden_states[-1][0, -1])
            expected = features_of(seen, (*OF_ROWS, "hidden"))
            assert mismatch.features == pytest.approx(expected, rel=1e-4, abs=1e-5)


class Killed(BaseException):
    """Stands for a signal that nobody handles."""


def test_a_killed_training_ends_with_the_same_judge(folder: Path, tmp_path: Path) -> None:
    recipe, kill_at = replace(RECIPE, features=(*OF_ROWS, "hidden")), 4

    def kill(phase: str, done: int, total: int) -> None:
        if done == kill_at:
            raise Killed

    out = tmp_path / "judge"
    with pytest.raises(Killed):
        train_tiny_judge(out, recipe, progress=kill)
    assert not (out / JUDGE_FILE).exists()
    (out / WORK_FOLDER / "run-00005.json.partial").write_text("half")
    resumed: list[int] = []
    train_tiny_judge(out, recipe, progress=lambda phase, done, total: resumed.append(done))
    assert resumed == list(range(kill_at, len(RUNS)))  # what was labelled is not labelled again
    assert (out / JUDGE_FILE).read_bytes() == (folder / JUDGE_FILE).read_bytes()


def test_a_judge_learns_anew_from_earlier_labels(folder: Path, tmp_path: Path) -> None:
    """The same as if it had been trained so, without a run; other runs, or features that are lacking, are refused."""
    recipe = replace(RECIPE, features=("divergence", "margin"), keep=0.6)
    direct = train_tiny_judge(tmp_path / "direct", recipe).judge

    def never(run: Trajectory, model: Any) -> object:
        raise AssertionError("nothing has to be labelled")

    anew = train_tiny_judge(tmp_path / "anew", recipe, run=never, labels=folder / LABELS_FOLDER).judge
    assert anew == direct
    with pytest.raises(ConfigError, match=r"has another runs .* leave --labels out"):
        train_tiny_judge(tmp_path / "other", recipe, labels=folder / LABELS_FOLDER, runs=RUNS[:5])
    with pytest.raises(ConfigError, match="the labels lack the features log_prob"):
        train_tiny_judge(tmp_path / "more", labels=tmp_path / "direct" / LABELS_FOLDER)
    with pytest.raises(ConfigError, match="there are no labels in"):
        train_tiny_judge(tmp_path / "none", labels=tmp_path)


def test_a_run_that_fails_without_a_draft_is_left_out(tmp_path: Path) -> None:
    def failing(run: Trajectory, model: Any) -> object:
        return None if run.number == 1 else outcome(run, model)

    trained = train_tiny_judge(tmp_path / "judge", run=failing)
    assert [piece.failed for piece in trained.pieces] == [False, True, False, False, False, False]
    assert trained.pieces[1].labels == ()
    with pytest.raises(PromptError, match="of 6 runs 6 fail without a draft"):
        train_tiny_judge(tmp_path / "nothing", run=lambda run, model: None)


def test_a_run_that_is_not_repeatable_is_refused(tmp_path: Path) -> None:
    """Messages that differ from time to time, or an outcome that does."""
    count = itertools.count()

    def forgetful(run: Trajectory, model: Any) -> object:
        return outcome(replace(run, messages=({"role": "user", "content": f"It is {next(count)}."},)), model)

    with pytest.raises(PromptError, match=r"not repeatable: the same answers led to another prompt"):
        train_tiny_judge(tmp_path / "prompts", run=forgetful)
    with pytest.raises(PromptError, match=r"run task-0 is not repeatable: the same answers led to another outcome"):
        train_tiny_judge(tmp_path / "outcomes", run=lambda run, model: (outcome(run, model), next(count)))


def test_other_settings_are_refused_in_a_begun_folder(tmp_path: Path) -> None:
    def kill(phase: str, done: int, total: int) -> None:
        raise Killed

    with pytest.raises(Killed):
        train_tiny_judge(tmp_path / "judge", progress=kill)
    for change in ({"seed": 1}, {"keep": 0.5}, {"mismatches": 12}):
        with pytest.raises(ConfigError, match=f"another {next(iter(change))} .*resume it with the same settings"):
            train_tiny_judge(tmp_path / "judge", replace(RECIPE, **change))
    (tmp_path / "judge" / WORK_FOLDER / "run-00000.json").write_text("{}")
    with pytest.raises(ModelLoadError, match=r"run-00000\.json is damaged"):
        train_tiny_judge(tmp_path / "judge")
    (tmp_path / "judge" / WORK_FOLDER / "plan.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"plan\.json cannot be read"):
        train_tiny_judge(tmp_path / "judge")
    with pytest.raises(PromptError, match="runs of 2 tasks are too few"):
        train_tiny_judge(tmp_path / "few", runs=RUNS[:2])


def test_the_report_says_what_was_learned_and_what_is_let_through(folder: Path) -> None:
    recipe = replace(RECIPE, features=(*OF_ROWS, "hidden"))
    trained = train_tiny_judge(folder.parent / "again", recipe, labels=folder / LABELS_FOLDER)
    report = report_of(trained, recipe)
    assert report["interval"][0] <= report["area"] <= report["interval"][1]
    assert report["learned"]["labels"] + report["held_out"]["labels"] == 24
    assert report["held_out"]["tasks"] == 2
    overruled = [
        (trained.judge.probability(each.mismatch.features) < trained.judge.threshold, each.changed)
        for piece in trained.pieces
        for each in piece.labels
        if each.mismatch.features in [tuple(row) for row in trained.held_out.features.tolist()]
    ]
    assert report["held_out"]["overruled_changed"] == [overruled.count((True, True)), sum(c for _, c in overruled)]


# Reruns


def test_a_rerun_decodes_only_what_is_new(engine: Engine) -> None:
    """Replaying decodes nothing; an answer with another token is decoded from there, and what follows it."""
    reruns = RerunEngine(engine)
    with reruns.recording() as turns:
        expected = outcome(RUNS[0], chat_model(reruns))
    assert reruns.num_decoded == sum(len(turn.answer_ids) for turn in turns) == 2 * MAX_TOKENS
    with reruns.repeating(turns):
        assert outcome(RUNS[0], chat_model(reruns)) == expected
    assert reruns.num_decoded == 2 * MAX_TOKENS
    again = replace_token(turns, 0, 4, turns[0].answer_ids[4])
    with reruns.repeating(turns, again):
        assert outcome(RUNS[0], chat_model(reruns)) == expected
    assert reruns.num_decoded == 2 * MAX_TOKENS + 1  # one token behind the place, and a known turn behind it


def replace_token(turns: list[Turn], turn: int, place: int, token: int) -> Replaced:
    return Replaced(turns[turn].prompt_ids, (*turns[turn].answer_ids[:place], token))


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"sampling": SamplingParams(temperature=0.5)}, "leave temperature=0.5 out"),
        ({"sampling": SamplingParams(frequency_penalty=1.0)}, "frequency_penalty would count anew"),
        ({"sampling": SamplingParams(logit_bias={3: 1.0})}, "logit_bias would count anew"),
        ({"sampling": SamplingParams(), "grammar": object()}, "a grammar holds"),
    ],
)
def test_answers_that_cannot_be_continued_are_refused(engine: Engine, asked: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        RerunEngine(engine).submit([1, 2, 3], **asked)


def test_a_stop_string_across_the_new_token_ends_the_answer(engine: Engine) -> None:
    """Half of it in the recorded part, half behind it: the text and the tokens are cut where plain decoding cuts."""
    reruns = RerunEngine(engine)
    prompt = tuple(TOKENIZER.encode("Where is it?"))
    with reruns.recording() as turns:
        whole = reruns.submit(prompt, SamplingParams(max_tokens=MAX_TOKENS)).result()
    token = next(each for each in range(60, 90) if each != whole.token_ids[2])
    with reruns.repeating(turns, replace_token(turns, 0, 2, token)):
        free = reruns.submit(prompt, SamplingParams(max_tokens=MAX_TOKENS)).result()
    stop = TOKENIZER.decode(list(free.token_ids[2:4]))
    with reruns.repeating(turns, replace_token(turns, 0, 2, token)):
        cut = reruns.submit(prompt, SamplingParams(max_tokens=MAX_TOKENS, stop=stop)).result()
    assert free.finish_reason == "length"
    assert cut.finish_reason == "stop"
    assert cut.text == free.text[: free.text.index(stop)]


# Outcomes


class Parrot:
    """A chat model that says the same about every prompt, and keeps what it was asked."""

    def __init__(self, text: str) -> None:
        self.text, self.asked, self.tools = text, list[Any](), list[Any]()

    def bind_tools(self, tools: list[Any]) -> Parrot:
        self.tools = tools
        return self

    def invoke(self, messages: list[Any]) -> Parrot:
        self.asked.append(messages)
        return self


def test_the_outcome_of_texts_is_the_last_line_of_each_answer() -> None:
    """Of every recorded answer; of a single call, of the last one alone."""
    messages = tuple({"role": role, "content": "x"} for role in ("system", "user", "assistant", "user", "assistant"))
    run = Trajectory(0, "t", "t", messages, ({"type": "function"},))
    parrot = Parrot("Thinking.\n\nThe answer is  42. \n")
    assert last_lines(run, parrot) == ("the answer is 42.",) * 2
    assert [len(each) for each in parrot.asked] == [2, 4]
    assert parrot.tools == [{"type": "function"}]
    assert last_lines(run, Parrot("Well.\nthe ANSWER is 42.")) == last_lines(run, parrot)
    assert last_lines(run, Parrot("The answer is 43.")) != last_lines(run, parrot)
    assert prompts_of(replace(run, only_last=True)) == [messages[:4]]
    assert last_lines(run, Parrot("")) == ("", "")


def test_outcomes_are_found_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The word text, an installed one, module:factory; anything else is refused by name."""
    assert load_outcome("text") is last_lines
    assert load_outcome("helpers.tiny_judge:agent").outcome is outcome
    with pytest.raises(ConfigError, match=r"no outcome is called 'tex' \(installed: .*text\); or write module:factory"):
        load_outcome("tex")
    with pytest.raises(ConfigError, match="the outcome 'no_such_module:made' cannot be loaded: No module named"):
        load_outcome("no_such_module:made")
    with pytest.raises(ConfigError, match=r"cannot be loaded: module 'helpers\.tiny_judge' has no attribute 'nothing'"):
        load_outcome("helpers.tiny_judge:nothing")


# Fitting


def examples(number: int = 120, width: int = 3, seed: int = 0) -> Examples:
    """Labels that follow the first feature, with noise; twelve tasks; the last feature is constant."""
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(number, width)) * [3.0, 1.0, 0.0][:width] + [5.0, 0.0, 2.0][:width]
    labels = (rng.random(number) < 1 / (1 + np.exp(5.0 - features[:, 0]))).astype(np.int64)
    return Examples(features, labels, np.arange(number) % 12)


def test_the_folded_weights_are_the_fit_of_standardised_features() -> None:
    """With a penalty of 1 / strength where the likelihood is flat; a constant feature gets no weight."""
    known, strength = examples(), 0.3
    fitted = fit(known, strength)
    probabilities = probabilities_of(fitted, known.features)
    scaled = (known.features - known.features.mean(0)) / np.maximum(known.features.std(0), 1e-9)
    weights, intercept = folded(fitted)
    assert weights[2] == 0.0
    flat = scaled.T @ (probabilities - known.labels) + weights * known.features.std(0) / strength
    assert np.allclose(flat, 0.0, atol=1e-3)
    scores = known.features @ np.array(weights) + intercept
    assert np.allclose(1 / (1 + np.exp(-scores)), probabilities, atol=1e-5)
    assert area_under_curve(probabilities, known.labels) > 0.8


@pytest.mark.parametrize(("keep", "lost"), [(1.0, 0), (0.9, 1), (0.75, 2), (0.5, 5)])
def test_the_threshold_leaves_the_wanted_share_rejected_and_no_more(keep: float, lost: int) -> None:
    """Of ten examples that change the outcome, at most `lost` lie below it; a higher one would lose another."""
    rng = np.random.default_rng(4)
    probabilities, labels = rng.random(30), np.array([1] * 10 + [0] * 20)
    threshold = threshold_of(probabilities, labels, keep)
    below = (probabilities[:10] < threshold).sum()
    assert below == lost
    assert (probabilities[:10] <= threshold).sum() == lost + 1


def test_both_labels_must_occur_in_two_tasks() -> None:
    known = examples(6)
    for label, meaning in ((1, "leave the outcome as it is occur in 1"), (0, "change the outcome occur in 1")):
        labels = np.full(6, label)
        labels[3] = 1 - label
        with pytest.raises(ConfigError, match=f"mismatches that {meaning} of the tasks"):
            Examples(known.features, labels, known.tasks).check()


# The command


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options that name a tiny target, its draft model, recorded runs and their outcome."""
    folder = tmp_path_factory.mktemp("models")
    for name, model in (("target", tiny_causal_lm(scale=2.0)), ("draft", tiny_draft())):
        model.to(torch.float32).save_pretrained(folder / name)
        byte_tokenizer().save_pretrained(folder / name)
    runs = folder / "runs.jsonl"
    answered = [
        {"task_id": run.task, "messages": [*run.messages, {"role": "assistant", "content": "Yes."}]} for run in RUNS
    ]
    runs.write_text("".join(json.dumps(each) + "\n" for each in answered))
    models = ["--target", str(folder / "target"), "--draft-model", str(folder / "draft")]
    return [*models, "--runs", str(runs), "--outcome", "helpers.tiny_judge:made"]


def test_a_judge_is_trained_reported_and_learned_anew(
    given: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], golden: Golden
) -> None:
    """Labels cost a run each once; from them a judge of other features is learned without one."""
    out, asked = tmp_path / "judge", ["--mismatches", "24", "--max-tokens", "6"]
    assert precedent("train-judge", *given, *asked, "--strength", "0.1", "--out", str(out)) == 0
    said = capsys.readouterr()
    assert "a run took" in said.err
    assert "6 runs, 0 of which failed and were left out" in said.out
    report = json.loads((out / "report.json").read_text())
    golden("transcripts/commands-train-judge", {"train-judge": shape(report)})
    assert report["learned"]["labels"] + report["held_out"]["labels"] == 24
    assert TrainedJudge.load(out).threshold == report["threshold"]
    anew, results = tmp_path / "anew", tmp_path / "results.json"
    learned = ["--features", "divergence, margin", "--labels", str(out / "labels"), "--keep", "0.5"]
    assert precedent("train-judge", *given, *asked, *learned, "--out", str(anew), "--json", str(results)) == 0
    assert "a run took" not in capsys.readouterr().err
    assert TrainedJudge.load(anew).features == ("divergence", "margin")
    assert json.loads(results.read_text()) == json.loads((anew / "report.json").read_text())
    assert precedent("train-judge", *given, *asked, "--out", str(out)) == 2
    assert "is not empty; give a new folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--features", "rows,colour"], "must be distinct names of"),
        (["--keep", "1.5"], "keep=1.5 must be above 0 and at most 1"),
        (["--outcome", "nothing"], "no outcome is called 'nothing'"),
    ],
)
def test_what_cannot_be_is_refused_before_a_model_is_loaded(
    given: list[str], arguments: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert precedent("train-judge", *given, *arguments, "--out", str(tmp_path / "judge")) == 2
    said = capsys.readouterr()
    assert says in " ".join(said.err.split())
    assert "loading" not in said.err
    assert not (tmp_path / "judge").exists()


def test_a_draft_model_is_needed(given: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = given[:2] + given[4:]
    assert precedent("train-judge", *target, "--out", str(tmp_path / "judge")) == 2
    assert "give the draft model whose tokens are judged" in " ".join(capsys.readouterr().err.split())
