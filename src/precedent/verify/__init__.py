"""Verification: which proposed tokens are accepted, so that the output distribution stays the target model's.

    verdict = verify(tree, rows, "traversal", rng)

Verification has two halves: a `Verifier` called with a tree and its rows uses no random numbers; calling the result
with `rng` decides.

* `traversal` (lazy tests; block verification on a chain) and `topdown` (eager tests; token verification on a chain):
  one `recursion`, one `walk`;
* `greedy` (exact match with the argmax) and `coupled` (exact match with the token that the seed's noise chooses):
  `exact_match`.

A *row* (`TargetRows`) is the target's distribution of the token after a node, with the request's grammar, penalties,
temperature and truncation in it already; `ROOT` is the row after the committed text. Mode `auto` is greedy at
temperature 0, coupled with a seed, traversal otherwise. A *fixed* candidate comes from text: probability 1. A *sampled*
one carries the distribution it was drawn from, at the draft model's row without the siblings drawn before it, which
sums to 1; where a `keep_mask` drops tokens the kept ones keep their probability and the rest is that of proposing
nothing (`NULL`). Candidates below a node are tested in *verification order*: samples as they were drawn, then fixed
ones. Drawing and verifying use the same step's `Rng`, whose numbers depend on (node, purpose): no test reads a number
that chose a candidate.

Imports neither transformers nor a drafter. Installed packages add modes under the entry-point group `precedent.modes`:
a name, and a function of the mode's parameters that returns its `Verifier`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from precedent.config import mode_factory
from precedent.errors import ConfigError
from precedent.sampling.rng import Rng
from precedent.sampling.target_rows import TargetRows
from precedent.tree import CandidateTree
from precedent.verify.exact_match import exact_match
from precedent.verify.recursion import RowWeights
from precedent.verify.verdict import Verdict
from precedent.verify.walk import walk

__all__ = [
    "LOSSLESS",
    "Decide",
    "Pending",
    "RowWeights",
    "Verdict",
    "Verifier",
    "prepare",
    "verifier_of",
    "verify",
    "walk",
]

Decide = Callable[[Rng], Verdict]
Prepare = Callable[[CandidateTree, TargetRows], Decide]


def _suits_any(target: object) -> None:
    """Refuse no target."""


@dataclass(frozen=True, slots=True)
class Verifier:
    """How a mode verifies: `prepare(tree, rows)` uses no random numbers, and its result decides with them.

    A `lossy` mode changes the output distribution, and its verdicts report what they spent. One that
    `keeps_draft_logits` finds them in `Sampled.logits`; one that `reads_hidden_states` may call `TargetRows.hidden`.
    `check_target` raises ConfigError for a `TargetModel` that the mode does not suit.
    """

    prepare: Prepare
    lossy: bool = False
    keeps_draft_logits: bool = False
    reads_hidden_states: bool = False
    check_target: Callable[[Any], None] = _suits_any

    def __call__(self, tree: CandidateTree, rows: TargetRows) -> Decide:
        """Run the half that uses no random numbers."""
        return self.prepare(tree, rows)


def _rejection(*, lazy: bool) -> Prepare:
    def prepare(tree: CandidateTree, rows: TargetRows) -> Decide:
        weights = RowWeights(tree, rows.probs, lazy=lazy)
        return lambda rng: walk(weights, rng)

    return prepare


LOSSLESS: Mapping[str, Verifier] = {
    "greedy": Verifier(lambda tree, rows: lambda rng: exact_match(tree, rows.argmax)),
    "coupled": Verifier(lambda tree, rows: lambda rng: exact_match(tree, rows.coupled)),
    "traversal": Verifier(_rejection(lazy=True)),
    "topdown": Verifier(_rejection(lazy=False)),
}
"""The verifier of every lossless mode of `precedent.config.MODES`."""


def verifier_of(mode: str) -> Verifier:
    """Return the verifier of a mode, such as `traversal` or `lossy_top_beta:beta=3,tau=1`.

    Raises ConfigError for a mode that no installed package provides, and for a wrong parameter.
    """
    return LOSSLESS[mode] if mode in LOSSLESS else _installed_verifier(mode)


@lru_cache(maxsize=64)  # so that a judge is not read in every step
def _installed_verifier(mode: str) -> Verifier:
    pairs = [part.partition("=") for part in mode.partition(":")[2].split(",") if part]
    if any(not key.strip() or not value.strip() for key, _, value in pairs):
        raise ConfigError(f"mode={mode!r}: write parameters as name=value, separated by commas")
    verifier: Verifier = mode_factory(mode)({key.strip(): value.strip() for key, _, value in pairs})
    return verifier


@dataclass(slots=True, eq=False)
class Pending:
    """A scored tree that waits for its verdict in a step.

    `ahead` returns the verdict where a package found it together with others' (`ModelSupport.verify_ahead`).
    """

    rows: TargetRows
    rng: Rng
    mode: str
    ahead: Callable[[], Verdict] | None = None

    def verdict(self) -> Verdict:
        """Decide. Raises GenerationError for a visited row that cannot be sampled from."""
        if self.ahead is not None:
            return self.ahead()
        return verifier_of(self.mode)(self.rows.tree, self.rows)(self.rng)


def prepare(tree: CandidateTree, rows: TargetRows, mode: str) -> Decide:
    """Run the half of `verify` that uses no random numbers. Raises ConfigError for a mode that is not lossless."""
    if mode not in LOSSLESS:
        raise ConfigError(f"mode={mode!r} is not a lossless mode; use one of {', '.join(LOSSLESS)}")
    return LOSSLESS[mode](tree, rows)


def verify(tree: CandidateTree, rows: TargetRows, mode: str, rng: Rng) -> Verdict:
    """Accept a path of `tree`, and add the target's own token after it.

    The output has the same distribution as sampling from `rows`. A pure function: it uses no model and no settings, and
    changes none of its arguments. Raises ConfigError for a mode that is not lossless.

    >>> import torch
    >>> from precedent.config import SamplingParams
    >>> from precedent.sampling.rng import CounterRng
    >>> from precedent.tree import ROOT, TreeBuilder
    >>> builder = TreeBuilder()
    >>> node = builder.add_fixed(ROOT, 2, "recall")
    >>> tree = builder.build()
    >>> rows = TargetRows(torch.tensor([[0.0, 0.0, 9.0], [9.0, 0.0, 0.0]]), tree, SamplingParams(), ())
    >>> verdict = verify(tree, rows, "greedy", CounterRng(0, 0))
    >>> verdict.path, verdict.next_token, verdict.kind
    ((0,), 0, 'bonus')
    """
    return prepare(tree, rows, mode)(rng)
