"""EAGLE-3 heads (2503.01840) that others trained and published, as draft models of their target.

A head is a Llama or Qwen3 of few layers. The first one reads the outputs of a few of the target's layers, fused, beside
the embedding of the next token: it attends to `[norm(embedding), norm(state)]`, twice as wide as the head (section
3.1). Behind the committed text the head's own output takes their place.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM, PreTrainedConfig, PreTrainedModel, Qwen3ForCausalLM

from precedent.errors import ModelLoadError, UnsupportedError
from precedent.target.kv.cache import KVCache
from precedent.target.model import TargetModel
from precedent_drafts.heads import GivenStates, HeadModel, RestrictedHead, check_on_one_device
from precedent_drafts.published import (
    SPECULATORS,
    PublishedDraft,
    check_sizes,
    checked_reads,
    misshapen,
    own_or_borrowed_embeddings,
    own_or_borrowed_rows,
)

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
        _check_variant(draft, target)
        config, reads = draft.config, _reads(draft, target.num_hidden_layers)
        return cls(
            reads=reads,
            target_hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
            norm_before_residual=bool(config.get("norm_before_residual")),
            norms_before_fusion=1 if config.get("norm_before_fc") else len(reads) if config.get("fc_norm") else 0,
            norm_output=bool(config.get("norm_output")),
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
    says = "reads" if given else "names no layers that it reads, and the usual ones are"
    return checked_reads(draft, given or [2, num_layers // 2, num_layers - 3], num_layers, says)


def _check_variant(draft: PublishedDraft, target: PreTrainedConfig) -> None:
    """Raise ModelLoadError for another target's head or a torn config, UnsupportedError for what is not read."""
    config = draft.config
    layers = (config.get("transformer_layer_config") or {}) if draft.form == SPECULATORS else config
    size = config.get("target_hidden_size") or layers.get("hidden_size")
    check_sizes(draft, target, hidden_size=size, vocab_size=layers.get("vocab_size"))
    if draft.form == SPECULATORS and "norm_before_residual" not in config:
        raise ModelLoadError(
            f"the config of {draft} does not say norm_before_residual, which its library writes: add it as the head "
            "was trained (true or false)"
        )
    if (config.get("eagle_config") or {}).get("use_aux_hidden_state") is False:
        raise UnsupportedError(f"{draft} reads the target's last hidden state alone, which is not supported")
    if config.get("norm_before_fc") and config.get("fc_norm"):
        raise ModelLoadError(f"{draft} names norm_before_fc and fc_norm, and a head has one of them")


class EagleInputs(GivenStates):
    """What the first layer reads: embeddings beside states, `[1, rows, 2 * hidden_size]`."""

    def fused(self, embedded: Tensor, states: Tensor) -> Tensor:
        """Both, side by side."""
        return torch.cat([embedded.to(states.dtype), states], dim=-1)


