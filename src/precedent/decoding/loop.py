"""THE LOOP. One step: match, plan, draw, score, verify, commit — for every running sequence at once."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import nullcontext
from time import perf_counter

from torch import Tensor

from precedent.decoding.draft import Draft, draft_all
from precedent.decoding.judging import Judgement, judge_all, on_accelerator
from precedent.decoding.pearl import Pearl, wait_for
from precedent.decoding.sequence import DecodingSequence, StepResult
from precedent.decoding.stats import TARGET
from precedent.decoding.unscored import Judged
from precedent.errors import PrecedentError
from precedent.planning.planner import Planner
from precedent.runtime.failures import as_ours
from precedent.sampling.logprobs import logprobs_of
from precedent.target import TargetModel
from precedent.tree import ROOT

log = logging.getLogger(__name__)


def step(
    sequences: Sequence[DecodingSequence], target: TargetModel, planner: Planner, pearl: Pearl | None = None
) -> list[StepResult]:
    """Advance every sequence by one target forward. A sequence that fails carries its error; the others go on.

    With `pearl` draft models draw beside the forward, for the sequences that `draft_ahead`.
    """
    drafts = draft_all(sequences, planner)
    try:
        _advance([draft for draft in drafts if draft.sequence.error is None], target, planner, pearl)
    finally:
        for sequence in sequences:
            target.discard(sequence.slot)
    return [draft.result for draft in drafts]


def _advance(drafts: Sequence[Draft], target: TargetModel, planner: Planner, pearl: Pearl | None) -> None:
    """One forward for all drafts, then verdicts and commits; one by one if it fails, so that only the guilty fails."""
    try:
        scored, seconds = _score(drafts, target, planner, pearl)
    except Exception as error:
        log.debug("a forward of %d sequences failed", len(drafts), exc_info=True)
        failure = as_ours(error, f"scoring at output position {len(drafts[0].sequence.output_ids)}")
        _advance_one_by_one(drafts, failure, target, planner)
        return
    judged_from = perf_counter()
    judgements = judge_all(drafts, scored)
    if any(map(on_accelerator, scored)):
        seconds += perf_counter() - judged_from  # a GPU had not begun when `score` returned: now its numbers were read
    if drafts:
        planner.observe_forward(sum(len(draft.tree) + 1 for draft in drafts), seconds * 1e3)
    for draft in drafts:
        draft.sequence.stats.forward_seconds += seconds
    for judgement, judged in _committed(judgements, target):
        try:
            judgement.draft.result = _account(judgement, judged, planner)
        except Exception as error:
            judgement.draft.sequence.error = as_ours(error, "accounting for a verdict")


def _score(
    drafts: Sequence[Draft], target: TargetModel, planner: Planner, pearl: Pearl | None
) -> tuple[list[Tensor], float]:
    """The rows of every tree, and the seconds that the target took; draft models draw meanwhile."""
    with nullcontext() if pearl is None else pearl.beside(drafts, planner):
        started = perf_counter()
        scored = target.score([(draft.sequence.slot, draft.tree) for draft in drafts]) if drafts else []
        if pearl is not None:
            wait_for(scored)
        return scored, perf_counter() - started


def _advance_one_by_one(drafts: Sequence[Draft], error: PrecedentError, target: TargetModel, planner: Planner) -> None:
    """The same trees again, each in a forward of its own: to draw again after a failure could bias the answer."""
    if len(drafts) == 1:
        drafts[0].sequence.error = error
        return
    for draft in drafts:
        target.discard(draft.sequence.slot)
    for draft in drafts:
        if draft.sequence.error is None:
            _advance([draft], target, planner, None)


def _committed(judgements: Sequence[Judgement], target: TargetModel) -> list[tuple[Judgement, Judged]]:
    """Come to all verdicts, then commit them together; a sequence that has none carries its error."""
    started, decided = perf_counter(), []
    for judgement in judgements:
        try:
            decided.append((judgement, judgement.decide()))
        except Exception as error:
            judgement.draft.sequence.error = as_ours(error, "verifying")
    errors = target.commit_all(
        [
            (judgement.draft.sequence.slot, tree, verdict.path, verdict.next_token)
            for judgement, (tree, _, verdict) in decided
        ]
    )
    for (judgement, _), failure in zip(decided, errors, strict=True):
        if failure is not None:
            judgement.draft.sequence.error = as_ours(failure, "committing")
    for judgement in judgements:
        judgement.draft.sequence.stats.verify_seconds += perf_counter() - started
    return [each for each in decided if each[0].draft.sequence.error is None]


def _account(judgement: Judgement, judged: Judged, planner: Planner) -> StepResult:
    """Append what was committed, tell the planner and the drafters, and count."""
    sequence, (tree, accepted, verdict) = judgement.draft.sequence, judged
    planner.observe(judgement.draft.plan, tree, accepted)
    chosen = [*(tree.token_ids[node] for node in verdict.path), verdict.next_token]
    logprobs = logprobs_of(judgement.rows, (ROOT, *verdict.path), chosen, sequence.sampling.logprobs)
    token_ids = sequence.append(chosen)
    sources = (*(tree.sources[node][0] for node in accepted), TARGET)[: len(token_ids)]
    sequence.stats.num_lookaheads += sequence.draws_at_hand > 0
    for drafting in sequence.draftings.values():
        drafting.committed(token_ids)
    sequence.stats.num_lookaheads_used += sequence.draws_at_hand > 0
    sequence.stats.count(tree, sources, verdict.spent_tv)
    return StepResult(token_ids, sources, tuple(logprobs[: len(token_ids)]))
