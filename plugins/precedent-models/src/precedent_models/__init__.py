"""Models that core does not run: hybrids with recurrent layers, layers with indexers, encoder-decoder models.

`SUPPORT` is what the entry point names. `layers` says how hybrids, on `recurrent`, and layers with indexers
run; `encoder_decoder` is a target of its own.
"""

from __future__ import annotations

from typing import Any

from precedent.target.contract import Target
from precedent.target.kv.layer_kinds import OF_A_PACKAGE, attention_kinds
from precedent.target.support import LayerState, ModelSource, ModelSupport, TargetOptions

__all__ = ["SUPPORT"]


class MoreModels(ModelSupport):
    """The hooks of this package. Each imports what it needs when a model asks for it."""

    def recognises(self, source: ModelSource, options: TargetOptions) -> bool:
        """Whether a model reads its prompt with an encoder.

        Raises UnsupportedError for one that cannot be a target, or not with these options.
        """
        if not getattr(source.config, "is_encoder_decoder", False):
            return False
        from precedent_models.encoder_decoder.target import check_encoder_decoder, check_options

        check_encoder_decoder(source.config)
        check_options(source.config, options)
        return True

    def load(self, source: ModelSource, options: TargetOptions) -> Target:
        """An encoder-decoder model as a target; `source` holds the model."""
        from precedent_models.encoder_decoder.target import EncoderDecoderTarget

        assert source.model is not None, "core loads the weights of transformers' models"
        return EncoderDecoderTarget(source.model)

    def layer_state(self, config: Any) -> LayerState | None:
        """How to run a text model with recurrent layers or indexers; None for other models."""
        kinds = attention_kinds(config) & OF_A_PACKAGE
        if not kinds:
            return None
        from precedent_models.layers import HybridLayers

        return HybridLayers(kinds, config)


SUPPORT = MoreModels()
