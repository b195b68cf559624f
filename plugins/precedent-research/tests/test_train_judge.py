"""A judge's training: each label is what plain decoding says, and a kill changes nothing."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.tiny_draft import tiny_target
from helpers.tiny_judge import (
    MAX_TOKENS,
    RECIPE,
    RUNS,
    agent,
    chat_model,
    outcome,
    tiny_draft,
    train_tiny_judge,
    value_of,
)

from precedent.config import SpeculationConfig
from precedent.engine.engine import Engine
from precedent.engine.options import EngineOptions
from precedent.errors import ConfigError, ModelLoadError, PromptError
from precedent.planning.costs import CostCurve
from precedent.target.fingerprints import name_of
from precedent.text.prompt import render_prompt
from precedent.text.traces import Trajectory
from precedent_research.judge import JUDGE_FILE, OF_ROWS, Rejected, TrainedJudge, features_of
from precedent_research.judge_training.judge_training import LABELS_FOLDER, WORK_FOLDER, JudgeTraining, Piece, TrainedOn
from precedent_research.judge_training.report import report_of
from precedent_research.judge_training.reruns import RerunEngine
from precedent_testing.tiny_models import byte_tokenizer

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


@pytest.mark.parametrize("kill_at", [0, 4])
def test_a_killed_training_ends_with_the_same_judge(kill_at: int, folder: Path, tmp_path: Path) -> None:
    recipe, labelled = replace(RECIPE, features=(*OF_ROWS, "hidden")), []

    def kill(phase: str, done: int, total: int) -> None:
        labelled.append(done)
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
        train_tiny_judge(tmp_path / "more", labels=tmp_path / "anew" / LABELS_FOLDER)
    with pytest.raises(ConfigError, match="there are no labels in"):
        train_tiny_judge(tmp_path / "none", labels=tmp_path)


@pytest.mark.parametrize("keep", [0.6, 0.9])
def test_a_judge_of_one_number_clips_it_where_the_wanted_share_stays_rejected(
    keep: float, folder: Path, tmp_path: Path
) -> None:
    """Of the examples that it learned from; all that it overrules lie on one side of the others."""
    recipe = replace(RECIPE, features=("divergence",), keep=keep)
    trained = train_tiny_judge(tmp_path / "judge", recipe, labels=folder / LABELS_FOLDER)
    judge, learned = TrainedJudge.load(tmp_path / "judge"), trained.learned
    overruled = [judge.probability(values) < judge.threshold for values in learned.features.tolist()]
    changing = [found for found, label in zip(overruled, learned.labels.tolist(), strict=True) if label]
    assert sum(changing) == int((1.0 - keep) * len(changing) + 1e-9)
    ranked = [found for _, found in sorted(zip(learned.features[:, 0].tolist(), overruled, strict=True))]
    assert ranked in (sorted(ranked), sorted(ranked, reverse=True))


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


def test_labels_of_one_kind_teach_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="mismatches that change the outcome occur in 0 of the tasks to learn from"):
        train_tiny_judge(tmp_path / "judge", run=lambda run, model: len(outcome(run, model).__class__.__name__))


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
    trained = train_tiny_judge_again(folder, recipe)
    report = report_of(trained, recipe)
    assert [each["features"] for each in report["areas"]] == ["all", "all of rows", *OF_ROWS, "hidden"]
    assert report["learned"]["labels"] + report["held_out"]["labels"] == 24
    assert report["held_out"]["tasks"] == 2
    overruled = [
        (trained.judge.probability(each.mismatch.features) < trained.judge.threshold, each.changed)
        for piece in trained.pieces
        for each in piece.labels
        if each.mismatch.features in [tuple(row) for row in trained.held_out.features.tolist()]
    ]
    assert report["held_out"]["overruled_changed"] == [overruled.count((True, True)), sum(c for _, c in overruled)]


def train_tiny_judge_again(folder: Path, recipe: Any) -> TrainedOn:
    """The training of the fixture, from its labels."""
    training = JudgeTraining(
        tiny_target(), tiny_draft(), TOKENIZER, RUNS, agent(), recipe, folder.parent / "again",
        labels=folder / LABELS_FOLDER,
    )  # fmt: skip
    return training.run()


def test_a_saved_judge_names_what_it_was_trained_on(folder: Path) -> None:
    judge = TrainedJudge.load(folder)
    assert (judge.target, judge.draft, judge.outcome) == (name_of(tiny_target()), name_of(tiny_draft()), "tiny")
    assert value_of("a", "b") == (97 + 98) % 3
