"""The end of a step: keep the accepted rows in the target model; update the sequence, its drafters and the planner."""

from __future__ import annotations

from collections.abc import Sequence

from precedent.decoding.aids import Aids
from precedent.decoding.sequence import StepResult
from precedent.decoding.stats import TARGET
from precedent.decoding.timing import counted
from precedent.decoding.verification import Verified
from precedent.sampling.logprobs import logprobs_of
from precedent.target import Target
from precedent.tree import ROOT


def commit(verified: Sequence[Verified], target: Target) -> list[Verified]:
    """Keep the rows of every accepted path; returns the proposals whose commit succeeded."""
    with counted([each.sequence for each in verified], "verify_seconds"):
        commits = [(each.sequence.slot, each.tree, each.verdict.path, each.verdict.next_token) for each in verified]
        errors = target.commit_all(commits)
    for each, error in zip(verified, errors, strict=True):
        if error is not None:
            each.sequence.fail(error, "committing")
    return [each for each in verified if each.sequence.error is None]


def accept(verified: Verified, aids: Aids) -> StepResult:
    """Append the committed tokens, inform the planner and the drafters, and update the statistics."""
    try:
        return _accepted(verified, aids)
    except Exception as error:
        verified.sequence.fail(error, "accounting for a verdict")
        return StepResult()


def _accepted(verified: Verified, aids: Aids) -> StepResult:
    sequence, tree, verdict = verified.sequence, verified.tree, verified.verdict
    aids.planning(sequence, lambda: aids.planner.observe(verified.proposal.plan, tree, verdict.accepted), None)
    chosen = [*(tree.token_ids[node] for node in verdict.path), verdict.next_token]
    logprobs = logprobs_of(verified.rows, (ROOT, *verdict.path), chosen, sequence.request.sampling.logprobs)
    token_ids = sequence.append(chosen)
    sources = (*(tree.sources[node][0] for node in verdict.accepted), TARGET)[: len(token_ids)]
    aids.settled(sequence, token_ids, lambda: aids.beside.settled(verified, token_ids))
    sequence.stats.count(tree, sources, verdict.spent_tv)
    return StepResult(token_ids, sources, tuple(logprobs[: len(token_ids)]))
