"""THE LOOP: one step advances all running sequences by one forward pass of the target model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from precedent.decoding.aids import Aids
from precedent.decoding.proposal import Proposal, propose
from precedent.decoding.sequence import DecodingSequence, Emission
from precedent.decoding.stats import TARGET
from precedent.decoding.verification import Forward, Verified, counted, score, verify
from precedent.drafters import Drafter, DrafterParts
from precedent.planning.costs import CostCurve
from precedent.planning.planner import Planner
from precedent.runtime.fence import Fences
from precedent.runtime.plugins import load_plugin, not_installed
from precedent.sampling.logprobs import logprobs_of
from precedent.sampling.target_rows import TargetRows
from precedent.target import Target
from precedent.tree import ROOT

GROUP = "precedent.loops"

StepObserver = Callable[[Verified, tuple[int, ...]], None]
"""Sees a verified step of a sequence, and the tokens that it committed."""

OBSERVER = "step observer"
"""The name of `DecodeLoop.on_verified` among the fences."""


class DecodeLoop:
    """Proposes, scores, verifies, commits and accepts for all running sequences together.

    A sequence that fails carries its error, and the others continue. What only makes steps faster is called through
    `aids`: a fault there fails no sequence. `on_verified` sees every step of a sequence with the tokens it committed.
    A plugin's loop (entry-point group `precedent.loops`) is a subclass, chosen by name in `EngineOptions.loop`.
    """

    def __init__(self, target: Target, planner: Planner, fences: Fences | None = None) -> None:
        self.target, self.aids = target, Aids(planner, fences or Fences())
        self.on_verified: StepObserver | None = None

    @classmethod
    def planner(cls, cost: CostCurve) -> Planner:
        """Return the planner that this loop needs."""
        return Planner(cost)

    @classmethod
    def drafters(cls, parts: DrafterParts) -> Mapping[str, Drafter]:
        """Return drafters that replace the installed ones of their names. Raises for parts that it cannot use."""
        return {}

    def close(self) -> None:
        """Release what the loop holds; no step follows."""

    def step(self, sequences: Sequence[DecodingSequence]) -> list[Emission]:
        """Advance every sequence by one forward pass; returns one result per sequence, empty for one that failed."""
        try:
            proposals = self.propose(sequences)
            forward = self.score(proposals)
            verified = self.verify(forward)
            committed = self.commit(verified)
            results = {each.sequence: self.accept(each) for each in committed}
            return [results.get(sequence, Emission()) for sequence in sequences]
        finally:
            for sequence in sequences:
                self.target.discard(sequence.slot)

    def propose(self, sequences: Sequence[DecodingSequence]) -> list[Proposal]:
        """Match, plan and draw a candidate tree for each sequence."""
        return propose(sequences, self.aids)

    def score(self, proposals: Sequence[Proposal]) -> Forward:
        """Compute the target's logits over all trees in one forward pass; if it fails, in one per tree."""
        return score(proposals, self.target)

    def rows(self, proposal: Proposal, logits: Tensor, hidden: Callable[[int], Tensor] | None) -> TargetRows:
        """Return the rows to verify a scored tree by; `logits` is `[num_nodes + 1, vocab_size]`."""
        sequence, request = proposal.sequence, proposal.sequence.request
        return TargetRows(logits, proposal.tree, request.sampling, sequence.output_ids, request.shape, hidden)

    def verify(self, forward: Forward) -> list[Verified]:
        """Decide for every tree which path is accepted and which token follows it."""
        return verify(forward, self.rows, self.aids)

    def commit(self, verified: Sequence[Verified]) -> list[Verified]:
        """Keep the rows of every accepted path in the target model; returns those for which this succeeded."""
        with counted([each.sequence for each in verified], "verify_seconds"):
            commits = [
                (each.sequence.slot, each.proposal.tree, each.verdict.path, each.verdict.next_token)
                for each in verified
            ]
            errors = self.target.commit_all(commits)
        for each, error in zip(verified, errors, strict=True):
            if error is not None:
                each.sequence.fail(error, "committing")
        return [each for each in verified if each.sequence.error is None]

    def accept(self, verified: Verified) -> Emission:
        """Append the committed tokens; inform the planner, the drafters and the observer; update the statistics."""
        try:
            return self._accepted(verified)
        except Exception as error:
            verified.sequence.fail(error, "accounting for a verdict")
            return Emission()

    def _accepted(self, verified: Verified) -> Emission:
        sequence, tree, verdict, aids = verified.sequence, verified.rows.tree, verified.verdict, self.aids
        aids.planning(sequence, lambda: aids.planner.observe(verified.proposal.plan, tree, verified.accepted), None)
        chosen = [*(tree.token_ids[node] for node in verdict.path), verdict.next_token]
        logprobs = logprobs_of(verified.rows, (ROOT, *verdict.path), chosen, sequence.request.sampling.logprobs)
        token_ids = sequence.append(chosen)
        sources = (*(tree.sources[node][0] for node in verified.accepted), TARGET)[: len(token_ids)]
        aids.committed(sequence, token_ids)
        observer = self.on_verified
        if observer is not None:
            aids.fences.of(OBSERVER).run(lambda: observer(verified, token_ids), None)
        sequence.stats.count(tree, sources, verdict.spent_tv)
        return Emission("", token_ids, sources, tuple(logprobs[: len(token_ids)]))


def loop_class(name: str | None) -> type[DecodeLoop]:
    """Return the loop of this name, `DecodeLoop` for None. Raises ConfigError if no installed package provides it."""
    if name is None:
        return DecodeLoop
    found: type[DecodeLoop] | None = load_plugin(GROUP, name)
    if found is None:
        raise not_installed(f"loop={name!r}", GROUP)
    return found
