"""Recognises the folders in which others publish drafts that read their target, and refuses other kinds by name.

Read are EAGLE-3 heads (2503.01840), as SafeAILab and SpecForge write them, and DFlash drafts (2602.06036), as z-lab and
SpecForge write them; both also as the library `speculators` does, which keeps the config of the layers in a config of
its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import snapshot_download
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedConfig, PreTrainedModel, Qwen3Config

from precedent.errors import ModelLoadError, UnsupportedError
from precedent.runtime.plain_values import first_line
from precedent.target.kv.layer_kinds import (
    FULL_ATTENTION,
    LENGTH_DEPENDENT_ROPE,
    SLIDING_ATTENTION,
    context_length,
)
from precedent.target.load.draft_folders import OWN_VOCABULARY, architecture_of, config_at, is_named_draft
from precedent.target.load.weight_files import INDEX, OLDER, safetensors_files, tensor_names
from precedent_drafts.checkpoint import CONFIG, config_in, tensors_in
from precedent_drafts.heads import RawEmbeddings, RestrictedHead, linear

EAGLE, DFLASH = "EAGLE-3 head", "DFlash draft"
"""What is read."""

SPECULATORS, SPECFORGE, ZLAB = "speculators", "SpecForge", "z-lab"
"""Whose format a folder has. SafeAILab's is SpecForge's."""

LAYERS: dict[str, type[PreTrainedConfig]] = {"llama": LlamaConfig, "qwen3": Qwen3Config}
"""The layers that a draft may have; DFlash's are Qwen3's, whatever their config calls them."""

NOT_OF_LAYERS = frozenset({"model_type", "architectures", "auto_map", "pad_token_id", "bos_token_id", "eos_token_id"})
"""Fields of a config that its layers do not need."""

EMBEDDINGS, HEAD = "embed_tokens.weight", "lm_head.weight"

COPIES = ("verifier_lm_head.", "verifier_norm.")
"""How the names of tensors begin that training kept of the target, and that a draft never reads."""

READ = "only EAGLE-3 heads and DFlash drafts are read: give one, or a smaller model with the target's tokenizer"

_OF_SPECULATORS = {"eagle3": EAGLE, "dflash": DFLASH}


@dataclass(frozen=True, slots=True)
class PublishedDraft:
    """A draft that others published: what it is, in whose format, and its config."""

    kind: str
    form: str
    folder: Path
    config: dict[str, Any]

    def __str__(self) -> str:
        return f"the {self.kind} {self.folder} (in the format of {self.form})"

    @property
    def trained_for(self) -> str | None:
        """The target that its config names."""
        named = (self.config.get("speculators_config") or {}).get("verifier") or {}
        return named.get("name_or_path") or None

    def layers(self, target: PreTrainedConfig) -> PreTrainedConfig:
        """The config of its layers, for texts as long as the target's.

        Raises UnsupportedError for layers other than Llama's and Qwen3's, and for windows where they are not read;
        ModelLoadError for a config that transformers refuses.
        """
        given = dict(self.config)
        if self.form == SPECULATORS:
            given = {"model_type": "qwen3"} | (given.get("transformer_layer_config") or {})
        found = LAYERS.get(given.get("model_type", ""))
        if found is None:
            raise UnsupportedError(
                f"{self} has layers of {given.get('model_type')!r}, and drafts of {', '.join(LAYERS)} are read: give "
                "another draft"
            )
        try:
            found = Qwen3Config if self.kind == DFLASH else found
            made = found(**{name: value for name, value in given.items() if name not in NOT_OF_LAYERS})
        except Exception as error:  # transformers validates every setting in its own way
            raise ModelLoadError(f"the config of {self} cannot be read: {first_line(error)}") from error
        self._check(made)
        made.max_position_embeddings = max(made.max_position_embeddings, context_length(target))
        made.pad_token_id = made.bos_token_id = made.eos_token_id = None
        made.tie_word_embeddings = False
        return made

    def _check(self, made: Any) -> None:
        kinds = set(getattr(made, "layer_types", None) or ())
        if not isinstance(made, Qwen3Config) and getattr(made, "sliding_window", None):
            kinds.add(SLIDING_ATTENTION)
        others = kinds - {FULL_ATTENTION} - ({SLIDING_ATTENTION} if self.kind == DFLASH else set())
        if others:
            raise UnsupportedError(f"{self} has layers of {min(others)}, which is not read: give another")
        rope = (made.rope_parameters or {}).get("rope_type")
        if rope in LENGTH_DEPENDENT_ROPE:
            raise UnsupportedError(f"{self} has {rope} rotary embeddings, which change with the length: give another")

    def weights(self) -> dict[str, Tensor]:
        """Its tensors, without what is a copy of the target's. Raises ModelLoadError if there are none."""
        found = {name.removeprefix("model."): tensor for name, tensor in tensors_in(self.folder).items()}
        kept = {name: found[name] for name in found if not name.startswith(COPIES) and "rotary_emb" not in name}
        if not kept:
            raise ModelLoadError(f"{self} has no weights: get all of its files, model.safetensors among them")
        strange = [name for name, tensor in kept.items() if "scale" in name or not _is_plain(name, tensor)]
        if strange:
            raise UnsupportedError(f"{self} is quantised ({min(strange)}), which is not read: give it unquantised")
        return kept


