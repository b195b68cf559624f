"""Reads DFlash drafts (2602.06036) that others trained and published, as block drafts.

Their layers are Qwen3's. They share the target's embeddings, whose row of a mask token stands for masked positions, and
its head, or have rows of their own for some tokens. They have no Markov term and no confidence.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from precedent.errors import ModelLoadError, UnsupportedError
from precedent.target.kv.layer_kinds import FULL_ATTENTION, SLIDING_ATTENTION, context_length
from precedent_drafts.block_draft import (
    LARGEST,
    SMALLEST,
    BlockDraft,
    BlockSettings,
    Qwen3BlockDraft,
    assembled,
    fill,
)
from precedent_drafts.heads import check_on_one_device
from precedent_drafts.published import (
    SPECULATORS,
    PublishedDraft,
    check_sizes,
    checked_reads,
    own_or_borrowed_embeddings,
    own_or_borrowed_rows,
)

RENAMED = {"fc.weight": "fusion.linear.weight", "hidden_norm.weight": "fusion.norm.weight"}
"""The names of tensors that are not ours."""

UNREAD = ("output_multiplier", "final_logit_softcapping", "input_embedding_scale", "use_swa", "attention_sink_bias")
"""Settings of variants whose layers or logits are others."""

Weights = dict[str, Tensor]

log = logging.getLogger(__name__)


def load_dflash(draft: PublishedDraft, target: PreTrainedModel) -> BlockDraft:
    """Load a draft beside its target, on its device and in its dtype.

    Raises ModelLoadError, naming what does not fit, for a draft of another target or with other tensors, and
    UnsupportedError for variants that are not read and for a target that is spread over devices.
    """
    check_on_one_device(target, "block-draft")
    text, dtype = target.config.get_text_config(), target.dtype
    config: Any = draft.layers(text)
    weights = draft.weights()
    table = own_or_borrowed_embeddings(draft, weights, target, text.hidden_size)
    rows, ids = own_or_borrowed_rows(draft, weights, target, text.hidden_size)
    settings = dflash_settings(draft, text, ids.numel())
    config.vocab_size = 1  # embeddings and head are given
    with torch.device("meta"):
        layers = Qwen3BlockDraft(config)
    made = assembled(layers, settings, table, rows, ids, dtype)
    own = {RENAMED.get(name, name): tensor for name, tensor in weights.items()} | _parts_it_lacks(made, draft, table)
    fill(made, own, str(draft))
    log.info("%s fills %d positions and reads layers %s", draft, settings.block_size, settings.reads)
    made.requires_grad_(False)
    return made


def dflash_settings(draft: PublishedDraft, target: PreTrainedConfig, num_head_tokens: int) -> BlockSettings:
    """What a draft's config says, beside a target of this text config; it reads the whole text.

    Raises ModelLoadError for another target's draft, and UnsupportedError for variants that are not read.
    """
    layers: Any = draft.layers(target)
    _check_variant(draft, layers)
    check_sizes(draft, target, hidden_size=layers.hidden_size, vocab_size=layers.vocab_size)
    return BlockSettings(
        target=draft.trained_for or "", embeddings="", layers="", reads=_reads(draft, target.num_hidden_layers),
        hidden_size=layers.hidden_size, num_head_tokens=num_head_tokens, intermediate_size=layers.intermediate_size,
        num_heads=layers.num_attention_heads, num_kv_heads=layers.num_key_value_heads, head_dim=layers.head_dim,
        rope_theta=layers.rope_parameters["rope_theta"], rms_norm_eps=layers.rms_norm_eps,
        num_layers=layers.num_hidden_layers, block_size=_block_size(draft), context_tokens=context_length(target),
        markov_rank=0,
    )  # fmt: skip


def value(draft: PublishedDraft, name: str) -> Any:
    """A setting of DFlash's own, which stands at the top of a config or below `dflash_config`."""
    return (draft.config.get("dflash_config") or {}).get(name, draft.config.get(name))


def _check_variant(draft: PublishedDraft, layers: Any) -> None:
    """Raise UnsupportedError for other variants, ModelLoadError for windows of no size.

    In layers with a window a block's rows see those before them alone, in the others they all see each other.
    """
    found = [name for name in UNREAD if value(draft, name) not in (None, False, 1.0)]
    causal = {value(draft, "causal"), draft.config.get("is_causal")}
    windows = SLIDING_ATTENTION in layers.layer_types
    if True in causal and FULL_ATTENTION in layers.layer_types:
        found.append("causal blocks")
    if windows and (False in causal or draft.config.get("sliding_window_non_causal")):
        found.append("windows that see ahead")
    if draft.config.get("sample_from_anchor"):
        found.append("sample_from_anchor")
    if found:
        raise UnsupportedError(f"{draft} is a variant that is not read ({found[0]}): give another draft")
    if windows and not layers.sliding_window:
        raise ModelLoadError(f"{draft} has layers with a window and does not say how wide it is: get its config again")


def _block_size(draft: PublishedDraft) -> int:
    """How many positions a block fills: its makers count the last token in."""
    size = value(draft, "block_size")
    if not isinstance(size, int) or not SMALLEST <= size - 1 <= LARGEST:
        raise ModelLoadError(
            f"{draft} has block_size={size!r}, and blocks of {SMALLEST + 1} to {LARGEST + 1} are read, the last token "
            "included: give another draft"
        )
    return size - 1


def _reads(draft: PublishedDraft, num_layers: int) -> tuple[int, ...]:
    """The layers that a draft reads, counted from 1: z-lab's i is the output of layer i + 1, speculators' that of i."""
    if draft.form == SPECULATORS:
        given = draft.config.get("aux_hidden_state_layer_ids")
    else:
        given = [number + 1 for number in value(draft, "target_layer_ids") or ()]
    if not given:
        raise ModelLoadError(f"the config of {draft} does not say which layers it reads: get it again from its makers")
    return checked_reads(draft, given, num_layers)


def _parts_it_lacks(made: BlockDraft, draft: PublishedDraft, table: Any) -> Weights:
    """The mask, out of the embeddings; no Markov term, and a confidence that says nothing."""
    mask = value(draft, "mask_token_id")
    if not isinstance(mask, int) or not 0 <= mask < table.num_embeddings:
        raise ModelLoadError(
            f"{draft} has the mask token {mask!r}, and the embeddings have {table.num_embeddings} rows: give the "
            "target that it was trained for"
        )
    own = made.own_weights()
    nothing = {name: torch.zeros_like(own[name]) for name in own if name.startswith(("markov.", "confidence."))}
    return nothing | {"mask": table(torch.tensor(mask))}
