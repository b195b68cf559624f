"""THE LOOP. One step: match, plan, draw, score, verify, commit — for every running sequence at once."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import nullcontext
from time import perf_counter

from torch import Tensor

from precedent.drafting import Draft, draft_all
from precedent.errors import PrecedentError
from precedent.failures import as_ours
from precedent.judging import Judgement, judge_all, on_accelerator
from precedent.logprobs import TokenLogprob, logprobs_of
from precedent.pearl import Pearl, wait_for
from precedent.planner import Planner
from precedent.sequence import DecodingSequence, StepResult
from precedent.stats import TARGET
from precedent.target import TargetModel
from precedent.tree import ROOT, CandidateTree

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
    for judgement in judgements:
        draft = judgement.draft
        draft.sequence.stats.forward_seconds += seconds
        if draft.sequence.error is not None:  # drafting ahead failed meanwhile
            continue
        try:
            draft.result = _verify_and_commit(judgement, target, planner)
        except Exception as error:
            draft.sequence.error = as_ours(error, "verifying")


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


def _verify_and_commit(judgement: Judgement, target: TargetModel, planner: Planner) -> StepResult:
    draft, rows = judgement.draft, judgement.rows
    started, sequence = perf_counter(), draft.sequence
    tree, accepted, verdict = judgement.decide()
    target.commit(sequence.slot, tree, verdict.path, verdict.next_token)
    sequence.stats.verify_seconds += perf_counter() - started
    sequence.stats.spent_tv += verdict.spent_tv
    planner.observe(draft.plan, tree, accepted)
    chosen = [*(tree.token_ids[node] for node in verdict.path), verdict.next_token]
    logprobs = logprobs_of(rows, (ROOT, *verdict.path), chosen, sequence.sampling.logprobs)
    return _account(sequence, tree, accepted, chosen, logprobs)


def _account(
    sequence: DecodingSequence,
    tree: CandidateTree,
    accepted: Sequence[int],
    chosen: Sequence[int],
    logprobs: Sequence[TokenLogprob],
) -> StepResult:
    """Append what was committed, tell the drafters, and count."""
    token_ids = sequence.append(chosen)
    sources = (*(tree.sources[node][0] for node in accepted), TARGET)[: len(token_ids)]
    stats = sequence.stats
    stats.num_lookaheads += sequence.draws_at_hand > 0
    for drafting in sequence.draftings.values():
        drafting.committed(token_ids)
    stats.num_lookaheads_used += sequence.draws_at_hand > 0
    stats.num_steps += 1
    stats.num_drafts += bool(tree)
    stats.num_output_tokens += len(token_ids)
    stats.num_draft_tokens += len(tree)
    stats.num_accepted_tokens += len(token_ids) - sources.count(TARGET)
    stats.drafted_by_source.update(names[0] for names in tree.sources)
    stats.accepted_by_source.update(source for source in sources if source != TARGET)
    return StepResult(token_ids, sources, tuple(logprobs[: len(token_ids)]))
