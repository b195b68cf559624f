"""Loads an EAGLE-3 head beside its target: a Llama or Qwen3 of few layers whose first one also reads the target."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM, PreTrainedConfig, PreTrainedModel, Qwen3ForCausalLM

from precedent.errors import ModelLoadError, UnsupportedError
from precedent.target.borrowed import RawEmbeddings, RestrictedHead, linear
from precedent.target.draft_vocabulary import D2T, T2D, covered_tokens
from precedent.target.eagle.modules import EagleInputs, FirstLayer, Fusion
from precedent.target.eagle.settings import EagleSettings
from precedent.target.published import PublishedDraft

if TYPE_CHECKING:
    _Model = PreTrainedModel
else:
    _Model = object  # a second base of transformers would hide what the class of the layers sets

EMBEDDINGS, HEAD = "embed_tokens.weight", "lm_head.weight"

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
    if len({parameter.device for parameter in target.parameters()}) > 1:
        raise UnsupportedError("eagle needs the whole target on one device: load it there, or leave it out")
    text = target.config.get_text_config()
    settings, config, weights = EagleSettings.of(draft, text), draft.layers(text), draft.weights()
    head = _framed(config, settings)
    size = int(head.config.hidden_size)
    head.model.embed_tokens = EagleInputs(_embeddings(draft, weights, target, size))
    head.lm_head = _output_head(draft, weights, target, size)
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


def _embeddings(draft: PublishedDraft, weights: Weights, target: PreTrainedModel, hidden_size: int) -> RawEmbeddings:
    """The head's own embeddings, or the target's where it has none, or equal ones. Takes them out of `weights`."""
    theirs = RawEmbeddings(target.get_input_embeddings())
    own = weights.pop(EMBEDDINGS, None)
    if own is None and theirs.weight.shape[1] != hidden_size:
        raise ModelLoadError(
            f"{draft} has no {EMBEDDINGS}, and the target's embeddings have {theirs.weight.shape[1]} numbers where it "
            f"reads {hidden_size}: give the target that it was trained for"
        )
    expected = target.config.get_text_config().vocab_size, hidden_size
    if own is not None and own.shape != expected:
        raise _misshapen(draft, EMBEDDINGS, own, expected)
    return theirs if own is None else theirs.or_own(own)


def _output_head(draft: PublishedDraft, weights: Weights, target: PreTrainedModel, hidden_size: int) -> nn.Module:
    """The head's rows for the tokens that it covers, the target's where it has none. Takes them out of `weights`."""
    width = target.config.get_text_config().vocab_size
    own = weights.pop(HEAD, None)
    offsets = weights.get(D2T)
    num_rows = own.shape[0] if own is not None else width if offsets is None else offsets.numel()
    ids = covered_tokens(weights, num_rows, width, draft).to(target.device)
    for name in (D2T, T2D):
        weights.pop(name, None)
    if own is None:
        theirs: Any = target.get_output_embeddings()
        return theirs if num_rows == width else RestrictedHead.of(theirs, ids)
    if own.shape[1] != hidden_size:
        raise _misshapen(draft, HEAD, own, (num_rows, hidden_size))
    rows = linear(own.to(target.device, target.dtype))
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
            raise _misshapen(draft, name, given[name], tuple(tensor.shape))
    placed = {name: tensor.to(target.device, target.dtype) for name, tensor in given.items()}
    head.load_state_dict(placed, strict=False, assign=True)
    head.model.rotary_emb.to(target.device)


def _renamed(name: str) -> str:
    return next((ours + name.removeprefix(theirs) for theirs, ours in RENAMED if name.startswith(theirs)), name)


def _num_covered(head: Any) -> int:
    covered: Any = getattr(head.lm_head, "rows", head.lm_head)
    return int(covered.weight.shape[0])


def _misshapen(draft: PublishedDraft, name: str, found: Tensor, expected: tuple[int, ...]) -> ModelLoadError:
    return ModelLoadError(
        f"{name} of {draft} has the shape {tuple(found.shape)}, and its config and this target ask for {expected}: "
        "give the target that it was trained for"
    )
