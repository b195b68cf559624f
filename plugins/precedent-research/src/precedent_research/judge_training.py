"""Trains a judge for `lossy_judge` (AutoJudge 2504.20039): which of the draft's tokens may stand though rejected.

The target serves recorded agent runs anew, a token at which the draft disagrees is put in, the run goes on from there,
and the label says whether its outcome changed. Each run is one piece of work, saved when it is done, so a killed
training resumes and ends with the same judge.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import Tensor

from precedent.config import SpeculationConfig, check_fields
from precedent.engine.engine import Engine
from precedent.engine.options import EngineOptions
from precedent.errors import ConfigError, ModelLoadError, PromptError
from precedent.planning.costs import CostCurve
from precedent.sampling.probabilities import largest_id
from precedent.target import TargetModel
from precedent.target.model import target_of
from precedent.text.traces import Trajectory
from precedent.tree import ROOT, CandidateTree, TreeBuilder, chain
from precedent_drafts.fingerprints import embeddings_fingerprint, layers_fingerprint, name_of
from precedent_drafts.trained import save_json
from precedent_drafts.training.training import PLAN_FILE, check_same, read_plan
from precedent_research.fitting import (
    CrossValidated,
    Examples,
    Numbers,
    area_under_curve,
    cross_validated,
    fit,
    folded,
    interval_of_area,
    threshold_of,
)
from precedent_research.judge import HIDDEN, OF_ROWS, Rejected, TrainedJudge, check_features, features_of, widths_of
from precedent_research.reruns import Outcome, Replaced, RerunEngine, TokenIds, Turn

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# Mismatches: the places in an answer at which the draft model's likeliest token is not the target's

TOKENS_AT_ONCE = 128
"""Tokens of an answer that are scored together; a row of each is as long as the vocabulary."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """At `place` of the answer of turn number `turn` the draft says `token`; `features` are those of both rows."""

    turn: int
    place: int
    token: int
    features: tuple[float, ...]

    def replaced(self, turns: Sequence[Turn]) -> Replaced:
        """The run with the draft's token in the place of the target's."""
        prompt, answer = turns[self.turn].prompt_ids, turns[self.turn].answer_ids
        return Replaced(prompt, (*answer[: self.place], self.token))


class MismatchFinder:
    """Reads answers with both models; the keys and values of what successive prompts share are computed once.

    Both models must be free: no engine may run on them meanwhile. A target whose hidden states are among the features
    must keep them. Rows are cut after `num_tokens`.
    """

    def __init__(self, target: TargetModel, draft: TargetModel, num_tokens: int, features: Sequence[str]) -> None:
        self._target, self._draft = (_Reader(model, num_tokens) for model in (target, draft))
        self._features, self._reads_hidden = features, HIDDEN in features

    def of_run(self, turns: Sequence[Turn]) -> list[Mismatch]:
        """All mismatches of a run, in order."""
        return [each for number, turn in enumerate(turns) for each in self._of_turn(number, turn)]

    def _of_turn(self, number: int, turn: Turn) -> Iterator[Mismatch]:
        for reader in (self._target, self._draft):
            reader.begin(turn.prompt_ids)
        for start in range(0, len(turn.answer_ids), TOKENS_AT_ONCE):
            piece = turn.answer_ids[start : start + TOKENS_AT_ONCE]
            for place, token, features in self._of_piece(piece):
                yield Mismatch(number, start + place, token, features)

    def _of_piece(self, piece: TokenIds) -> list[tuple[int, int, tuple[float, ...]]]:
        """Place, draft's token and features of each mismatch in a piece of an answer; both models move on behind it."""
        drafted = self._draft.rows(chain(piece[:-1]))
        others = [largest_id(row) for row in drafted]
        places = [place for place, (token, said) in enumerate(zip(others, piece, strict=True)) if token != said]
        leaves = [(place, others[place]) for place in places] if self._reads_hidden else []
        tree = _with_leaves(piece[:-1], leaves)
        rows = self._target.rows(tree)
        found = []
        for leaf, place in enumerate(places, start=len(piece) - 1):
            hidden = self._target.hidden(leaf) if self._reads_hidden else None
            seen = Rejected(others[place], rows[place], drafted[place], hidden)
            found.append((place, others[place], tuple(features_of(seen, self._features))))
        for reader, read in ((self._draft, chain(piece[:-1])), (self._target, tree)):
            reader.commit(read, piece)
        return found


