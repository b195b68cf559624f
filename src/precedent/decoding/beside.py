"""Work that runs during the target model's forward: none, unless a draft model draws then (`decoding.pearl`)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from torch import Tensor

from precedent.drafters.base import DrawSession
from precedent.tree import CandidateTree

if TYPE_CHECKING:
    from precedent.decoding.aids import Aids
    from precedent.decoding.proposal import Proposal
    from precedent.decoding.verification import Verified


class Beside:
    """Does nothing during the forward: every sample is drawn before it."""

    def at_hand(self, session: DrawSession) -> int | None:
        """Number of samples that a session drew during the last forward; None for a session that draws on request."""
        return None

    def forward(self, proposals: Sequence[Proposal], aids: Aids) -> AbstractContextManager[None]:
        """A context entered before the target model scores these proposals and left afterwards."""
        return nullcontext()

    def wait_for(self, scored: Sequence[Tensor]) -> None:
        """Called inside `forward` when the target's call has returned; its device may still be busy."""

    def late(self, proposal: Proposal, aids: Aids) -> CandidateTree:
        """The tree to verify: the scored one, extended by samples drawn since."""
        return proposal.tree

    def settled(self, verified: Verified, token_ids: Sequence[int]) -> None:
        """Called after a sequence and its drafters have learned that a step committed these tokens."""


NOTHING = Beside()
