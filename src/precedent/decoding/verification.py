"""Scores all trees in one forward pass and verifies them; on a GPU, the host waits once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Literal

from torch import Tensor

from precedent.decoding.aids import Aids
from precedent.decoding.proposal import Proposal
from precedent.decoding.sequence import DecodingSequence
from precedent.runtime.failures import together
from precedent.sampling.rng import KeyedRng
from precedent.sampling.target_rows import TargetRows
from precedent.target import Slot, Target
from precedent.verify import Verdict, verifier_of
from precedent.verify.ahead import COUPLED, MODES, Ahead, Scored, computed_alike, read_together

DURING_A_FORWARD = 2e-3
"""Seconds allowed for computing the masks of all nodes of a step's trees, while a GPU computes their rows."""

Rows = Callable[[Proposal, Tensor, Callable[[int], Tensor] | None], TargetRows]
"""`DecodeLoop.rows`: the rows to verify a scored tree by, given its logits and the hidden state after each node."""


@dataclass(slots=True, eq=False)
class Forward:
    """The logits of every scored proposal, the seconds and threads of scoring; a failure means more than one try.

    `hidden` are the hidden states of their rows (`Target.hidden_states`), where the target keeps them. `settled` is
    false where the time says nothing about later steps (`Target.settled`).
    """

    scored: Sequence[tuple[Proposal, Tensor]]
    seconds: float
    num_tries: int
    threads: int = 1
    hidden: Callable[[Slot, int, int], Tensor] | None = None
    settled: bool = True


@dataclass(slots=True, eq=False)
class Verified:
    """A proposal with the rows over the verified tree and the verdict; `accepted` are the nodes that passed."""

    proposal: Proposal
    rows: TargetRows
    verdict: Verdict
    accepted: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.accepted = self.verdict.path

    @property
    def sequence(self) -> DecodingSequence:
        """The sequence that made the proposal."""
        return self.proposal.sequence


@dataclass(slots=True, eq=False)
class _Prepared:
    """A scored tree before its verdict; `scored` is set if the verdict is computed together with others'."""

    proposal: Proposal
    rows: TargetRows
    decide: Callable[[], Verdict]
    scored: Scored | None = None


@contextmanager
def counted(
    sequences: Sequence[DecodingSequence], clock: Literal["forward_seconds", "verify_seconds"]
) -> Iterator[None]:
    """Add the seconds that the body takes to each sequence's statistics."""
    started = perf_counter()
    try:
        yield
    finally:
        seconds = perf_counter() - started
        for sequence in sequences:
            setattr(sequence.stats, clock, getattr(sequence.stats, clock) + seconds)


def score(proposals: Sequence[Proposal], target: Target) -> Forward:
    """Compute the rows of every tree in one forward; if it fails, in one forward per tree.

    The retry keeps the trees as they are: sampling new ones could bias the answer.
    """
    tries, started = 0, perf_counter()

    def forward(some: Sequence[Proposal]) -> list[Tensor]:
        nonlocal tries
        tries += 1
        for each in some if tries > 1 else ():
            target.discard(each.sequence.slot)
        return target.score([(each.sequence.slot, each.tree) for each in some])

    def fail(proposal: Proposal, error: Exception) -> None:
        proposal.sequence.fail(error, f"scoring at output position {len(proposal.sequence.output_ids)}")

    scored = together([each for each in proposals if each.sequence.error is None], forward, fail)
    hidden = target.hidden_states if target.keeps_hidden_states else None
    return Forward(scored, perf_counter() - started, tries, target.threads, hidden, target.settled)


def verify(forward: Forward, rows: Rows, aids: Aids) -> list[Verified]:
    """Verify all trees and tell the planner what the forward took. A sequence that fails carries its error."""
    started = perf_counter()
    prepared = _prepared_together(forward, rows, started + DURING_A_FORWARD)
    if any(on_accelerator(logits) for _, logits in forward.scored):
        forward.seconds += perf_counter() - started  # a GPU has only started when `score` returns
    if forward.num_tries == 1 and forward.scored and forward.settled:
        sizes = [(len(each.tree) + 1, each.sequence.prefix) for each, _ in forward.scored]
        num_rows = sum(size for size, _ in sizes)
        prefix = sum(size * seen for size, seen in sizes) // num_rows  # averaged over the rows
        aids.observe_forward(num_rows, forward.seconds * 1e3, prefix, forward.threads)
    for proposal, _ in forward.scored:
        proposal.sequence.stats.forward_seconds += forward.seconds
    verified = []
    with counted([each.proposal.sequence for each in prepared], "verify_seconds"):
        for each in prepared:
            try:
                verified.append(Verified(each.proposal, each.rows, each.decide()))
            except Exception as error:
                each.proposal.sequence.fail(error, "verifying")
    return verified


def on_accelerator(logits: Tensor) -> bool:
    """Whether reading a number means waiting for a GPU."""
    return logits.is_cuda


def _prepared_together(forward: Forward, rows: Rows, until: float) -> list[_Prepared]:
    """Prepare every verdict; compute what can be computed in advance and read it at once."""
    prepared = []
    for proposal, logits in forward.scored:
        try:
            prepared.append(_prepared(proposal, logits, rows, until, forward.hidden))
        except Exception as error:
            proposal.sequence.fail(error, "verifying")
    of = {each.scored: each.proposal.sequence for each in prepared if each.scored is not None}
    pending = dict[Ahead, None]()
    for group in computed_alike(list(of)):
        # the shared `Ahead` of a group, once per member
        computed = together(
            group, lambda some: [Ahead(some)] * len(some), lambda scored, error: of[scored].fail(error, "verifying")
        )
        pending |= dict.fromkeys(ahead for _, ahead in computed)
    read_together(list(pending))
    return [each for each in prepared if each.proposal.sequence.error is None]


def _prepared(
    proposal: Proposal,
    logits: Tensor,
    rows_of: Rows,
    until: float,
    hidden: Callable[[Slot, int, int], Tensor] | None,
) -> _Prepared:
    sequence, request, rng = proposal.sequence, proposal.sequence.request, proposal.sequence.rng()
    logits, at_once = logits[:, : request.num_tokens], on_accelerator(logits)
    if at_once and sequence.bitwise and request.mode == COUPLED:
        logits, at_once = logits.cpu(), False  # a GPU's cumulative sums are not bitwise reproducible
    rows = rows_of(proposal, logits, None if hidden is None else partial(_hidden_state, hidden, sequence))
    constrained = rows.constrained(until) if at_once and request.mode in MODES else None
    if constrained is not None and isinstance(rng, KeyedRng):
        scored = Scored(rows.tree, constrained, rng, request.mode)
        return _Prepared(proposal, constrained, scored.verdict, scored)
    decide = verifier_of(request.mode)(rows.tree, rows)
    return _Prepared(proposal, rows, lambda: decide(rng))


def _hidden_state(hidden: Callable[[Slot, int, int], Tensor], sequence: DecodingSequence, node: int) -> Tensor:
    """The hidden state of a scored node, whose row stands behind those of the committed and the pending tokens."""
    row = sequence.prefix + 1 + node
    return hidden(sequence.slot, row, row + 1)[0]
