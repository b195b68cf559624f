"""A learned judge (AutoJudge 2504.20039) may accept a token that verification rejected: `lossy_judge:name=...`.

Verification itself stays lossless. When it ends with a recovered token, the judge scores each rejected child in
verification order; if it accepts one, verification continues below it. With the same random numbers, the text differs
from the lossless one only after an overruled rejection, so the expected number of overruled rejections bounds the total
variation.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Self
from weakref import WeakSet

import torch
from torch import Tensor

from precedent.errors import ConfigError
from precedent.runtime.plugins import installed, load_plugin
from precedent.sampling.rng import Rng
from precedent.sampling.target_rows import TargetRows
from precedent.target import Target
from precedent.tree import NULL, ROOT, CandidateTree, Sampled
from precedent.verify import Decide, RowWeights, Verdict, Verifier, walk
from precedent_drafts.fingerprints import name_of
from precedent_drafts.trained import read_as, save_json
from precedent_research.lossy import mode_text, number

log = logging.getLogger(__name__)

MODE = "lossy_judge"

GROUP = "precedent.judges"

OVERRULE = "verify-overrule"

Judge = Callable[[CandidateTree, TargetRows, int], float]
"""`(tree, rows, node) -> probability` in [0, 1] of accepting a rejected node; depends only on its arguments.