def _with_leaves(token_ids: TokenIds, leaves: Sequence[tuple[int, int]]) -> CandidateTree:
    """A chain of tokens, then a leaf with another token at each of the places."""
    builder = TreeBuilder.reopened(chain(token_ids))
    for place, token in leaves:
        builder.add_fixed(place - 1 if place else ROOT, token, "draft")
    return builder.build()


class _Reader:
    """Reads answers with one model."""

    def __init__(self, model: TargetModel, num_tokens: int) -> None:
        self._model, self._slot, self._num_tokens = model, model.new_slot(), num_tokens

    def begin(self, prompt_ids: TokenIds) -> None:
        """Go behind a prompt."""
        self._model.prefill(self._slot, prompt_ids)

    @torch.inference_mode()
    def rows(self, tree: CandidateTree) -> Tensor:
        """The logits before the tree and after each of its nodes, `[num_nodes + 1, num_tokens]`."""
        return self._model.score([(self._slot, tree)])[0][:, : self._num_tokens]

    def hidden(self, node: int) -> Tensor:
        """The hidden state of a node of the tree just scored, `[hidden_size]`."""
        kept, row = self._model.runner.hidden, len(self._slot.token_ids) + 1 + node
        assert kept is not None
        return kept.of(self._slot.kv, row, row + 1)[0]

    def commit(self, tree: CandidateTree, piece: TokenIds) -> None:
        """Keep the first nodes of the tree just scored, which are all but the last token of the piece."""
        self._model.commit(self._slot, tree, range(len(piece) - 1), piece[-1])


# Training

WORK_FOLDER, LABELS_FOLDER = "training", "labels"
"""Folders inside the judge's folder: the first is renamed to the second at the end."""

DRAFTERS = ("prediction", "prompt", "draft-model")
"""What makes the reruns fast; greedy, they say what plain decoding says."""

OF_LEARNING = frozenset({"features", "strength", "held_out", "keep"})
"""Settings of a recipe that labels do not depend on."""


