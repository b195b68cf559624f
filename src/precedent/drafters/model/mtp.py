"""The drafter `mtp`: an MTP head from the target's checkpoint."""

from __future__ import annotations

from precedent.drafters.model.conditioned import ConditionedDrafter


class MtpDrafter(ConditionedDrafter):
    """Shares one head between all requests; each has its own KV cache of one layer, beside that of the target."""

    name = "mtp"
