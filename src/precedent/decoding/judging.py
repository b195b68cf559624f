"""From logits to verdicts, for all sequences of a step: on a GPU everything is computed before anything is read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

from torch import Tensor

from precedent.decoding.draft import Draft
from precedent.decoding.unscored import Judged, RowsSoFar, judged, with_draws_at_hand
from precedent.runtime.failures import as_ours
from precedent.sampling.probabilities import KnownCoins
from precedent.sampling.target_rows import TargetRows
from precedent.verify import verify
from precedent.verify.ahead import (
    COUPLED,
    GREEDY,
    LAZY,
    Scored,
    Unread,
    VerdictsAhead,
    computed_alike,
    read_together,
)

BESIDE_A_FORWARD = 2e-3
"""Seconds for the masks of all nodes of all trees of a step, which are found while a GPU computes their rows."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """A scored draft: its rows, how to come to its verdict, and what must be read before.

    `decide` gives the tree that was verified, its accepted nodes, and the verdict (`unscored`). `scored` is
    there where verdicts are known ahead, and read together with those of others; `unread` where it reads by itself.
    """

    draft: Draft
    rows: TargetRows
    decide: Callable[[], Judged]
    scored: Scored | None = None
    unread: Unread | None = None


def judge_all(drafts: Sequence[Draft], scored: Sequence[Tensor]) -> list[Judgement]:
    """The judgements of all that can be judged; a sequence that cannot carries its error."""
    judgements, until = [], perf_counter() + BESIDE_A_FORWARD
    for draft, logits in zip(drafts, scored, strict=True):
        try:
            judgements.append(_judge(draft, logits, until))
        except Exception as error:
            draft.sequence.error = as_ours(error, "verifying")
    ahead = {each.scored: each for each in judgements if each.scored is not None}
    pending: list[Unread] = [each.unread for each in judgements if each.unread is not None]
    for together in computed_alike(list(ahead)):
        pending.extend(_ahead([ahead[each] for each in together]))
    read_together(pending)
    return [each for each in judgements if each.draft.sequence.error is None]


def on_accelerator(logits: Tensor) -> bool:
    """Whether reading a number means waiting for a device."""
    return logits.is_cuda


def _ahead(judgements: Sequence[Judgement]) -> list[Unread]:
    """What is to be read for their verdicts: computed together, or one by one if that fails, so that only one fails."""
    try:
        return [VerdictsAhead([each.scored for each in judgements if each.scored is not None])]
    except Exception as error:
        failure = as_ours(error, "verifying")  # without the frames, which would keep what was computed
    if len(judgements) == 1:
        judgements[0].draft.sequence.error = failure
        return []
    return [unread for each in judgements for unread in _ahead([each])]


def _judge(draft: Draft, logits: Tensor, until: float) -> Judgement:
    sequence, tree, mode = draft.sequence, draft.tree, draft.sequence.mode
    logits, at_once = logits[:, : sequence.num_tokens], on_accelerator(logits)
    if at_once and sequence.stats.bitwise and mode == COUPLED:
        logits, at_once = logits.cpu(), False  # a GPU's cumulative sums are not the same bits every time
    rows = TargetRows(
        logits, tree, sequence.sampling, sequence.output_ids, sequence.shape, at_once=at_once, until=until
    )
    whole, at_once = with_draws_at_hand(sequence, tree), rows.compute_together()
    so_far = rows if len(whole) == len(tree) else RowsSoFar(rows, len(tree), len(whole))
    coins = sequence.coins()
    if at_once and mode in (*LAZY, GREEDY, COUPLED) and isinstance(coins, KnownCoins):
        scored = Scored(whole, so_far, coins, mode)
        return Judgement(draft, rows, lambda: judged(whole, len(tree), scored.verdict()), scored)

    def decide() -> Judged:
        verdict = verify(whole, so_far, mode, coins, batched=at_once and mode in LAZY)
        return judged(whole, len(tree), verdict)

    return Judgement(draft, rows, decide, unread=rows if at_once else None)