@dataclass(frozen=True, slots=True)
class JudgeRecipe:
    """How to train a judge.

    About `mismatches` are labelled, as many in each run. Learning reads the `features`, with weights held back by an L2
    penalty of 1 / `strength` (None: what cross-validation finds best). A share `held_out` of the tasks is kept for the
    report. The threshold leaves rejected a share `keep` of the mismatches that change the outcome. Raises ConfigError
    if a value is out of range.
    """

    features: tuple[str, ...] = OF_ROWS
    mismatches: int = 300
    strength: float | None = None
    held_out: float = 0.25
    keep: float = 0.9
    seed: int = 0

    def __post_init__(self) -> None:
        check_features(self.features)
        checks = (
            ("mismatches", self.mismatches >= 10, "must be at least 10"),
            ("strength", self.strength is None or self.strength > 0.0, "must be above 0"),
            ("held_out", 0.0 < self.held_out < 1.0, "must lie between 0 and 1"),
            ("keep", 0.0 < self.keep <= 1.0, "must be above 0 and at most 1"),
        )
        check_fields(self, checks)

    def per_run(self, num_runs: int) -> int:
        """The most mismatches to label in each of so many runs."""
        return -(-self.mismatches // num_runs)


@dataclass(frozen=True, slots=True)
class Labelled:
    """A mismatch, and whether the draft's token changed the outcome of its run."""

    mismatch: Mismatch
    changed: bool


@dataclass(frozen=True, slots=True)
class Piece:
    """The labels of one run: its task, how many tokens and mismatches it has, and the seconds that it took.

    A run that `failed` has no labels.
    """

    task: str
    failed: bool
    tokens: int
    mismatches: int
    seconds: float
    labels: tuple[Labelled, ...]

    def save(self, path: Path) -> None:
        """Write the piece atomically."""
        save_json(path, dataclasses.asdict(self))

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a piece. Raises ModelLoadError if the file is damaged."""
        try:
            found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            return cls(**{**found, "labels": tuple(_labelled(each) for each in found["labels"])})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ModelLoadError(f"{path} is damaged ({error}); delete it, and --resume labels it again") from error


def _labelled(found: dict[str, Any]) -> Labelled:
    mismatch = found["mismatch"]
    return Labelled(Mismatch(**{**mismatch, "features": tuple(mismatch["features"])}), bool(found["changed"]))


Progress = Callable[[str, int, int], None]
"""Called with the phase, the number done, and the total."""


@dataclass(frozen=True, slots=True)
class Agent:
    """How recorded runs run again.

    `outcome` runs one on a chat model, which `chat_model_of` makes on an engine; an answer has at most `max_tokens`.
    `cost` is the target's cost curve if it has been measured.
    """

    name: str
    outcome: Outcome
    chat_model_of: Callable[[Any], Any]
    max_tokens: int
    cost: CostCurve | None = None


@dataclass(frozen=True, slots=True)
class TrainedOn:
    """A judge, the examples that it learned from and those held out, and its cross-validation."""

    judge: TrainedJudge
    pieces: tuple[Piece, ...]
    learned: Examples
    held_out: Examples
    crossed: CrossValidated


class JudgeTraining:
    """One training of a judge for a target and a draft model in the folder `out`.

    With `labels`, the folder of an earlier training's, nothing is labelled. Raises ConfigError if `out` holds a
    different training, PromptError for a run that is not repeatable or runs of fewer than four tasks.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        draft: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        runs: Sequence[Trajectory],
        agent: Agent,
        recipe: JudgeRecipe,
        out: Path,
        *,
        labels: Path | None = None,
        announce: Callable[[str], None] = lambda line: None,
        progress: Progress = lambda *_: None,
    ) -> None:
        tasks = sorted({run.task for run in runs})
        if len(tasks) < 4:
            raise PromptError(f"runs of {len(tasks)} tasks are too few: give those of at least four")
        self._target, self._draft, self._tokenizer = target, draft, tokenizer
        self._runs, self._agent, self._recipe = runs, agent, recipe
        self._work, self._out, self._tasks = out / WORK_FOLDER, out, tasks
        self._labels, self._announce, self._progress = labels, announce, progress
        self._labelled: Sequence[str] = recipe.features  # the features that the labels have

    def run(self) -> TrainedOn:
        """Label what is not labelled yet, learn, and save the judge."""
        self._begin()
        trained = self._learned(tuple(self._pieces()))
        trained.judge.save(self._out)
        self._work.replace(self._out / LABELS_FOLDER)
        return trained

    def _begin(self) -> None:
        runs = json.dumps([[run.task, run.messages, run.tools] for run in self._runs], sort_keys=True)
        asked = {
            "kind": "judge", "target": embeddings_fingerprint(self._target) + layers_fingerprint(self._target),
            "draft": layers_fingerprint(self._draft), "runs": hashlib.sha256(runs.encode()).hexdigest()[:32],
            "outcome": self._agent.name, "max_tokens": self._agent.max_tokens, **dataclasses.asdict(self._recipe),
        }  # fmt: skip
        found = read_plan(self._work)
        if found is not None:
            check_same(found["asked"], asked)
            self._labelled = found["plan"]["features"]
            return
        if self._labels is not None:
            self._adopt(self._labels, asked)
        save_json(self._work / PLAN_FILE, {"asked": asked, "plan": {"features": self._labelled}})

    # Labels

    def _adopt(self, labels: Path, asked: Mapping[str, Any]) -> None:
        """Take over an earlier training's labels."""
        found = read_plan(labels)
        if found is None:
            raise ConfigError(f"there are no labels in {labels}: give the folder {LABELS_FOLDER} of an earlier judge")
        anew = "leave --labels out to label anew"
        check_same(found["asked"], {name: value for name, value in asked.items() if name not in OF_LEARNING}, anew)
        self._labelled = found["plan"]["features"]
        lacking = [name for name in self._recipe.features if name not in self._labelled]
        if lacking:
            raise ConfigError(f"the labels lack the features {', '.join(lacking)}: {anew}")
        for path in self._paths:
            Piece.load(labels / path.name).save(path)

    @property
    def _paths(self) -> list[Path]:
        return [self._work / f"run-{number:05}.json" for number in range(len(self._runs))]

    def _pieces(self) -> Iterator[Piece]:
        """The labels of all runs, in order."""
        paths = self._paths
        missing = [number for number, path in enumerate(paths) if not path.is_file()]
        if missing:
            with closing(_Labeller(self._target, self._draft, self._tokenizer, self._agent, self._recipe)) as labeller:
                self._label(missing, paths, labeller)
        for path in paths:
            yield Piece.load(path)

    def _label(self, missing: Sequence[int], paths: Sequence[Path], labeller: _Labeller) -> None:
        per_run, said = self._recipe.per_run(len(self._runs)), False
        for done, number in enumerate(missing):
            self._progress("labelling runs", len(paths) - len(missing) + done, len(paths))
            piece = labeller.piece(self._runs[number], number, per_run)
            piece.save(paths[number])
            if piece.labels and not said:
                said, left = True, len(missing) - done - 1
                self._announce(
                    f"a run took {piece.seconds:.0f} s for {len(piece.labels)} labels; at this rate the {left} others "
                    f"take about {piece.seconds * left / 60:.0f} minutes, and a kill costs one run (--resume)"
                )

    # Learning

    def _learned(self, pieces: tuple[Piece, ...]) -> TrainedOn:
        examples = _examples(pieces, self._tasks)
        widths = widths_of(self._labelled, examples.features.shape[1])
        ends = dict(zip(self._labelled, np.cumsum(widths).tolist(), strict=True))
        width = dict(zip(self._labelled, widths, strict=True))
        columns = [range(ends[name] - width[name], ends[name]) for name in self._recipe.features]
        examples = examples.columns([column for some in columns for column in some])
        order = np.random.default_rng(self._recipe.seed).permutation(len(self._tasks))
        kept_out = order[: max(1, round(self._recipe.held_out * len(order)))]
        held_out = np.isin(examples.tasks, kept_out)
        learned = examples.where(~held_out)
        learned.check()
        crossed = cross_validated(learned, self._recipe.strength)
        fitted = fit(learned, crossed.strength)
        never = TrainedJudge(
            self._recipe.features, *folded(fitted), 0.0,
            name_of(self._target), name_of(self._draft), self._agent.name,
        )  # fmt: skip
        judge = never.at(threshold_of(_for_threshold(never, crossed, learned), learned.labels, self._recipe.keep))
        return TrainedOn(judge, pieces, learned, examples.where(held_out), crossed)


