"""Heads for multi-token prediction (MTP) that a checkpoint carries beside its model; transformers drops their weights.

DeepSeek-V3 (2412.19437, equations 21 to 23) trains a layer that reads, at position i, the embedding of token i + 1 and
the target's hidden state of token i, and predicts token i + 2:
`layer(projection([embedding_norm(embedding), hidden_norm(hidden state)]))`, then a norm and the target's own head.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from torch import Tensor, nn
from transformers import PreTrainedModel

from precedent.errors import ConfigError, ModelLoadError, UnsupportedError
from precedent.target.load.first_layers import base_of, layers_of
from precedent.target.load.source import explained
from precedent.target.load.weight_files import INDEX, WHOLE
from precedent.target.model import TargetModel
from precedent_drafts.checkpoint import safetensors_in
from precedent_drafts.heads import GivenStates, HeadModel, check_on_one_device, reading_hidden_states

COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")
"""Names that configs give to the number of MTP layers."""


@dataclass(frozen=True, slots=True)
class Family:
    """The names of a head's tensors in a checkpoint, and what a second draw reads.

    `layer` begins the names of its decoder layer; `projection`, `embedding_norm`, `hidden_norm` and `norm` are modules,
    each with a `weight`. `copies` begin the names of what repeats the target's own weights. The next draw reads the
    layer's output after `norm` if `feeds_back_normed`, otherwise before it.
    """

    layer: str
    projection: str
    embedding_norm: str
    hidden_norm: str
    norm: str
    feeds_back_normed: bool
    copies: tuple[str, ...] = ()

    @property
    def prefixes(self) -> tuple[str, ...]:
        """What the names of all tensors of a head begin with."""
        return self.layer, *(f"{name}." for name in self.modules)

    @property
    def modules(self) -> tuple[str, ...]:
        """The names of the modules around the layer."""
        return self.projection, self.embedding_norm, self.hidden_norm, self.norm


def _like_deepseek(num_layers: int) -> Family:
    """A layer more than the model has, with the other modules inside it (vLLM: deepseek_mtp.py, glm4_moe_mtp.py)."""
    layer = f"model.layers.{num_layers}."
    return Family(
        layer,
        projection=f"{layer}eh_proj",
        embedding_norm=f"{layer}enorm",
        hidden_norm=f"{layer}hnorm",
        norm=f"{layer}shared_head.norm",
        feeds_back_normed=False,
        copies=(f"{layer}embed_tokens.", f"{layer}shared_head.head."),
    )


def _like_qwen(num_layers: int) -> Family:
    """Modules of their own below `mtp` (vLLM: qwen3_next_mtp.py, qwen3_5_mtp.py)."""
    return Family(
        "mtp.layers.0.",
        projection="mtp.fc",
        embedding_norm="mtp.pre_fc_norm_embedding",
        hidden_norm="mtp.pre_fc_norm_hidden",
        norm="mtp.norm",
        feeds_back_normed=True,
    )


FAMILIES = {
    "deepseek_v3": _like_deepseek,
    "glm4_moe": _like_deepseek,
    "glm4_moe_lite": _like_deepseek,
    "qwen3_next": _like_qwen,
    "qwen3_5_text": _like_qwen,
    "qwen3_5_moe_text": _like_qwen,
}
"""Model types whose heads are known."""


def family_of(config: Any) -> Family:
    """The family of a text model's config. Raises ConfigError, or UnsupportedError for a head that is not known."""
    count, name = declared_heads(config), config.model_type
    if name in FAMILIES:
        if count is not None and count > 1:
            raise UnsupportedError(f"this {name} has {count} MTP layers, and mtp runs only one: draft without mtp")
        return FAMILIES[name](config.num_hidden_layers)
    if count:
        raise UnsupportedError(
            f"the config of this {name} names MTP layers, and mtp knows those of {', '.join(FAMILIES)}: leave mtp out "
            "of the drafters"
        )
    raise ConfigError(f"{name} has no MTP head: leave mtp out of the drafters, or give a draft model instead")


def declared_heads(config: Any) -> int | None:
    """How many MTP layers a text model's config names; None if it says nothing."""
    named = (getattr(config, name, None) for name in COUNTS)
    return next((count for count in named if isinstance(count, int)), None)


def tensors_below(prefixes: tuple[str, ...], config: Any) -> dict[str, Tensor]:
    """The tensors whose names begin with one of `prefixes`, from the checkpoint that a config was loaded from.

    Raises ConfigError where there are no such files.
    """
    folder = _folder(config)
    if not ((folder / INDEX).is_file() or (folder / WHOLE).is_file()):
        raise _no_files(str(folder))
    return safetensors_in(folder, prefixes)


