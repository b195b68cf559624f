"""What the config of an EAGLE-3 head says: which layers of the target it reads, and which of its variants it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from transformers import PreTrainedConfig

from precedent.errors import ModelLoadError, UnsupportedError
from precedent.target.published import SPECULATORS, PublishedDraft

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True, slots=True)
class EagleSettings:
    """Which outputs of the target's layers a head reads, and its variant.

    `reads` are the target's layers, counted from 1. With `norm_before_residual` the first layer adds its output to the
    normed states, otherwise to the states themselves. `norms_before_fusion` stand before the fusion: none, one over all
    that is read, or one for each layer. With `norm_output` a draw reads the last output after the final norm.
    """

    reads: tuple[int, ...]
    target_hidden_size: int
    vocab_size: int
    norm_before_residual: bool = False
    norms_before_fusion: int = 0
    norm_output: bool = False

    @classmethod
    def of(cls, draft: PublishedDraft, target: PreTrainedConfig) -> Self:
        """The settings of a head beside a target of this text config.

        Raises ModelLoadError if it was trained for another, or does not say what its library always says;
        UnsupportedError for variants that are not read.
        """
        _check_target(draft, target)
        reads = _reads(draft, target.num_hidden_layers)
        return cls(
            reads=reads,
            target_hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
            norm_before_residual=_norm_before_residual(draft),
            norms_before_fusion=_norms_before_fusion(draft, len(reads)),
            norm_output=bool(draft.config.get("norm_output")),
        )


def _reads(draft: PublishedDraft, num_layers: int) -> tuple[int, ...]:
    """The layers that a head reads, counted from 1.

    At the top of a config, and in those of speculators, i is the output of layer i (vLLM's counting, in which 0 is the
    embeddings); below `eagle_config` it is that of layer i + 1 (SGLang's and SpecForge's).
    """
    config: dict[str, Any] = draft.config
    top = config.get(LAYER_IDS) or (config.get("aux_hidden_state_layer_ids") if draft.form == SPECULATORS else None)
    below = (config.get("eagle_config") or {}).get(LAYER_IDS)
    given = list(top) if top else [number + 1 for number in below] if below else []
    reads = given or [2, num_layers // 2, num_layers - 3]
    if len({*reads}) < len(reads) or not all(1 <= number <= num_layers for number in reads):
        says = "reads" if given else "names no layers that it reads, and the usual ones are"
        raise ModelLoadError(
            f"{draft} {says} the outputs of layers {', '.join(map(str, reads))}, and the target has the layers 1 to "
            f"{num_layers}: give the target that it was trained for"
        )
    return tuple(reads)


def _norm_before_residual(draft: PublishedDraft) -> bool:
    if draft.form == SPECULATORS and "norm_before_residual" not in draft.config:
        raise ModelLoadError(
            f"the config of {draft} does not say norm_before_residual, which its library writes: add it as the head "
            "was trained (true or false)"
        )
    return bool(draft.config.get("norm_before_residual"))


def _norms_before_fusion(draft: PublishedDraft, num_read: int) -> int:
    config = draft.config
    if (config.get("eagle_config") or {}).get("use_aux_hidden_state") is False:
        raise UnsupportedError(f"{draft} reads the target's last hidden state alone, which is not supported")
    if config.get("norm_before_fc") and config.get("fc_norm"):
        raise ModelLoadError(f"{draft} names norm_before_fc and fc_norm, and a head has one of them")
    return 1 if config.get("norm_before_fc") else num_read if config.get("fc_norm") else 0


def _check_target(draft: PublishedDraft, target: PreTrainedConfig) -> None:
    """Raise ModelLoadError for a head whose config names other sizes than the target's."""
    config = draft.config
    layers = (config.get("transformer_layer_config") or {}) if draft.form == SPECULATORS else config
    for name, found in (
        ("hidden_size", config.get("target_hidden_size") or layers.get("hidden_size")),
        ("vocab_size", layers.get("vocab_size")),
    ):
        own = getattr(target, name)
        if found is not None and found != own:
            raise ModelLoadError(
                f"{draft} was trained for a target of {name}={found}, and this one has {own}"
                + (f": give {draft.trained_for}" if draft.trained_for else ": give the target that it was trained for")
            )
