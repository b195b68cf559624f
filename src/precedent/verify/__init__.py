"""Verification: which proposed tokens the target model's law lets stand, and which token it adds.

    verdict = verify(tree, rows, "traversal", coins)

Every mode has two halves: `prepare(tree, rows, mode)` throws no coins, its result called with coins decides.

* `traversal` (lazy coins; block verification on a chain) and `topdown` (eager coins; token verification on a chain):
  `precedent.verify.recursion`, and `precedent.verify.batched` for rows on a GPU;
* `topdown:plan=k-seq`, `topdown:plan=transport` and `traversal:plan=transport` weigh several draws at a node together:
  `precedent.verify.kseq`, `precedent.verify.transport`; they need a number of draws that no draw has a say in;
* `greedy` (exact match with the argmax) and `coupled` (exact match with the token that the seed's noise chooses):
  `precedent.verify.matching`;
* `lossy_mentored:kl=0.05`, `lossy_typical:epsilon=0.09,delta=0.3`, `lossy_top_beta:beta=3,tau=1`:
  `lossy.relaxed`, and `lossy_judge:name=...`: `lossy.judge`. Their verdicts say what they spent.
"""

from __future__ import annotations

from collections.abc import Callable

from precedent.sampling.probabilities import Coins
from precedent.tree import CandidateTree
from precedent.verify.lossy.judge import Judge, judged
from precedent.verify.lossy.relaxed import relaxed
from precedent.verify.modes import LOSSY_MODES, MODES, FirstHalf, Rows, find_mode
from precedent.verify.recursion import Weights
from precedent.verify.verdict import Verdict
from precedent.verify.walk import walk

__all__ = [
    "LOSSY_MODES",
    "MODES",
    "FirstHalf",
    "Judge",
    "Rows",
    "Verdict",
    "Weights",
    "find_mode",
    "judged",
    "prepare",
    "relaxed",
    "verify",
    "walk",
]


def prepare(tree: CandidateTree, rows: Rows, mode: str, *, batched: bool = False) -> Callable[[Coins], Verdict]:
    """The coin-free half of `verify`. Raises ConfigError for an unknown mode or parameter."""
    return find_mode(mode, batched=batched)(tree, rows)


def verify(tree: CandidateTree, rows: Rows, mode: str, coins: Coins, *, batched: bool = False) -> Verdict:
    """Accept the longest lawful path of `tree`, whose law is that of sampling from `rows`, and add one token.

    `batched` weighs the whole tree at once, for rows on a GPU. Pure: no model, no settings, no change to its arguments.
    Raises ConfigError for an unknown mode or parameter.
    """
    return prepare(tree, rows, mode, batched=batched)(coins)
