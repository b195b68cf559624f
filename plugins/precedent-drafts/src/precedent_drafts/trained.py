"""A trained draft model on disk: a few layers that go between its target's own embeddings and head.

A folder holds `draft.json`, which names its target, and `draft.safetensors`: the weights of the layers and, if the head
covers only the most frequent tokens, their ids. Embeddings, final norm and head are the target's.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from precedent.errors import ModelLoadError
from precedent.target.fingerprints import embeddings_fingerprint, layers_fingerprint, name_of
from precedent.target.load.first_layers import base_of, frame_of, layers_of, whole
from precedent_drafts.borrowed import HEAD_TOKENS, restrict_head
from precedent_drafts.files import save_json, save_tensors

SETTINGS_FILE, WEIGHTS_FILE = "draft.json", "draft.safetensors"

FORMAT = 1
"""Increase it whenever an older version of this file could not read the folder."""

Weights = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class DraftSettings:
    """Which target a draft belongs to, and its shape.

    `embeddings` is the fingerprint of the target's embeddings and head, without which the weights are useless; `layers`
    is that of its layers. Beside a model with the same embeddings but other layers the draft works, but fewer of its
    tokens are accepted. Training began from the target's layers `initial_layers`; `num_head_tokens` None means the
    whole vocabulary. With `exit_layer` it is an exit behind that layer of the target, counted from 1;
    with `fusion` its layers also read the target's hidden states (`conditioned`).
    """

    target: str
    embeddings: str
    layers: str
    initial_layers: tuple[int, ...]
    num_head_tokens: int | None = None
    exit_layer: int | None = None
    fusion: str | None = None
    format: int = FORMAT

    @classmethod
    def of(cls, target: PreTrainedModel, **settings: Any) -> Self:
        """The settings of a draft of this target."""
        fingerprints = embeddings_fingerprint(target), layers_fingerprint(target)
        return cls(name_of(target), *fingerprints, **({"initial_layers": ()} | settings))

    @property
    def kind(self) -> str:
        """What the folder holds, in words."""
        if self.exit_layer is not None:
            return f"an exit behind layer {self.exit_layer}"
        return "a chain" if self.fusion is None else "a chain that reads its target"


def draft_beside(
    target: PreTrainedModel, initial_layers: Sequence[int], weights: Weights, dtype: torch.dtype | None = None
) -> PreTrainedModel:
    """A draft model from its own weights and the target's embeddings and head, on the target's device.

    `dtype` None is the target's. Raises ModelLoadError if a weight is missing or has another shape, UnsupportedError if
    layers cannot be set between the target's embeddings and head.
    """
    draft = frame_of(target, initial_layers)
    for place, index in enumerate(initial_layers):
        layer, original = base_of(draft).layers[place], layers_of(target)[index]
        _fill(layer, original, _below(weights, f"layers.{place}."))
        layer.to(dtype or target.dtype).eval()
    if HEAD_TOKENS in weights:
        restrict_head(draft, target, weights[HEAD_TOKENS])
    return whole(draft, target)


def initial_weights(target: PreTrainedModel, initial_layers: Sequence[int]) -> dict[str, Tensor]:
    """The weights with which training begins: those of some of the target's layers, not copied."""
    layers = layers_of(target)
    return {
        f"layers.{place}.{name}": tensor
        for place, index in enumerate(initial_layers)
        for name, tensor in layers[index].state_dict().items()
    }


def save_draft(folder: Path, settings: DraftSettings, weights: Weights) -> None:
    """Write a draft's folder; `draft.json` is written last, so an incomplete folder is not taken for a draft."""
    save_tensors(folder / WEIGHTS_FILE, weights)
    save_json(folder / SETTINGS_FILE, dataclasses.asdict(settings))


def holds_draft(place: str | Path) -> bool:
    """Whether `place` is a folder of a trained draft model."""
    return (Path(place).expanduser() / SETTINGS_FILE).is_file()


def read_settings(folder: Path) -> DraftSettings:
    """The content of `draft.json`. Raises ModelLoadError if this version does not understand it."""
    try:
        found = json.loads((folder / SETTINGS_FILE).read_text(encoding="utf-8"))
        if found["format"] != FORMAT:
            raise ModelLoadError(
                f"the draft model {folder} has format {found['format']}, this version reads {FORMAT}; train it again"
            )
        return DraftSettings(**{**found, "initial_layers": tuple(found["initial_layers"])})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ModelLoadError(f"{folder / SETTINGS_FILE} cannot be read ({error!r}); train the draft again") from error


def load_weights(folder: Path, target: PreTrainedModel) -> tuple[DraftSettings, dict[str, Tensor]]:
    """The content of a draft's folder. Raises ModelLoadError, naming both, if it uses another target's embeddings."""
    settings, name = read_settings(folder), name_of(target)
    if settings.embeddings != embeddings_fingerprint(target):
        raise ModelLoadError(
            f"the draft model {folder} was trained for {settings.target} and uses its embeddings, which differ from "
            f"those of {name}; give {settings.target} as the target, or train a draft for {name} with precedent "
            "train-draft"
        )
    return settings, load_file(folder / WEIGHTS_FILE)


def _below(weights: Weights, prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}


def _fill(layer: nn.Module, original: nn.Module, weights: Weights) -> None:
    """Give a layer on the meta device its weights, and the device and buffers of a layer of the target."""
    place = next(original.parameters()).device
    try:
        layer.to_empty(device=place).load_state_dict(dict(weights))
    except RuntimeError as error:
        raise ModelLoadError(f"the weights of the draft model do not fit: {' '.join(str(error).split())}") from error
    for name, buffer in original.named_buffers():
        layer.get_buffer(name).copy_(buffer)
