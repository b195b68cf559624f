"""The drafter `mtp`: an MTP head from the target's checkpoint."""

from __future__ import annotations

from precedent.drafters.model.conditioned import ConditionedDrafter


class MtpDrafter(ConditionedDrafter):
    """Drafts with the MTP head of the target's checkpoint."""

    name = "mtp"
