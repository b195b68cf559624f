"""Scores all trees in one forward pass and verifies them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Literal

import torch
from torch import Tensor

from precedent.decoding.aids import Aids
from precedent.decoding.proposal import Proposal
from precedent.decoding.sequence import DecodingSequence
from precedent.errors import GenerationError
from precedent.runtime.failures import together
from precedent.sampling.target_rows import TargetRows
from precedent.target import Slot, Target
from precedent.target.support import ModelSupport, installed
from precedent.verify import Pending, Verdict

AHEAD = "verification ahead"
"""The name of `ModelSupport.verify_ahead` among the fences."""

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
        found = target.score([(each.sequence.slot, each.tree) for each in some])
        return found if tries == 1 else [logits.clone() for logits in found]  # the next forward may overwrite them

    def fail(proposal: Proposal, error: Exception) -> None:
        proposal.sequence.fail(error, f"scoring at output position {len(proposal.sequence.output_ids)}")

    scored = together([each for each in proposals if each.sequence.error is None], forward, fail)
    hidden = target.hidden_states if target.keeps_hidden_states else None
    return Forward(scored, perf_counter() - started, tries, target.threads, hidden, target.settled)


def verify(forward: Forward, rows: Rows, aids: Aids) -> list[Verified]:
    """Verify all trees and tell the planner what the forward took. A sequence that fails carries its error."""
    started, pending = perf_counter(), list[tuple[Proposal, Pending]]()
    for proposal, logits in forward.scored:
        try:
            pending.append((proposal, _pending(proposal, logits, rows, forward.hidden)))
        except Exception as error:
            proposal.sequence.fail(error, "verifying")
    _verify_ahead([each for _, each in pending], aids)
    if forward.scored and forward.scored[0][1].is_cuda:  # a GPU has only started when `score` returns
        if any(each.ahead is None for _, each in pending):
            torch.cuda.synchronize(forward.scored[0][1].device)
        forward.seconds += perf_counter() - started
    if forward.num_tries == 1 and forward.scored and forward.settled:
        sizes = [(len(each.tree) + 1, each.sequence.prefix) for each, _ in forward.scored]
        num_rows = sum(size for size, _ in sizes)
        prefix = sum(size * seen for size, seen in sizes) // num_rows  # averaged over the rows
        aids.observe_forward(num_rows, forward.seconds * 1e3, prefix, forward.threads)
    for proposal, _ in forward.scored:
        proposal.sequence.stats.forward_seconds += forward.seconds
    verified = []
    with counted([proposal.sequence for proposal, _ in pending], "verify_seconds"):
        for proposal, each in pending:
            try:
                verified.append(Verified(proposal, each.rows, _verdict(each, aids)))
            except Exception as error:
                proposal.sequence.fail(error, "verifying")
    return verified


def _verdict(pending: Pending, aids: Aids) -> Verdict:
    """Decide; a fault of the package that verified ahead costs its verdict only, since the random numbers are the same.

    Raises GenerationError for a visited row that cannot be sampled from.
    """
    try:
        return pending.verdict()
    except Exception as error:
        if pending.ahead is None or isinstance(error, GenerationError):
            raise
        aids.fences.of(AHEAD).fault(error)
        pending.ahead = None
        return pending.verdict()


def _verify_ahead(pending: Sequence[Pending], aids: Aids) -> None:
    """Let packages find verdicts together; after a fault of one, all are found row by row, which needs none of them."""

    def found(package: ModelSupport) -> bool:
        package.verify_ahead(pending)
        return True

    for package in [each for each in installed() if type(each).verify_ahead is not ModelSupport.verify_ahead]:
        if not aids.fences.of(AHEAD).run(partial(found, package), False):
            for each in pending:
                each.ahead = None


def _pending(
    proposal: Proposal, logits: Tensor, rows_of: Rows, hidden: Callable[[Slot, int, int], Tensor] | None
) -> Pending:
    sequence, request = proposal.sequence, proposal.sequence.request
    logits = logits[:, : request.num_tokens]
    if sequence.bitwise and request.mode == "coupled":
        logits = logits.cpu()  # a GPU's cumulative sums are not bitwise reproducible
    rows = rows_of(proposal, logits, None if hidden is None else partial(_hidden_state, hidden, sequence))
    return Pending(rows, sequence.rng(), request.mode)


def _hidden_state(hidden: Callable[[Slot, int, int], Tensor], sequence: DecodingSequence, node: int) -> Tensor:
    """The hidden state of a scored node, whose row stands behind those of the committed and the pending tokens."""
    row = sequence.prefix + 1 + node
    return hidden(sequence.slot, row, row + 1)[0]