def looks_published(config: dict[str, Any]) -> bool:
    """Whether a config may be that of a draft: `published_draft` tells."""
    return (
        "speculators_model_type" in config
        or "dflash_config" in config
        or _may_be_head(config)
        or is_named_draft(config)
    )


def published_draft(folder: Path) -> PublishedDraft | None:
    """What a folder of a published draft holds; None for a whole model, and where there is no config.

    Raises UnsupportedError, naming it, for a draft of another kind.
    """
    config = config_in(folder)
    if config is None or not looks_published(config):
        return None
    if "speculators_model_type" in config:
        kind = config["speculators_model_type"]
        if kind not in _OF_SPECULATORS:
            raise UnsupportedError(f"{folder} holds a draft of the kind {kind!r} of speculators: {READ}")
        return PublishedDraft(_OF_SPECULATORS[kind], SPECULATORS, folder, config)
    name = architecture_of(config)
    if name == "DFlashDraftModel" or (not name and "dflash_config" in config):
        kind = (config.get("dflash_config") or {}).get("projector_type") or "dflash"
        if kind != "dflash":
            raise UnsupportedError(f"{folder} holds a DFlash draft of the kind {kind!r}: {READ}")
        return PublishedDraft(DFLASH, ZLAB, folder, config)
    if "Eagle3" in name:
        return PublishedDraft(EAGLE, SPECFORGE, folder, config)
    if is_named_draft(config):
        raise UnsupportedError(f"{folder} holds a draft of the kind {name}: {READ}")
    return _unnamed(folder, config)


def _unnamed(folder: Path, config: dict[str, Any]) -> PublishedDraft | None:
    """An EAGLE head whose config calls it a Llama: its tensors tell which one. None for a Llama of one layer."""
    names = tensor_names(folder)
    if any(name.endswith("hidden_norm.weight") for name in names):
        return PublishedDraft(EAGLE, SPECFORGE, folder, config)
    if "fc.weight" in names:
        raise UnsupportedError(f"{folder} holds an EAGLE head of the first or second version: {READ}")
    return None


def _may_be_head(config: dict[str, Any]) -> bool:
    """Whether a config is that of a Llama of one layer, or of one with a vocabulary of its own."""
    own = any(config.get(name) for name in OWN_VOCABULARY)
    return config.get("model_type") in LAYERS and (own or config.get("num_hidden_layers") == 1)


def _is_plain(name: str, tensor: Tensor) -> bool:
    return name in ("d2t", "t2d") or (tensor.is_floating_point() and tensor.dtype.itemsize >= 2)


D2T, T2D = "d2t", "t2d"
"""Tensors of a draft: what to add to each of its token ids for the target's, and which of the target's it has."""


def covered_tokens(weights: Mapping[str, Tensor], num_rows: int, vocab_size: int, draft: object) -> Tensor:
    """The target's token id of each row of a draft's head, `[num_rows]`.

    `weights` may hold `d2t` `[num_rows]` and `t2d` `[vocab_size]`. Raises ModelLoadError, naming `draft`, if they do
    not agree with each other or with the target's vocabulary.
    """
    marked, found = weights[T2D].bool() if T2D in weights else None, torch.arange(num_rows)
    if marked is not None and marked.numel() != vocab_size:
        raise _misfit(draft, f"a vocabulary of {marked.numel()} tokens, and the target's has {vocab_size}")
    if D2T in weights:
        if (count := weights[D2T].numel()) != num_rows:
            raise _torn(draft, f"d2t has {count} entries for a head of {num_rows} rows")
        found = found + weights[D2T].long()
    elif marked is not None:
        found = marked.nonzero()[:, 0]
    if found.numel() != num_rows or (D2T not in weights and marked is None and num_rows != vocab_size):
        raise _misfit(draft, f"a head of {num_rows} tokens without a d2t that says which, and the target {vocab_size}")
    if int(found.min()) < 0 or int(found.max()) >= vocab_size:
        raise _misfit(draft, f"tokens up to {int(found.max())}, and the target's vocabulary has {vocab_size}")
    if found.unique().numel() != found.numel():
        raise _torn(draft, "d2t gives one token to two rows of the head")
    if marked is not None and not bool(marked[found].all()):
        raise _torn(draft, "d2t and t2d name different tokens")
    return found