`rows.probs(n)` and `rows.logits(n)` are the target's probabilities and logits after any scored node n of the tree. The
row that rejected the token is that of `tree.parents[node]`. `draft_logits_of(tree, node)` is the draft model's row at
that place. A judge with the attribute `reads_hidden_states` may also call `rows.hidden(n)`, the target's hidden state
of a scored node; an engine keeps them if its own speculation names the judge.
"""


def overruled_by(judge: Judge) -> Verifier:
    """Verify with eager tests and ask `judge` at every rejection; each overruled rejection spends 1."""

    def prepare(tree: CandidateTree, rows: TargetRows) -> Decide:
        weights = RowWeights(tree, rows.probs, lazy=False)

        def decide(rng: Rng) -> Verdict:
            verdict, overruled = walk(weights, rng), 0
            while (node := _accepted_after_all(tree, rows, verdict, judge, rng)) is not None:
                verdict, overruled = walk(weights, rng, node), overruled + 1
            return replace(verdict, spent_tv=float(overruled))

        return decide

    check = partial(_check_target, judge)
    reads = bool(getattr(judge, "reads_hidden_states", False))
    return Verifier(prepare, lossy=True, keeps_draft_logits=True, reads_hidden_states=reads, check_target=check)


def _accepted_after_all(tree: CandidateTree, rows: TargetRows, verdict: Verdict, judge: Judge, rng: Rng) -> int | None:
    """The first rejected child at the end of `verdict` that the judge accepts, or None."""
    end = verdict.path[-1] if verdict.path else ROOT
    children = dict.fromkeys(each.child for each in tree.candidates_at.get(end, ()) if each.child != NULL)
    for child in children:
        probability = judge(tree, rows, child)
        if tree.token_ids[child] != verdict.next_token and rng.bernoulli(probability, child, OVERRULE):
            return child
    return None


def load_judge(name: str) -> Judge:
    """Load the judge installed under `name` (entry-point group `precedent.judges`, a factory without arguments).

    Raises ConfigError for a name that no installed package provides.
    """
    factory: Callable[[], Judge] | None = load_plugin(GROUP, name)
    if factory is None:
        raise ConfigError(f"no judge is called {name!r} (installed: {', '.join(installed(GROUP)) or 'none'})")
    return factory()


def judge_mode(parameters: Mapping[str, str]) -> Verifier:
    """Return the verifier of `lossy_judge:name=mine,threshold=0.5`, for the entry-point group `precedent.modes`."""
    mode = mode_text(MODE, parameters)
    if not {"name"} <= parameters.keys() <= {"name", "threshold"}:
        raise ConfigError(f"mode={mode!r}: name an installed judge, as in {MODE}:name=my-judge")
    judge = load_judge(parameters["name"])
    if "threshold" in parameters:
        if not isinstance(judge, TrainedJudge):
            raise ConfigError(f"mode={mode!r}: only a judge of `precedent train-judge` has a threshold; leave it out")
        judge = judge.at(number(mode, parameters, "threshold"))
    return overruled_by(judge)


_WARNED: WeakSet[Target] = WeakSet()


def _check_target(judge: Judge, target: Target) -> None:
    """Warn once if the judge was trained for another target. Raises ConfigError for another hidden size."""
    wanted = getattr(judge, "hidden_size", None)
    if wanted is not None and wanted != (found := target.config.get_text_config().hidden_size):
        raise ConfigError(
            f"this judge was trained on hidden states of {wanted} numbers, and this target's have {found}: train one "
            "for it (precedent train-judge)"
        )
    trained_for, name = getattr(judge, "target", ""), name_of(target.model or target)
    if trained_for and trained_for != name and target not in _WARNED:
        _WARNED.add(target)
        log.warning("the judge of this mode was trained for %s, and this target is %s", trained_for, name)


# What a trained judge knows of a rejected token

LEAST = -30.0
"""The least log-probability that counts: rows hold -inf where a constraint, or a restricted head, excludes a token."""


@dataclass(frozen=True, slots=False, eq=False)
class Rejected:
    """A rejected token and the rows in which it stood: the target's and the draft's logits, each `[vocab_size]`.

    They are those under the request's constraints, before temperature. `hidden` `[hidden_size]` is the target's hidden
    state of the token itself.
    """

    token: int
    target_logits: Tensor
    draft_logits: Tensor
    hidden: Tensor | None = None

    @cached_property
    def target_log_probs(self) -> Tensor:
        """`[vocab_size]`, at temperature 1."""
        return self.target_logits.float().log_softmax(-1).clamp(min=LEAST)

    @cached_property
    def draft_log_probs(self) -> Tensor:
        """`[vocab_size]`, at temperature 1."""
        return self.draft_logits.float().log_softmax(-1).clamp(min=LEAST)


def _entropy(log_probs: Tensor) -> Tensor:
    return -(log_probs.exp() * log_probs).sum()


def _divergence(of: Tensor, other: Tensor) -> Tensor:
    """The Kullback-Leibler divergence in nats between two rows of log-probabilities."""
    return (of.exp() * (of - other)).sum()


def _hidden(seen: Rejected) -> Tensor:
    assert seen.hidden is not None, "a judge that reads hidden states was given none"
    return seen.hidden


HIDDEN = "hidden"

FEATURES: Mapping[str, Callable[[Rejected], Tensor]] = {
    "log_prob": lambda seen: seen.target_log_probs[seen.token],
    "margin": lambda seen: seen.target_log_probs.max() - seen.target_log_probs[seen.token],
    "rank": lambda seen: (seen.target_log_probs > seen.target_log_probs[seen.token]).sum().log1p(),
    "entropy": lambda seen: _entropy(seen.target_log_probs),
    "draft_log_prob": lambda seen: seen.draft_log_probs[seen.token],
    "draft_entropy": lambda seen: _entropy(seen.draft_log_probs),
    "divergence": lambda seen: _divergence(seen.target_log_probs, seen.draft_log_probs),
    HIDDEN: _hidden,
}
"""Feature to its value: of the target's row the token's log-probability, how far it lies below the likeliest, the
logarithm of one plus how many are likelier, the entropy; of the draft's row the first and the last; and KL(target ||
draft), all in nats. `hidden` is as many numbers as the target's hidden state has."""

OF_ROWS = tuple(name for name in FEATURES if name != HIDDEN)
"""The features that rows alone give."""


def check_features(names: Sequence[str]) -> tuple[str, ...]:
    """The names as they are. Raises ConfigError if there are none, or if one is unknown or named twice."""
    unknown = [name for name in names if name not in FEATURES]
    if unknown or not names or len(set(names)) != len(names):
        raise ConfigError(f"features={','.join(names)} must be distinct names of {', '.join(FEATURES)}")
    return tuple(names)


