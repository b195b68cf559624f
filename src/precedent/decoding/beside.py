"""What goes on beside the target model's forward: nothing, unless a draft model draws there (`decoding.pearl`)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from torch import Tensor

from precedent.drafters.base import DrawSession
from precedent.tree import CandidateTree

if TYPE_CHECKING:
    from precedent.decoding.proposal import Proposal
    from precedent.decoding.sequence import DecodingSequence
    from precedent.planning.planner import Planner


class Beside:
    """Nothing goes on: every sample is drawn before the forward."""

    def at_hand(self, session: DrawSession) -> int | None:
        """Samples that a session made beside the last forward; None for one that draws when it is asked."""
        return None

    def forward(self, proposals: Sequence[Proposal], planner: Planner) -> AbstractContextManager[None]:
        """Entered before the target model scores these proposals, left when it has."""
        return nullcontext()

    def wait_for(self, scored: Sequence[Tensor]) -> None:
        """Called inside `forward` when the target's call has returned; its device may still be at work."""

    def late(self, proposal: Proposal) -> CandidateTree:
        """The tree to verify: the one that was scored, with what was drawn for it since."""
        return proposal.tree

    def settled(self, sequence: DecodingSequence) -> None:
        """Called when a sequence and its drafters know what a step committed."""


NOTHING = Beside()
