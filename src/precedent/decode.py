"""THE LOOP. One step: match, plan, draw, score, verify, commit — for every running sequence at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

from torch import Tensor

from precedent.errors import PrecedentError
from precedent.planner import Plan, Planner
from precedent.sampling import TargetRows
from precedent.sequence import DecodingSequence
from precedent.stats import TARGET
from precedent.target import TargetModel
from precedent.tree import CandidateTree
from precedent.verify import Verdict, verify


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one sequence gained in one step: committed tokens and, for each, the source that proposed it."""

    token_ids: tuple[int, ...] = ()
    sources: tuple[str, ...] = ()


def step(sequences: Sequence[DecodingSequence], target: TargetModel, planner: Planner) -> list[StepResult]:
    """Advance every sequence by one target forward. A sequence that fails carries its error; the others go on."""
    drafts = [_draft(sequence, planner) for sequence in sequences]
    started = perf_counter()
    try:
        scored = target.score([(s.slot, tree) for s, (_, tree) in zip(sequences, drafts, strict=True)])
        seconds = (perf_counter() - started) / len(sequences)
        return [
            _verify_and_commit(sequence, plan, tree, logits, seconds, target, planner)
            for sequence, (plan, tree), logits in zip(sequences, drafts, scored, strict=True)
        ]
    finally:
        for sequence in sequences:
            target.discard(sequence.slot)


def _draft(sequence: DecodingSequence, planner: Planner) -> tuple[Plan, CandidateTree]:
    """Match and plan the points, then draw; returns the finished tree."""
    started, limits = perf_counter(), sequence.limits
    if limits.max_depth < 1 or limits.max_nodes + limits.max_draws == 0:
        return Plan(), CandidateTree()
    candidates = [drafting.match(sequence.match_budget) for drafting in sequence.draftings.values()]
    behind = {name: sequence.draftings[name].behind for name in sequence.draw_sources}
    plan = planner.plan(candidates, behind, limits)
    sequence.last_num_points = len(plan.builder)
    sequence.stats.draft_seconds += perf_counter() - started
    for source, number in plan.draws.items():
        started = perf_counter()
        sequence.draftings[source].draw(plan.builder, number, sequence.coins())
        seconds = perf_counter() - started
        sequence.stats.draft_model_seconds += seconds
        planner.observe_draws(source, number, behind[source], seconds * 1e3)
    return plan, plan.builder.build()


def _verify_and_commit(
    sequence: DecodingSequence,
    plan: Plan,
    tree: CandidateTree,
    logits: Tensor,
    forward_seconds: float,
    target: TargetModel,
    planner: Planner,
) -> StepResult:
    started = perf_counter()
    rows = TargetRows(logits, tree, sequence.sampling, sequence.output_ids, sequence.shape)
    try:
        batched = logits.is_cuda and sequence.mode in ("traversal", "topdown")
        verdict = verify(tree, rows, sequence.mode, sequence.coins(), batched=batched)
    except PrecedentError as error:
        sequence.error = error
        return StepResult()
    target.commit(sequence.slot, tree, verdict.path, verdict.next_token)
    sequence.stats.verify_seconds += perf_counter() - started
    planner.observe(plan, tree, verdict.path, forward_seconds * 1e3)
    return _account(sequence, tree, verdict, forward_seconds)


def _account(sequence: DecodingSequence, tree: CandidateTree, verdict: Verdict, forward_seconds: float) -> StepResult:
    """Append what was committed, tell the drafters, and count."""
    chosen = [*(tree.token_ids[node] for node in verdict.path), verdict.next_token]
    token_ids = sequence.append(chosen)
    sources = (*(tree.sources[node][0] for node in verdict.path), TARGET)[: len(token_ids)]
    for drafting in sequence.draftings.values():
        drafting.committed(token_ids)
    stats = sequence.stats
    stats.num_steps += 1
    stats.spent_tv += verdict.spent_tv
    stats.forward_seconds += forward_seconds
    stats.num_output_tokens += len(token_ids)
    stats.num_draft_tokens += len(tree)
    stats.num_accepted_tokens += len(token_ids) - sources.count(TARGET)
    stats.drafted_by_source.update(names[0] for names in tree.sources)
    stats.accepted_by_source.update(source for source in sources if source != TARGET)
    return StepResult(token_ids, sources)
