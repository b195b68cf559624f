"""From trees to verdicts: one forward for all trees and, on a GPU, one read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter

from torch import Tensor

from precedent.decoding.aids import BESIDE, Aids
from precedent.decoding.beside import Beside
from precedent.decoding.proposal import Proposal, faults_of
from precedent.decoding.sequence import DecodingSequence
from precedent.decoding.timing import counted
from precedent.decoding.verifiers import verifier_of
from precedent.runtime.isolate import together
from precedent.sampling.rng import KeyedRng
from precedent.sampling.target_rows import TargetRows
from precedent.target import Slot, Target
from precedent.tree import CandidateTree
from precedent.verify import Verdict
from precedent.verify.ahead import COUPLED, MODES, Ahead, Scored, computed_alike, read_together

HiddenStatesOf = Callable[[Slot, int, int], Tensor]
"""`Target.hidden_states`."""

BESIDE_A_FORWARD = 2e-3
"""Seconds allowed for computing the masks of all nodes of a step's trees, while a GPU computes their rows."""


@dataclass(slots=True, eq=False)
class Forward:
    """The logits of every scored proposal, the seconds and threads of scoring; a failure means more than one try.

    `hidden` are the hidden states of their rows, where the target keeps them. `settled` is false where the time says
    nothing about later steps (`Target.settled`).
    """

    scored: Sequence[tuple[Proposal, Tensor]]
    seconds: float
    num_tries: int
    threads: int = 1
    hidden: HiddenStatesOf | None = None
    settled: bool = True

    @property
    def num_rows(self) -> int:
        """Rows of the forward, including pending tokens."""
        return sum(len(proposal.tree) + 1 for proposal, _ in self.scored)

    @property
    def prefix(self) -> int:
        """Tokens that a row sees before its tree, averaged over the rows."""
        seen = sum((len(proposal.tree) + 1) * proposal.sequence.prefix for proposal, _ in self.scored)
        return seen // max(1, self.num_rows)


@dataclass(slots=True, eq=False)
class Verified:
    """A proposal with its verdict: the tree that was verified, and the target's rows over it."""

    proposal: Proposal
    tree: CandidateTree
    rows: TargetRows
    verdict: Verdict

    @property
    def sequence(self) -> DecodingSequence:
        """The sequence that made the proposal."""
        return self.proposal.sequence


@dataclass(slots=True, eq=False)
class _Prepared:
    """A scored tree before its verdict; `scored` is set if the verdict is computed together with others'."""

    proposal: Proposal
    tree: CandidateTree
    rows: TargetRows
    decide: Callable[[], Verdict]
    scored: Scored | None = None


def score(proposals: Sequence[Proposal], target: Target, beside: Beside) -> Forward:
    """Compute the rows of every tree in one forward; if it fails, in one forward per tree.

    The retry keeps the trees as they are: sampling new ones could bias the answer.
    """
    tries, started = 0, perf_counter()

    def forward(some: Sequence[Proposal]) -> list[Tensor]:
        nonlocal tries
        tries += 1
        for each in some if tries > 1 else ():
            target.discard(each.sequence.slot)
        logits = target.score([(each.sequence.slot, each.tree) for each in some])
        beside.wait_for(logits)
        return logits

    sound = [each for each in proposals if each.sequence.error is None]
    scored = together(sound, forward, _fail_scoring)
    hidden = target.hidden_states if target.keeps_hidden_states else None
    return Forward(scored, perf_counter() - started, tries, target.threads, hidden, target.settled)


def _fail_scoring(proposal: Proposal, error: Exception) -> None:
    proposal.sequence.fail(error, f"scoring at output position {len(proposal.sequence.output_ids)}")


