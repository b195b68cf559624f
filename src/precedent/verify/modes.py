"""Names of verification modes, with their parameters: `traversal`, `lossy_mentored:kl=0.05`, ..."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from precedent.errors import ConfigError
from precedent.plain_values import nearest
from precedent.sampling import Coins
from precedent.tree import ROOT, CandidateTree
from precedent.verify.batched import BatchedWeights
from precedent.verify.judge import judged, load_judge
from precedent.verify.kseq import KSeqWeights
from precedent.verify.matching import matching
from precedent.verify.recursion import Weights
from precedent.verify.relaxed import relaxed
from precedent.verify.rules import Mentored, TopBeta, Typical
from precedent.verify.transport import TransportWeights
from precedent.verify.verdict import Verdict
from precedent.verify.walk import walk


class Rows(Protocol):
    """The target model's rows over one tree (`precedent.target_rows.TargetRows`)."""

    def __call__(self, node: int, /) -> Tensor:
        """Target probabilities after `node` (`ROOT` for the first position), `[vocab_size]`."""

    def logits(self, node: int, /) -> Tensor:
        """Constrained logits after `node` before temperature and truncation, `[vocab_size]`."""

    def argmax(self, node: int, /) -> int:
        """The greedy token after `node`, the lowest id on ties."""

    def coupled(self, node: int, /) -> int:
        """The token that the seed's noise chooses after `node`."""


@runtime_checkable
class RowsAtOnce(Protocol):
    """Rows that come as one matrix (`precedent.target_rows.TargetRows`)."""

    def matrix(self) -> Tensor:
        """All probabilities, `[num_nodes + 1, vocab_size]`, row 0 for the root; not yet checked."""

    def check(self, node: int, /) -> None:
        """Raise GenerationError if the row after `node` cannot be sampled."""


SecondHalf = Callable[[Coins], Verdict]
FirstHalf = Callable[[CandidateTree, Rows], SecondHalf]


def traversal(tree: CandidateTree, rows: Rows) -> SecondHalf:
    """Lazy coins: block verification on a chain, traversal verification on a tree."""
    weights = Weights(tree, rows, lazy=True)
    return lambda coins: walk(weights, coins)


def topdown(tree: CandidateTree, rows: Rows) -> SecondHalf:
    """Eager coins: token verification on a chain, recursive rejection on a tree."""
    weights = Weights(tree, rows, lazy=False)
    return lambda coins: walk(weights, coins)


def k_seq(tree: CandidateTree, rows: Rows) -> SecondHalf:
    """Eager coins, and the K-SEQ plan where several draws at a node share one law."""
    weights = KSeqWeights(tree, rows)
    return lambda coins: walk(weights, coins)


def _transport(lazy: bool) -> FirstHalf:
    def first_half(tree: CandidateTree, rows: Rows) -> SecondHalf:
        weights = TransportWeights(tree, rows, lazy=lazy)
        return lambda coins: walk(weights, coins)

    return first_half


def _batched(lazy: bool) -> FirstHalf:
    def first_half(tree: CandidateTree, rows: Rows) -> SecondHalf:
        if isinstance(rows, RowsAtOnce):
            weights = BatchedWeights(tree, rows.matrix(), lazy=lazy, check=rows.check)
        else:
            weights = BatchedWeights(tree, torch.stack([rows(node) for node in range(ROOT, len(tree))]), lazy=lazy)
        return lambda coins: walk(weights, coins)

    return first_half


MODES: Mapping[str, FirstHalf] = {
    "greedy": lambda tree, rows: matching(tree, rows.argmax),
    "coupled": lambda tree, rows: matching(tree, rows.coupled),
    "traversal": traversal,
    "topdown": topdown,
    "topdown:plan=k-seq": k_seq,
    "topdown:plan=transport": _transport(lazy=False),
    "traversal:plan=transport": _transport(lazy=True),
}
"""Name of a lossless mode to its first half, which throws no coins."""

BATCHED: Mapping[str, FirstHalf] = {"traversal": _batched(True), "topdown": _batched(False)}
"""The same laws, weighed for the whole tree at once: for rows that lie on a GPU."""

RULES: Mapping[str, type[Mentored] | type[Typical] | type[TopBeta]] = {
    "lossy_mentored": Mentored,
    "lossy_typical": Typical,
    "lossy_top_beta": TopBeta,
}
"""Name of a lossy mode to its rule, whose fields are the mode's parameters."""

JUDGE = "lossy_judge"

LOSSY_MODES = (*RULES, JUDGE)
"""Modes that may leave the target's law; none is used unless its name is given."""


def find_mode(mode: str, *, batched: bool = False) -> FirstHalf:
    """The first half of `mode`, as in `lossy_top_beta:beta=3,tau=1`. Raises ConfigError for what it does not know."""
    name, _, text = mode.partition(":")
    if name in LOSSY_MODES:
        settings = _settings(mode, text)
        if name == JUDGE:
            return judged(load_judge(_judge_name(mode, settings)))
        return relaxed(_rule(mode, name, settings))
    if mode not in MODES:
        near = nearest(name, [*MODES, *LOSSY_MODES])
        hint = f"did you mean {near!r}? " if near else ""
        raise ConfigError(f"mode={mode!r} cannot verify; {hint}use one of {', '.join([*MODES, *LOSSY_MODES])}")
    return BATCHED.get(mode, MODES[mode]) if batched else MODES[mode]


def _settings(mode: str, text: str) -> dict[str, str]:
    pairs = [part.partition("=") for part in text.split(",") if part]
    if any(not key.strip() or not value.strip() for key, _, value in pairs):
        raise ConfigError(f"mode={mode!r}: write parameters as name=value, separated by commas")
    return {key.strip(): value.strip() for key, _, value in pairs}


def _rule(mode: str, name: str, settings: Mapping[str, str]) -> Mentored | Typical | TopBeta:
    known = [field.name for field in dataclasses.fields(RULES[name])]
    values: dict[str, Any] = {}
    for key, value in settings.items():
        if key not in known:
            raise ConfigError(f"mode={mode!r}: {name} has no parameter {key!r}; known: {', '.join(known)}")
        try:
            values[key] = float(value)
        except ValueError as error:
            raise ConfigError(f"mode={mode!r}: {key}={value} is not a number") from error
    return RULES[name](**values)


def _judge_name(mode: str, settings: Mapping[str, str]) -> str:
    if settings.keys() != {"name"}:
        raise ConfigError(f"mode={mode!r}: name an installed judge, as in {JUDGE}:name=my-judge")
    return settings["name"]
