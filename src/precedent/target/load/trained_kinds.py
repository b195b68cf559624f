"""Loads what `precedent train-draft` wrote: layers beside the target, with its hidden states or without, or an exit."""

from __future__ import annotations

import logging
from pathlib import Path

from transformers import PreTrainedModel

from precedent.target.fingerprints import layers_fingerprint, name_of
from precedent.target.load.conditioned import conditioned_beside, fusion_from
from precedent.target.load.early_exit import exit_beside
from precedent.target.load.trained_draft import draft_beside, load_weights

log = logging.getLogger(__name__)


def load_trained(folder: Path, target: PreTrainedModel) -> PreTrainedModel:
    """Load a draft beside its target. Raises ModelLoadError, naming both, if it belongs to another target."""
    settings, weights = load_weights(folder, target)
    if settings.layers != layers_fingerprint(target):
        log.warning(
            "the draft model %s was trained for %s; %s has different layers: fewer of its tokens will be accepted",
            folder, settings.target, name_of(target),
        )  # fmt: skip
    if settings.exit_layer is not None:
        draft = exit_beside(target, settings.exit_layer, weights)
    elif settings.fusion is not None:
        fusion = fusion_from(settings.fusion, target, weights)
        draft = conditioned_beside(target, settings.initial_layers, fusion, weights)
    else:
        draft = draft_beside(target, settings.initial_layers, weights)
    return draft.requires_grad_(False)  # including the target's own modules, which need no gradients either
