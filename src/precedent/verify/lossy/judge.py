"""A learned judge (AutoJudge 2504.20039) may accept a token that verification rejected.

Verification itself stays lossless. When it ends with a recovered token, the judge scores each rejected child in
verification order; if it accepts one, verification continues below it. With the same random numbers, the text differs
from the lossless one only after an overruled rejection, so the expected number of overruled rejections bounds the total
variation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import entry_points

from precedent.errors import ConfigError
from precedent.sampling.rng import Rng
from precedent.sampling.target_rows import TargetRows
from precedent.tree import NULL, ROOT, CandidateTree
from precedent.verify import Decide, RowWeights, Verdict, Verifier, walk

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

    return prepare


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
    found = next(iter(entry_points(group=GROUP, name=name)), None)
    if found is None:
        known = ", ".join(sorted({entry.name for entry in entry_points(group=GROUP)})) or "none"
        raise ConfigError(f"no judge is called {name!r} (installed: {known})")
    factory: Callable[[], Judge] = found.load()
    return factory()
