"""Verification: which proposed tokens are accepted, so that the output distribution stays the target model's.

    verdict = verify(tree, rows, "traversal", rng)

Verification has two halves: `prepare(tree, rows, mode)` uses no random numbers; calling its result with `rng` decides.

* `traversal` (lazy tests; block verification on a chain) and `topdown` (eager tests; token verification on a chain):
  `recursion` for a CPU, `ahead` for a GPU, one `walk`;
* `greedy` (exact match with the argmax) and `coupled` (exact match with the token that the seed's noise chooses):
  `exact_match`.

Imports neither transformers nor a drafter. Lossy modes live in `precedent.verify.lossy`, which nothing here imports.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from precedent.errors import ConfigError
from precedent.sampling.rng import Rng
from precedent.sampling.target_rows import TargetRows
from precedent.tree import CandidateTree
from precedent.verify.exact_match import exact_match
from precedent.verify.recursion import RowWeights
from precedent.verify.verdict import Verdict
from precedent.verify.walk import walk

__all__ = ["LOSSLESS", "Decide", "RowWeights", "Verdict", "Verifier", "prepare", "verify", "walk"]

Decide = Callable[[Rng], Verdict]
Verifier = Callable[[CandidateTree, TargetRows], Decide]


def _rejection(*, lazy: bool) -> Verifier:
    def prepare(tree: CandidateTree, rows: TargetRows) -> Decide:
        weights = RowWeights(tree, rows.probs, lazy=lazy)
        return lambda rng: walk(weights, rng)

    return prepare


LOSSLESS: Mapping[str, Verifier] = {
    "greedy": lambda tree, rows: lambda rng: exact_match(tree, rows.argmax),
    "coupled": lambda tree, rows: lambda rng: exact_match(tree, rows.coupled),
    "traversal": _rejection(lazy=True),
    "topdown": _rejection(lazy=False),
}
"""The verifier of every lossless mode of `precedent.config.MODES`."""


def prepare(tree: CandidateTree, rows: TargetRows, mode: str) -> Decide:
    """Run the half of `verify` that uses no random numbers. Raises ConfigError for a mode that is not lossless."""
    if mode not in LOSSLESS:
        raise ConfigError(f"mode={mode!r} is not a lossless mode; use one of {', '.join(LOSSLESS)}")
    return LOSSLESS[mode](tree, rows)


def verify(tree: CandidateTree, rows: TargetRows, mode: str, rng: Rng) -> Verdict:
    """Accept the longest path of `tree` that passes, and add one token.

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