class _Labeller:
    """Serves runs and labels their mismatches, on an engine of its own."""

    def __init__(
        self,
        target: PreTrainedModel,
        draft: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        agent: Agent,
        recipe: JudgeRecipe,
    ) -> None:
        speculation = SpeculationConfig(drafters=DRAFTERS, write_back=False)
        reading = TargetModel(target)
        if HIDDEN in recipe.features:
            reading.keep_hidden_states()
        options = EngineOptions(draft_model=draft, speculation=speculation)
        self._engine = Engine(reading, tokenizer, options, name=name_of(target), cost=agent.cost)
        self._reruns, self._agent, self._seed = RerunEngine(self._engine), agent, recipe.seed
        self._chat_model = agent.chat_model_of(self._reruns)
        num_tokens = min(len(tokenizer), reading.vocab_size)
        drafting = target_of(draft)
        assert isinstance(drafting, TargetModel), "draft models are loaded by transformers"
        self._finder = MismatchFinder(reading, drafting, num_tokens, recipe.features)

    def piece(self, run: Trajectory, number: int, most: int) -> Piece:
        """Serve a run, and label at most so many of its mismatches, chosen by the seed."""
        started = perf_counter()
        with self._reruns.recording() as turns:
            expected = self._outcome(run)
        self._check_repeatable(run, turns, expected)
        found = [] if expected is None else self._finder.of_run(turns)
        order = np.random.default_rng([self._seed, number]).permutation(len(found))
        chosen = [found[place] for place in sorted(order[:most].tolist())]
        labels = tuple(Labelled(each, self._changes(run, turns, each, expected)) for each in chosen)
        tokens = sum(len(turn.answer_ids) for turn in turns)
        return Piece(run.task, expected is None, tokens, len(found), perf_counter() - started, labels)

    def _check_repeatable(self, run: Trajectory, turns: Sequence[Turn], expected: object) -> None:
        """Raise PromptError if the same answers lead to another outcome; no token is decoded."""
        with self._reruns.repeating(turns):
            found = self._outcome(run)
        if found != expected:
            raise PromptError(
                f"run {run.task} is not repeatable: the same answers led to another outcome; let each run begin with "
                "tools in the same state"
            )

    def _changes(self, run: Trajectory, turns: Sequence[Turn], mismatch: Mismatch, expected: object) -> bool:
        """Whether the run comes to another outcome with the draft's token."""
        with self._reruns.repeating(turns, mismatch.replaced(turns)):
            return bool(self._outcome(run) != expected)

    def _outcome(self, run: Trajectory) -> object:
        return self._agent.outcome(run, self._chat_model)

    def close(self) -> None:
        """Stop the engine."""
        self._engine.close()