def verify(forward: Forward, aids: Aids) -> list[Verified]:
    """Verify all trees and tell the planner what the forward took. A sequence that fails carries its error."""
    started = perf_counter()
    prepared = _read_together(_prepared_each(forward, started + BESIDE_A_FORWARD, aids))
    if any(on_accelerator(logits) for _, logits in forward.scored):
        forward.seconds += perf_counter() - started  # a GPU has only started when `score` returns
    if forward.num_tries == 1 and forward.scored and forward.settled:
        aids.observe_forward(forward.num_rows, forward.seconds * 1e3, forward.prefix, forward.threads)
    for proposal, _ in forward.scored:
        proposal.sequence.stats.forward_seconds += forward.seconds
    with counted([each.proposal.sequence for each in prepared], "verify_seconds"):
        return [verified for each in prepared if (verified := _decided(each)) is not None]


def on_accelerator(logits: Tensor) -> bool:
    """Whether reading a number means waiting for a GPU."""
    return logits.is_cuda


def _prepared_each(forward: Forward, until: float, aids: Aids) -> list[_Prepared]:
    prepared = []
    for proposal, logits in forward.scored:
        try:
            prepared.append(_prepared(proposal, logits, until, aids, forward.hidden))
        except Exception as error:
            proposal.sequence.fail(error, "verifying")
    return prepared


def _prepared(proposal: Proposal, logits: Tensor, until: float, aids: Aids, hidden: HiddenStatesOf | None) -> _Prepared:
    sequence, request, rng = proposal.sequence, proposal.sequence.request, proposal.sequence.rng()
    logits, at_once = logits[:, : request.num_tokens], on_accelerator(logits)
    if at_once and sequence.bitwise and request.mode == COUPLED:
        logits, at_once = logits.cpu(), False  # a GPU's cumulative sums are not bitwise reproducible
    tree = aids.fences.of(BESIDE).run(lambda: _late(proposal, aids), proposal.tree)
    of_node = None if hidden is None else partial(_hidden_state, hidden, sequence)
    rows = TargetRows(logits, tree, request.sampling, sequence.output_ids, request.shape, of_node)
    constrained = rows.constrained(until) if at_once and request.mode in MODES else None
    if constrained is not None and isinstance(rng, KeyedRng):
        scored = Scored(tree, constrained, rng, request.mode)
        return _Prepared(proposal, tree, constrained, scored.verdict, scored)
    decide = verifier_of(request.mode)(tree, rows)
    return _Prepared(proposal, tree, rows, lambda: decide(rng))


def _late(proposal: Proposal, aids: Aids) -> CandidateTree:
    """The tree to verify, with samples drawn meanwhile. Raises what is wrong with one of them."""
    tree, scored = aids.beside.late(proposal, aids), set(proposal.tree.candidates)
    if tree is not proposal.tree:
        new = [each for each in tree.candidates if each not in scored]
        most_nodes = len(proposal.tree) + len(proposal.sequence.drawing)
        for error in faults_of(new, tree, most_nodes, proposal.sequence.request.num_tokens).values():
            raise error
    return tree


def _hidden_state(hidden: HiddenStatesOf, sequence: DecodingSequence, node: int) -> Tensor:
    """The hidden state of a scored node, whose row stands behind those of the committed and the pending tokens."""
    row = sequence.prefix + 1 + node
    return hidden(sequence.slot, row, row + 1)[0]


def _read_together(prepared: list[_Prepared]) -> list[_Prepared]:
    """Compute what can be computed in advance and read it at once; returns those that did not fail."""
    of = {each.scored: each.proposal.sequence for each in prepared if each.scored is not None}
    pending = [
        ahead
        for group in computed_alike(list(of))
        for _, ahead in together(group, _ahead, lambda scored, error: of[scored].fail(error, "verifying"))
    ]
    read_together(list(dict.fromkeys(pending)))
    return [each for each in prepared if each.proposal.sequence.error is None]


def _ahead(group: Sequence[Scored]) -> list[Ahead]:
    """The shared `Ahead` of a group, once per member."""
    return [Ahead(group)] * len(group)


def _decided(prepared: _Prepared) -> Verified | None:
    try:
        return Verified(prepared.proposal, prepared.tree, prepared.rows, prepared.decide())
    except Exception as error:
        prepared.proposal.sequence.fail(error, "verifying")
        return None