def _folder(config: Any) -> Path:
    """The checkpoint's folder, or that of its download."""
    source = config._name_or_path
    if source and Path(source).is_dir():
        return Path(source)
    try:
        revision = getattr(config, "_commit_hash", None)
        return Path(snapshot_download(source, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError) as error:
        raise _no_files(source) from error


def _no_files(source: str) -> ConfigError:
    return ConfigError(
        f"mtp reads the safetensors files of the target, and there are none at {source!r}: load the target by the name "
        "or folder of a checkpoint that has them, or leave mtp out of the drafters"
    )


ONE_LAYER = {
    "num_hidden_layers": 1,
    "layer_types": ["full_attention"],
    "mlp_layer_types": ["sparse"],
    "first_k_dense_replace": 0,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
    "tie_word_embeddings": False,
    "pad_token_id": None,
}
"""Settings of a head's config, where the target's has them: one layer with full attention, and experts if any has."""

SHARED = frozenset({"model.embed_tokens.weight", "lm_head.weight"})
"""Weights that a head takes from its target."""


class FusedInputs(GivenStates):
    """What an MTP head's layer reads: the projection of normed embeddings beside normed hidden states."""

    def __init__(self, embeddings: nn.Module, norms: Sequence[nn.Module], projection: nn.Module) -> None:
        super().__init__(embeddings)
        self.projection = projection
        self.embedding_norm, self.hidden_norm = norms

    def fused(self, embedded: Tensor, states: Tensor) -> Tensor:
        """The projection of both inputs."""
        both = torch.cat([self.embedding_norm(embedded), self.hidden_norm(states)], dim=-1)
        projected: Tensor = self.projection(both)
        return projected


def load_head(target: PreTrainedModel, family: Family) -> PreTrainedModel:
    """The head in the target's checkpoint, on its device and in its dtype, with the target's own embeddings and head.

    Raises ConfigError where the checkpoint's files are not at hand or hold no head, ModelLoadError for tensors that
    are missing or do not fit, UnsupportedError for a target that is spread over devices.
    """
    layers_of(target)  # raises UnsupportedError if the layers are elsewhere
    check_on_one_device(target, "mtp")
    with explained(target.config._name_or_path, "the MTP head of"):
        tensors = _checked(tensors_below(family.prefixes, target.config), family, target)
    head = _one_layer(target, _as_first_layer(tensors, family))
    base_of(head).embed_tokens = _inputs(target, family, tensors, base_of(head).norm)
    head.set_output_embeddings(target.get_output_embeddings())
    head.config.vocab_size = target.config.get_text_config().vocab_size
    head.eval().requires_grad_(False)
    return head


def _inputs(target: PreTrainedModel, family: Family, tensors: Mapping[str, Tensor], norm: nn.Module) -> FusedInputs:
    """What stands before the layer; its norms are of the class of `norm`."""
    embeddings: Any = target.get_input_embeddings()
    norms = [_filled(copy.deepcopy(norm), tensors, name) for name in (family.embedding_norm, family.hidden_norm)]
    size = target.config.get_text_config().hidden_size
    projection = nn.Linear(2 * size, size, bias=False, device=target.device, dtype=target.dtype)
    return FusedInputs(embeddings, norms, _filled(projection, tensors, family.projection))


def _checked(tensors: Mapping[str, Tensor], family: Family, target: PreTrainedModel) -> dict[str, Tensor]:
    """The tensors without copies of the target's own. Raises ModelLoadError, naming what is missing."""
    source, config = target.config._name_or_path, target.config.get_text_config()
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(family.copies)}
    missing = [name for name in family.modules if f"{name}.weight" not in kept]
    if missing:
        says = "its config names one" if declared_heads(config) else "mtp needs one"
        raise ModelLoadError(
            f"the checkpoint {source} holds no whole MTP head, and {says}: {missing[0]}.weight is not in its files; "
            "get them all from the model's makers (conversions often drop the head), or leave mtp out of the drafters"
        )
    strange = [name for name, tensor in kept.items() if tensor.dtype.itemsize < 2 or "scale" in name]
    if strange:
        raise UnsupportedError(f"the MTP head in {source} is quantised ({min(strange)}), which mtp does not support")
    return kept


def _as_first_layer(tensors: Mapping[str, Tensor], family: Family) -> dict[str, Tensor]:
    """The layer and the norm behind it under the names of a checkpoint with one layer."""
    around = tuple(f"{name}." for name in family.modules)
    inside = {name: tensor for name, tensor in tensors.items() if not name.startswith(around)}
    renamed = {name.replace(family.layer, "model.layers.0.", 1): tensor for name, tensor in inside.items()}
    return renamed | {"model.norm.weight": tensors[f"{family.norm}.weight"]}


def _one_layer(target: PreTrainedModel, weights: dict[str, Tensor]) -> PreTrainedModel:
    """A model of the target's class from the weights of one layer; transformers converts them as it does its own."""
    config = copy.deepcopy(target.config.get_text_config())
    for name, value in ONE_LAYER.items():
        if hasattr(config, name):
            setattr(config, name, value)
    config.vocab_size = 1  # embeddings and head are the target's
    vars(config).pop("quantization_config", None)  # a target that was quantised at load has a head that is not
    source, loader = target.config._name_or_path, type(target)
    with explained(source, "the MTP head of"):
        loaded: Any = loader.from_pretrained(
            None, config=config, state_dict=weights, dtype=target.dtype, output_loading_info=True
        )
    head, report = loaded
    wrong = sorted({*report["missing_keys"], *report["unexpected_keys"]} - SHARED)
    if wrong:
        raise ModelLoadError(f"the MTP head in {source} does not fit a layer of {loader.__name__}: {wrong[0]}")
    ready: PreTrainedModel = head.to(target.device)
    return ready


def _filled(module: Any, tensors: Mapping[str, Tensor], name: str) -> Any:
    """A module with its weight from the checkpoint. Raises ModelLoadError for one of another shape."""
    weight = tensors[f"{name}.weight"]
    if weight.shape != module.weight.shape:
        raise ModelLoadError(
            f"{name}.weight of the MTP head has the shape {tuple(weight.shape)}, and the target's size asks for "
            f"{tuple(module.weight.shape)}"
        )
    with torch.no_grad():
        module.weight.copy_(weight)
    return module


def mtp_beside(target: TargetModel) -> HeadModel:
    """The head in a target's checkpoint, ready to draft; the target keeps hidden states from now on.

    Raises ConfigError where there is none, UnsupportedError and ModelLoadError where the head cannot be used, each
    naming the reason.
    """
    family = family_of(target.model.config.get_text_config())
    target.keep_hidden_states()  # before anything is read: it may be refused
    head = load_head(target.model, family)
    return reading_hidden_states(head, target, feeds_back_normed=family.feeds_back_normed)
