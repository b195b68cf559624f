"""The drafter `eagle`: an EAGLE-3 head that somebody trained for the target, given as the draft model.

It draws as an MTP head does, one chain per step: each draw carries its distribution, in which tokens outside of the
head's vocabulary have probability 0.
"""

from __future__ import annotations

from precedent.drafters.model.conditioned import ConditionedDrafter


class EagleDrafter(ConditionedDrafter):
    """Drafts with an EAGLE-3 head."""

    name = "eagle"
