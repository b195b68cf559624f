"""A draft model as an engine runs it beside its target."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from precedent.errors import UnsupportedError
from precedent.target.load.first_layers import exits_early
from precedent.target.model import TargetModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)


def draft_for(target: TargetModel, model: PreTrainedModel | None) -> tuple[TargetModel | None, bool]:
    """The draft model, and whether it is the target's own first layers (`exits_early`); (None, False) without one.

    Where the target runs in forwards of fixed size, a draft model of the same kind of device does so too: its forwards
    are the shortest, and launching their operations one by one takes longest beside them. One that cannot goes without,
    which changes no token, and the log says why. An early exit reads the target's arena, and goes without as well.
    """
    if model is None:
        return None, False
    draft = TargetModel(model)
    early = exits_early(draft, target)
    if target.static is not None and not early and draft.device.type == target.device.type:
        try:
            draft.run_in_sizes(target.static.settings_beside)
        except UnsupportedError as error:
            log.warning("the draft model runs without graphs: %s", error)
    return draft, early