def _misfit(draft: object, has: str) -> ModelLoadError:
    return ModelLoadError(f"{draft} has {has}: give the target that it was trained for")


def _torn(draft: object, says: str) -> ModelLoadError:
    return ModelLoadError(f"the vocabulary of {draft} is damaged: {says}; get its files again")


def own_or_borrowed_embeddings(
    draft: PublishedDraft, weights: dict[str, Tensor], target: PreTrainedModel, hidden_size: int
) -> RawEmbeddings:
    """A draft's own embeddings, or the target's where it has none, or equal ones. Takes them out of `weights`."""
    theirs, own = RawEmbeddings(target.get_input_embeddings()), weights.pop(EMBEDDINGS, None)
    if own is None and theirs.embedding_dim != hidden_size:
        raise ModelLoadError(
            f"{draft} has no {EMBEDDINGS}, and the target's embeddings have {theirs.embedding_dim} numbers where it "
            f"reads {hidden_size}: give the target that it was trained for"
        )
    expected = target.config.get_text_config().vocab_size, hidden_size
    if own is not None and own.shape != expected:
        raise misshapen(draft, EMBEDDINGS, own, expected)
    return theirs if own is None else theirs.or_own(own)


def own_or_borrowed_rows(
    draft: PublishedDraft, weights: dict[str, Tensor], target: PreTrainedModel, hidden_size: int
) -> tuple[nn.Module, Tensor]:
    """The rows of a draft's head and their tokens; the target's rows where it has none. Takes them out of `weights`."""
    width, theirs = target.config.get_text_config().vocab_size, cast(Any, target.get_output_embeddings())
    own, offsets = weights.pop(HEAD, None), weights.get(D2T)
    num_rows = own.shape[0] if own is not None else width if offsets is None else offsets.numel()
    ids = covered_tokens(weights, num_rows, width, draft).to(target.device)
    for name in (D2T, T2D):
        weights.pop(name, None)
    if own is None:
        return (theirs if num_rows == width else RestrictedHead.of(theirs, ids).rows), ids
    if own.shape[1] != hidden_size:
        raise misshapen(draft, HEAD, own, (num_rows, hidden_size))
    return linear(own.to(target.device, target.dtype)), ids


def misshapen(draft: PublishedDraft, name: str, found: Tensor, expected: tuple[int, ...]) -> ModelLoadError:
    """The error for a tensor of another shape than a draft's config and this target ask for."""
    return ModelLoadError(
        f"{name} of {draft} has the shape {tuple(found.shape)}, and its config and this target ask for {expected}: "
        "give the target that it was trained for"
    )


def check_sizes(draft: PublishedDraft, target: PreTrainedConfig, **named: int | None) -> None:
    """Raise ModelLoadError for a draft whose config names other sizes than the target's."""
    for name, found in named.items():
        own = getattr(target, name)
        if found is not None and found != own:
            raise ModelLoadError(
                f"{draft} was trained for a target of {name}={found}, and this one has {own}: give "
                f"{draft.trained_for or 'the target that it was trained for'}"
            )


def checked_reads(draft: PublishedDraft, reads: Sequence[int], num_layers: int, says: str = "reads") -> tuple[int, ...]:
    """The layers that a draft reads, counted from 1. Raises ModelLoadError for one twice, or that the target lacks."""
    if len({*reads}) < len(reads) or not all(1 <= number <= num_layers for number in reads):
        raise ModelLoadError(
            f"{draft} {says} the outputs of layers {', '.join(map(str, reads))}, and the target has the layers 1 to "
            f"{num_layers}: give the target that it was trained for"
        )
    return tuple(reads)


def find_published(source: str | Path, *, weights: bool = True) -> PublishedDraft | None:
    """The published draft in a folder, or in a repository of the hub, whose files are then fetched; None for others.

    Without `weights` only the config is fetched. Raises UnsupportedError, naming it, for a draft of a kind that is not
    read.
    """
    if isinstance(source, Path):
        return published_draft(source)
    return published_draft(_fetched(source, weights)) if looks_published(config_at(source)) else None


def _fetched(name: str, weights: bool) -> Path:
    """The folder of a repository's config, and of its weights."""
    folder = Path(snapshot_download(name, allow_patterns=[CONFIG, INDEX, "*.safetensors"] if weights else [CONFIG]))
    if weights and not safetensors_files(folder):
        snapshot_download(name, allow_patterns=[OLDER])
    return folder
