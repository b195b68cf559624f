"""A learned judge (AutoJudge 2504.20039): a token that verification rejected may be let stand after all.

Verification itself stays lossless. Where it ends with a recovered token, the judge is asked about each rejected child,
in verification order; if one stands, verification goes on below it. With the same coins the text differs from the
lossless one only behind an overruled rejection, so the expected number of these bounds the total variation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import entry_points

from precedent.errors import ConfigError
from precedent.sampling.probabilities import Coins
from precedent.tree import NULL, ROOT, CandidateTree
from precedent.verify.lossy.relaxed import LogitRows
from precedent.verify.recursion import Weights
from precedent.verify.verdict import Verdict
from precedent.verify.walk import walk

GROUP = "precedent.judges"

OVERRULE = "verify-overrule"

Judge = Callable[[CandidateTree, LogitRows, int], float]
"""`(tree, rows, node) -> chance` in [0, 1] that a rejected node stands; a function of its arguments alone.

`rows(n)` and `rows.logits(n)` are the target's probabilities and logits after any node n of the tree, so those that
judged the token are `tree.parents[node]`'s. Hidden states are not to be had (docs/verification.md).
"""


def judged(judge: Judge) -> Callable[[CandidateTree, LogitRows], Callable[[Coins], Verdict]]:
    """A verifier in two halves: eager coins, and `judge` at every rejection; it spends 1 for each it overrules."""

    def first_half(tree: CandidateTree, rows: LogitRows) -> Callable[[Coins], Verdict]:
        weights = Weights(tree, rows, lazy=False)

        def decide(coins: Coins) -> Verdict:
            verdict, overruled = walk(weights, coins), 0
            while (node := _standing(tree, rows, verdict, judge, coins)) is not None:
                verdict, overruled = walk(weights, coins, node), overruled + 1
            return replace(verdict, spent_tv=float(overruled))

        return decide

    return first_half


def _standing(tree: CandidateTree, rows: LogitRows, verdict: Verdict, judge: Judge, coins: Coins) -> int | None:
    """The first rejected child where `verdict` ends that the judge lets stand, or None."""
    end = verdict.path[-1] if verdict.path else ROOT
    children = dict.fromkeys(draw.child for draw in tree.draws_at.get(end, ()) if draw.child != NULL)
    for child in children:
        chance = judge(tree, rows, child)
        if tree.token_ids[child] != verdict.next_token and coins.bernoulli(chance, child, OVERRULE):
            return child
    return None


def load_judge(name: str) -> Judge:
    """The judge installed under `name` (entry-point group `precedent.judges`, a factory without arguments).

    Raises ConfigError for a name that nothing installed provides.
    """
    found = next(iter(entry_points(group=GROUP, name=name)), None)
    if found is None:
        known = ", ".join(sorted({point.name for point in entry_points(group=GROUP)})) or "none"
        raise ConfigError(f"no judge is called {name!r} (installed: {known})")
    factory: Callable[[], Judge] = found.load()
    return factory()