class Fusion(nn.Module):
    """The outputs of several of the target's layers as one vector per token."""

    def __init__(self, width: int, hidden_size: int, norms: Sequence[nn.Module]) -> None:
        super().__init__()
        self.norms = nn.ModuleList(norms)
        self.fc = nn.Linear(width, hidden_size, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        """`[..., width]` to `[..., hidden_size]`; each norm takes an equal part of the width."""
        states = states.to(self.fc.weight.dtype)
        if len(self.norms):
            parts = states.chunk(len(self.norms), dim=-1)
            states = torch.cat([norm(part) for norm, part in zip(self.norms, parts, strict=True)], dim=-1)
        fused: Tensor = self.fc(states)
        return fused


class FirstLayer(nn.Module):
    """A decoder layer of the usual parts, whose attention reads embeddings and states side by side."""

    def __init__(self, layer: Any, *, norm_before_residual: bool) -> None:
        super().__init__()
        self.self_attn, self.mlp = layer.self_attn, layer.mlp
        self.input_layernorm, self.post_attention_layernorm = layer.input_layernorm, layer.post_attention_layernorm
        self.hidden_norm = copy.deepcopy(layer.input_layernorm)
        self._norm_before_residual = norm_before_residual
        self.attention_type = getattr(layer, "attention_type", None)  # some transformers choose a layer's mask by it
        for name in ("q_proj", "k_proj", "v_proj"):
            part = getattr(self.self_attn, name)
            wide = nn.Linear(2 * part.in_features, part.out_features, part.bias is not None, part.weight.device)
            setattr(self.self_attn, name, wide)

    def forward(self, hidden_states: Tensor, **given: Any) -> Tensor:
        """Embeddings beside states, `[1, rows, 2 * hidden_size]`, to `[1, rows, hidden_size]`."""
        embedded, states = hidden_states.chunk(2, dim=-1)
        normed = self.hidden_norm(states)
        read = torch.cat([self.input_layernorm(embedded), normed], dim=-1)
        attended, _ = self.self_attn(hidden_states=read, **given)
        hidden = (normed if self._norm_before_residual else states) + attended
        output: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return output


if TYPE_CHECKING:
    _Model = PreTrainedModel
else:
    _Model = object  # a second base of transformers would hide what the class of the layers sets

RENAMED = (
    ("midlayer.", "model.layers.0."),
    ("layers.", "model.layers."),
    ("norm.", "model.norm."),
    ("fc.", "fusion.fc."),
    ("fc_norm.", "fusion.norms."),
    ("input_norm.", "fusion.norms.0."),
)
"""How the names of a published head's tensors begin, and those of ours."""

Weights = dict[str, Tensor]

log = logging.getLogger(__name__)


class EagleHead(_Model):
    """A head as a causal model. Its logits are as wide as the target's; tokens that it does not cover have -inf."""

    settings: EagleSettings
    fusion: Fusion


class LlamaEagle(EagleHead, LlamaForCausalLM):
    """A head of Llama's layers."""


class Qwen3Eagle(EagleHead, Qwen3ForCausalLM):
    """A head of Qwen3's layers."""


CLASSES: dict[str, Any] = {"llama": LlamaEagle, "qwen3": Qwen3Eagle}


def load_eagle(draft: PublishedDraft, target: PreTrainedModel) -> EagleHead:
    """Load a head beside its target, on its device and in its dtype.

    Raises ModelLoadError, naming what does not fit, for a head of another target or with other tensors, and
    UnsupportedError for variants that are not read and for a target that is spread over devices.
    """
    check_on_one_device(target, "eagle")
    text = target.config.get_text_config()
    settings, config, weights = EagleSettings.of(draft, text), draft.layers(text), draft.weights()
    head = _framed(config, settings)
    size = int(head.config.hidden_size)
    head.model.embed_tokens = EagleInputs(own_or_borrowed_embeddings(draft, weights, target, size))
    head.lm_head = _output_head(*own_or_borrowed_rows(draft, weights, target, size), settings.vocab_size)
    _fill(draft, head, weights, target)
    head.config.vocab_size = settings.vocab_size
    log.info(
        "%s reads layers %s and covers %d of %d tokens; it was trained for %s",
        draft, settings.reads, _num_covered(head), settings.vocab_size, draft.trained_for or "a target without a name",
    )  # fmt: skip
    head.eval().requires_grad_(False)
    ready: EagleHead = head
    return ready


def _framed(config: PreTrainedConfig, settings: EagleSettings) -> Any:
    """A head without weights: its modules are on the meta device, but for the rotary embeddings."""
    made: Any = config
    with torch.device("meta"):
        head: Any = CLASSES[config.model_type](config)
        head.settings, width = settings, len(settings.reads) * settings.target_hidden_size
        head.model.layers[0] = FirstLayer(head.model.layers[0], norm_before_residual=settings.norm_before_residual)
        count, norm = settings.norms_before_fusion, type(head.model.norm)
        norms = [norm(width // count, eps=made.rms_norm_eps) for _ in range(count)]
        head.fusion = Fusion(width, made.hidden_size, norms)
    head.model.rotary_emb = type(head.model.rotary_emb)(config)
    return head


def _output_head(rows: nn.Module, ids: Tensor, width: int) -> nn.Module:
    """A head of these rows, whose logits are as wide as the target's."""
    return rows if torch.equal(ids, torch.arange(width, device=ids.device)) else RestrictedHead(rows, ids, width)


def _fill(draft: PublishedDraft, head: Any, weights: Weights, target: PreTrainedModel) -> None:
    """Give the layers their weights. Raises ModelLoadError, naming what is missing, too much or misshapen."""
    given = {_renamed(name): tensor for name, tensor in weights.items()}
    empty = {name: tensor for name, tensor in head.state_dict().items() if tensor.is_meta}
    for name in sorted(empty.keys() ^ given.keys()):
        says = "lacks" if name in empty else "has more than is read:"
        raise ModelLoadError(f"{draft} {says} {name}: get all of its files again, or give another draft")
    for name, tensor in empty.items():
        if given[name].shape != tensor.shape:
            raise misshapen(draft, name, given[name], tuple(tensor.shape))
    placed = {name: tensor.to(target.device, target.dtype) for name, tensor in given.items()}
    head.load_state_dict(placed, strict=False, assign=True)
    head.model.rotary_emb.to(target.device)


def _renamed(name: str) -> str:
    return next((ours + name.removeprefix(theirs) for theirs, ours in RENAMED if name.startswith(theirs)), name)


def _num_covered(head: Any) -> int:
    covered: Any = getattr(head.lm_head, "rows", head.lm_head)
    return int(covered.out_features)


def eagle_beside(head: EagleHead, target: TargetModel) -> HeadModel:
    """A head as a draft model; the target keeps the outputs of layers from now on.

    Raises UnsupportedError, naming why, where they cannot be kept.
    """
    outputs = target.keep_layer_outputs(head.settings.reads)

    def read(kv: KVCache, first: int, end: int) -> Tensor:
        fused: Tensor = head.fusion(outputs.of(kv, first, end))
        return fused

    return HeadModel(head, read, feeds_back_normed=head.settings.norm_output)
