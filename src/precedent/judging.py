"""From logits to verdicts, for all sequences of a step: on a GPU everything is computed before anything is read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from precedent.drafting import Draft
from precedent.failures import as_ours
from precedent.pearl import Judged, judge
from precedent.sampling import TargetRows
from precedent.tree import CandidateTree
from precedent.verify import Verdict
from precedent.verify.ahead import LAZY, KnownCoins, Unread, VerdictAhead, read_together


@dataclass(frozen=True, slots=True)
class Judgement:
    """A scored draft: its rows, how to come to its verdict, and what must be read before (None: it reads by itself).

    `decide` gives the tree that was verified, its accepted nodes, and the verdict (`pearl.judge`).
    """

    draft: Draft
    rows: TargetRows
    decide: Callable[[], Judged]
    unread: Unread | None = None


def judge_all(drafts: Sequence[Draft], scored: Sequence[Tensor]) -> list[Judgement]:
    """The judgements of all that can be judged; a sequence that cannot carries its error."""
    judgements = []
    for draft, logits in zip(drafts, scored, strict=True):
        try:
            judgements.append(_judge(draft, logits))
        except Exception as error:
            draft.sequence.error = as_ours(error, "verifying")
    read_together([each.unread for each in judgements if each.unread is not None])
    return judgements


def on_accelerator(logits: Tensor) -> bool:
    """Whether reading a number means waiting for a device."""
    return logits.is_cuda


def _judge(draft: Draft, logits: Tensor) -> Judgement:
    sequence, tree, mode = draft.sequence, draft.tree, draft.sequence.mode
    at_once = on_accelerator(logits)
    if at_once and sequence.stats.bitwise and mode == "coupled":
        logits, at_once = logits.cpu(), False  # a GPU's cumulative sums are not the same bits every time
    rows = TargetRows(logits, tree, sequence.sampling, sequence.output_ids, sequence.shape, at_once=at_once)
    if at_once and mode in LAZY and not sequence.draws_at_hand and isinstance(coins := sequence.coins(), KnownCoins):
        ahead = VerdictAhead(tree, rows, coins, mode)
        return Judgement(draft, rows, partial(_judged, tree, ahead.verdict), ahead)
    decide = partial(judge, sequence, tree, rows, batched=at_once and mode in LAZY)
    return Judgement(draft, rows, decide, rows if at_once and sequence.shape is None else None)


def _judged(tree: CandidateTree, verdict_of: Callable[[], Verdict]) -> Judged:
    verdict = verdict_of()
    return tree, verdict.path, verdict