def features_of(rejected: Rejected, names: Sequence[str]) -> list[float]:
    """The numbers of these features, in order, read from the device at once."""
    values: list[float] = torch.cat([FEATURES[name](rejected).float().reshape(-1) for name in names]).tolist()
    return values


def widths_of(names: Sequence[str], num_values: int) -> list[int]:
    """How many of `num_values` numbers each feature has. Raises ConfigError if there are fewer than features."""
    rest = num_values - len(names)
    if rest < 0 or (rest and HIDDEN not in names):
        raise ConfigError(f"{num_values} numbers cannot be the features {', '.join(names)}")
    return [1 + rest if name == HIDDEN else 1 for name in names]


# The trained judge

JUDGE_FILE = "judge.json"

FORMAT = 1
"""Increase it whenever an older version of this file could not read the judge."""


@dataclass(frozen=True, slots=True)
class TrainedJudge:
    """Overrules a rejection if the probability that the token changes the outcome lies below `threshold`.

    That probability is the logistic function of `intercept + weights . features`, with as many weights for a feature as
    it has numbers. Only tokens that carry the draft model's logits are judged; all others (from a cache, a prompt, a
    block draft) stay rejected. Raises ConfigError for weights that do not fit the features, unknown features, or a
    threshold outside [0, 1].
    """

    features: tuple[str, ...]
    weights: tuple[float, ...]
    intercept: float
    threshold: float
    target: str = ""
    draft: str = ""
    outcome: str = ""
    format: int = FORMAT

    def __post_init__(self) -> None:
        check_features(self.features)
        widths_of(self.features, len(self.weights))
        if not all(map(math.isfinite, (*self.weights, self.intercept))):
            raise ConfigError("a judge's numbers must be finite")
        if not 0.0 <= self.threshold <= 1.0:
            raise ConfigError(f"threshold={self.threshold} must lie between 0 (never overrule) and 1")

    @property
    def reads_hidden_states(self) -> bool:
        """Whether the target has to keep hidden states for this judge."""
        return HIDDEN in self.features

    @property
    def hidden_size(self) -> int | None:
        """The size of the hidden states that the judge reads; None if it reads none."""
        widths = dict(zip(self.features, widths_of(self.features, len(self.weights)), strict=True))
        return widths.get(HIDDEN)

    def __call__(self, tree: CandidateTree, rows: TargetRows, node: int) -> float:
        """1 if the rejection of `node` is overruled, else 0."""
        draft_logits = draft_logits_of(tree, node)
        if draft_logits is None:
            return 0.0
        hidden = rows.hidden(node) if self.reads_hidden_states else None
        rejected = Rejected(tree.token_ids[node], rows.logits(tree.parents[node]), draft_logits, hidden)
        return float(self.probability(features_of(rejected, self.features)) < self.threshold)

    def probability(self, values: Sequence[float]) -> float:
        """The probability that a token with these features changes the outcome."""
        score = self.intercept + sum(value * weight for value, weight in zip(values, self.weights, strict=True))
        return 1.0 / (1.0 + math.exp(-min(max(score, -500.0), 500.0)))

    def at(self, threshold: float) -> Self:
        """The same judge with another threshold."""
        return dataclasses.replace(self, threshold=threshold)

    def save(self, folder: Path) -> None:
        """Write the judge into a folder."""
        save_json(folder / JUDGE_FILE, dataclasses.asdict(self))

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read a judge from its folder. Raises ModelLoadError if there is none, or if it cannot be read."""
        return read_as(cls, folder / JUDGE_FILE, format=FORMAT)


def draft_logits_of(tree: CandidateTree, node: int) -> Tensor | None:
    """The draft model's logits behind the first sample of `node`, None if nobody kept any."""
    for each in tree.candidates_at[tree.parents[node]]:
        if each.child == node and isinstance(each.distribution, Sampled) and each.distribution.logits is not None:
            return each.distribution.logits
    return None
