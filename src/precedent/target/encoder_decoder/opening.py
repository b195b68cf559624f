"""Wraps a model as a target of its kind, and refuses by name what encoder-decoder models cannot do."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from precedent.errors import UnsupportedError
from precedent.target.contract import Target
from precedent.target.encoder_decoder.settings import check_encoder_decoder, is_encoder_decoder
from precedent.target.encoder_decoder.target import EncoderDecoderTarget
from precedent.target.kv.layer_kinds import check_supported
from precedent.target.model import TargetModel

__all__ = ["check_loadable", "check_options", "is_encoder_decoder", "target_of"]

WHY_NOT = {
    "bitwise": "its attention does not round a row the same way in every forward",
    "cuda_graphs": "its forwards have no fixed size",
    "keep_prefixes": "its encoder reads a prompt whole, so the beginning of one cannot be kept",
}
"""Options that need a decoder-only model, and the reason."""


def target_of(model: PreTrainedModel | Target, *, bitwise: bool = False, cuda_graphs: bool = False) -> Target:
    """Wrap a model by its kind, or return a target as it is. Raises ConfigError or UnsupportedError."""
    if isinstance(model, Target) and not isinstance(model, TargetModel):
        return model
    if isinstance(model, TargetModel) or not is_encoder_decoder(model.config):
        return TargetModel.of(model, bitwise=bitwise, cuda_graphs=cuda_graphs)
    check_options(model.config.model_type, bitwise=bitwise, cuda_graphs=cuda_graphs)
    return EncoderDecoderTarget(model)


def check_loadable(config: Any) -> None:
    """Raise UnsupportedError, with the reason, for a model that can be neither target nor draft model."""
    if is_encoder_decoder(config):
        check_encoder_decoder(config)
    else:
        check_supported(config)


def check_options(model_type: str, **wanted: bool) -> None:
    """Raise UnsupportedError, naming option and reason, for the first option that is wanted."""
    for option in sorted(option for option, value in wanted.items() if value):
        raise UnsupportedError(
            f"{option}=True does not work with the encoder-decoder model {model_type} ({WHY_NOT[option]}): leave it out"
        )
