"""THE LOOP. One step: match, plan, draw, score, verify, commit — for every running sequence at once."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from time import perf_counter

from precedent.drafting import Draft, draft_all
from precedent.errors import PrecedentError
from precedent.failures import as_ours
from precedent.judging import Judgement, judge_all
from precedent.logprobs import TokenLogprob, logprobs_of
from precedent.planner import Planner
from precedent.sequence import DecodingSequence, StepResult
from precedent.stats import TARGET
from precedent.target import TargetModel
from precedent.tree import ROOT, CandidateTree
from precedent.verify import Verdict

log = logging.getLogger(__name__)


def step(sequences: Sequence[DecodingSequence], target: TargetModel, planner: Planner) -> list[StepResult]:
    """Advance every sequence by one target forward. A sequence that fails carries its error; the others go on."""
    drafts = draft_all(sequences, planner)
    try:
        _advance([draft for draft in drafts if draft.sequence.error is None], target, planner)
    finally:
        for sequence in sequences:
            target.discard(sequence.slot)
    return [draft.result for draft in drafts]


def _advance(drafts: Sequence[Draft], target: TargetModel, planner: Planner) -> None:
    """One forward for all drafts, then verdicts and commits; one by one if it fails, so that only the guilty fails."""
    started = perf_counter()
    try:
        scored = target.score([(draft.sequence.slot, draft.tree) for draft in drafts]) if drafts else []
    except Exception as error:
        log.debug("a forward of %d sequences failed", len(drafts), exc_info=True)
        failure = as_ours(error, f"scoring at output position {len(drafts[0].sequence.output_ids)}")
        _advance_one_by_one(drafts, failure, target, planner)
        return
    seconds = perf_counter() - started
    judgements = judge_all(drafts, scored)
    if any(judgement.unread is not None for judgement in judgements):
        seconds = perf_counter() - started  # a GPU had not begun when `score` returned: now its numbers were read
    if drafts:
        planner.observe_forward(sum(len(draft.tree) + 1 for draft in drafts), seconds * 1e3)
    for judgement in judgements:
        draft = judgement.draft
        draft.sequence.stats.forward_seconds += seconds
        try:
            draft.result = _verify_and_commit(judgement, target, planner)
        except Exception as error:
            draft.sequence.error = as_ours(error, "verifying")


def _advance_one_by_one(drafts: Sequence[Draft], error: PrecedentError, target: TargetModel, planner: Planner) -> None:
    """The same trees again, each in a forward of its own: to draw again after a failure could bias the answer."""
    if len(drafts) == 1:
        drafts[0].sequence.error = error
        return
    for draft in drafts:
        target.discard(draft.sequence.slot)
    for draft in drafts:
        _advance([draft], target, planner)


def _verify_and_commit(judgement: Judgement, target: TargetModel, planner: Planner) -> StepResult:
    draft, rows = judgement.draft, judgement.rows
    started, sequence, tree = perf_counter(), draft.sequence, draft.tree
    verdict = judgement.decide()
    target.commit(sequence.slot, tree, verdict.path, verdict.next_token)
    sequence.stats.verify_seconds += perf_counter() - started
    planner.observe(draft.plan, tree, verdict.path)
    chosen = [*(tree.token_ids[node] for node in verdict.path), verdict.next_token]
    logprobs = logprobs_of(rows, (ROOT, *verdict.path), chosen, sequence.sampling.logprobs)
    return _account(sequence, tree, verdict, chosen, logprobs)


def _account(
    sequence: DecodingSequence,
    tree: CandidateTree,
    verdict: Verdict,
    chosen: Sequence[int],
    logprobs: Sequence[TokenLogprob],
) -> StepResult:
    """Append what was committed, tell the drafters, and count."""
    token_ids = sequence.append(chosen)
    sources = (*(tree.sources[node][0] for node in verdict.path), TARGET)[: len(token_ids)]
    for drafting in sequence.draftings.values():
        drafting.committed(token_ids)
    stats = sequence.stats
    stats.num_steps += 1
    stats.num_drafts += bool(tree)
    stats.spent_tv += verdict.spent_tv
    stats.num_output_tokens += len(token_ids)
    stats.num_draft_tokens += len(tree)
    stats.num_accepted_tokens += len(token_ids) - sources.count(TARGET)
    stats.drafted_by_source.update(names[0] for names in tree.sources)
    stats.accepted_by_source.update(source for source in sources if source != TARGET)
    return StepResult(token_ids, sources, tuple(logprobs[: len(token_ids)]))