def _for_threshold(judge: TrainedJudge, crossed: CrossValidated, learned: Examples) -> Numbers:
    """The probabilities that the threshold is set on: of fits that had not seen the task.

    With one number for a feature they are the judge's own. All that a fit could learn then is which side is which, and
    the intercepts of different fits would matter more than the number.
    """
    if len(judge.weights) > 1:
        return crossed.probabilities
    return np.array([judge.probability(values) for values in learned.features.tolist()])


def _examples(pieces: Sequence[Piece], tasks: Sequence[str]) -> Examples:
    labels = [(each, tasks.index(piece.task)) for piece in pieces for each in piece.labels]
    if not labels:
        raise PromptError(
            f"there is nothing to judge: of {len(pieces)} runs {sum(piece.failed for piece in pieces)} fail without a "
            "draft (outcome None), and in the others the draft says what the target says"
        )
    return Examples(
        np.array([each.mismatch.features for each, _ in labels], dtype=np.float64),
        np.array([each.changed for each, _ in labels], dtype=np.int64),
        np.array([task for _, task in labels], dtype=np.int64),
    )


def report_of(trained: TrainedOn, recipe: JudgeRecipe) -> dict[str, Any]:
    """The report, ready for JSON. An outcome is `changed` or not; `area` says how well the judge tells which."""
    judge, pieces, held_out = trained.judge, trained.pieces, trained.held_out
    unseen = np.array([judge.probability(values) for values in held_out.features.tolist()])
    overruled, changed = unseen < judge.threshold, held_out.labels == 1
    return {
        "target": judge.target, "draft": judge.draft, "outcome": judge.outcome,
        "runs": len(pieces),
        "failed_runs": sum(piece.failed for piece in pieces),
        "tokens": sum(piece.tokens for piece in pieces),
        "mismatches": sum(piece.mismatches for piece in pieces),
        "labelling_seconds": round(sum(piece.seconds for piece in pieces), 1),
        "learned": _counts(trained.learned),
        "held_out": _counts(held_out) | {
            "overruled_unchanged": [int((overruled & ~changed).sum()), int((~changed).sum())],
            "overruled_changed": [int((overruled & changed).sum()), int(changed.sum())],
        },
        "threshold": judge.threshold,
        "strength": trained.crossed.strength,
        "area": area_under_curve(unseen, held_out.labels),
        "interval": list(interval_of_area(unseen, held_out, recipe.seed)),
        "cross_validated": trained.crossed.area,
        "recipe": dataclasses.asdict(recipe),
    }  # fmt: skip


def _counts(examples: Examples) -> dict[str, int]:
    return {
        "tasks": len(set(examples.tasks.tolist())),
        "labels": len(examples.labels),
        "changed": int(examples.labels.sum()),
    }
