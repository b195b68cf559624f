"""Prepares a draft model to run beside its target in an engine."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from precedent.errors import UnsupportedError
from precedent.target.encoder_decoder.opening import target_of
from precedent.target.load.first_layers import exits_early
from precedent.target.model import TargetModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)


def draft_for(target: TargetModel, model: PreTrainedModel | None) -> tuple[TargetModel | None, bool]:
    """The draft model, and whether it is the target's own first layers (`exits_early`); (None, False) without one.

    If the target runs in forwards of fixed size, so does a draft model on the same kind of device: its forwards are the
    shortest, so launching their operations one by one costs it most. A draft that cannot runs without graphs, and the
    log says why; its tokens are the same. An early exit reads the target's arena, and also runs without graphs.
    """
    if model is None:
        return None, False
    draft = target_of(model)
    if draft.encodes_prompt and not target.encodes_prompt:
        raise UnsupportedError(
            f"the encoder-decoder model {model.config.model_type} drafts only for a target of its kind: give a "
            "decoder-only draft model"
        )
    early = exits_early(draft, target)
    graphs = next((each.cuda_graphs_beside for each in target.runner.backends if each.cuda_graphs_beside), None)
    if graphs is not None and not early and draft.device.type == target.device.type:
        try:
            draft.run_as_graphs(graphs)
        except UnsupportedError as error:
            log.warning("the draft model runs without graphs: %s", error)
    return draft, early
