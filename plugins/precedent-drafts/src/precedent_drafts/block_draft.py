"""Block drafts: a few layers between a target's embeddings and rows of its head, which fill several positions at once.

A folder holds `config.json` and `model.safetensors`.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3ForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from precedent.errors import ModelLoadError
from precedent.target.kv.layer_kinds import context_length
from precedent.target.quantised import is_quantised, rows_of
from precedent_drafts.eight_bits import packed, quantise_linears, unpacked
from precedent_drafts.fingerprints import embeddings_fingerprint, layers_fingerprint, name_of
from precedent_drafts.heads import HEAD_TOKENS, check_on_one_device, linear
from precedent_drafts.trained import read_as, save_json, save_tensors

SETTINGS_FILE = "config.json"

KIND, FORMAT = "precedent-block-draft", 1
"""Increase the format whenever an older version of this file could not read the folder."""

SMALLEST, LARGEST = 2, 16
"""Sizes of a block."""

TARGET, NONE = "target", "none"
"""What a draft reads of the text: outputs of the target's layers, or its tokens alone, through layers of its own."""


@dataclass(frozen=True, slots=True)
class BlockSettings:
    """Which target a block draft belongs to, its shape, and how it is used.

    `target` is a readable name, `embeddings` and `layers` are fingerprints of the target's weights. The draft reads the
    last `context_tokens` tokens of a prompt and all of the answer: the outputs of the target's layers `reads` (counted
    from 1), or with `condition` "none" the tokens alone. It fills `block_size` positions behind the last token. It has
    `num_layers` layers of the given shape, a head for `num_head_tokens` tokens, and a term of `markov_rank` between
    neighbours (0: none). `iterations` forwards fill one block. Raises ModelLoadError for values out of range.
    """

    target: str
    embeddings: str
    layers: str
    reads: tuple[int, ...]
    hidden_size: int
    num_head_tokens: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    rms_norm_eps: float
    num_layers: int = 2
    block_size: int = 8
    context_tokens: int = 256
    markov_rank: int = 64
    iterations: int = 1
    condition: str = TARGET
    kind: str = KIND
    format: int = FORMAT

    def __post_init__(self) -> None:
        checks = (
            ("condition", self.condition in (TARGET, NONE), f"must be {TARGET} or {NONE}"),
            ("block_size", SMALLEST <= self.block_size <= LARGEST, f"must lie between {SMALLEST} and {LARGEST}"),
            ("iterations", 1 <= self.iterations <= self.block_size, "must lie between 1 and block_size"),
            ("reads", [*self.reads] == sorted({*self.reads}), "must name layers, in order"),
            ("reads", bool(self.reads) == (self.condition == TARGET), f"does not fit the condition {self.condition}"),
            ("num_layers", self.num_layers >= 1, "must be 1 or more"),
            ("context_tokens", self.context_tokens >= 1, "must be 1 or more"),
            ("markov_rank", self.markov_rank >= 0, "must be 0 or more"),
        )
        for name, right, says in checks:
            if not right:
                raise ModelLoadError(f"{name} of a block draft is {getattr(self, name)!r} and {says}")

    @classmethod
    def read(cls, folder: Path) -> Self:
        """The settings in a folder. Raises ModelLoadError if this version does not understand them."""
        return read_as(cls, folder / SETTINGS_FILE, kind=KIND, format=FORMAT)


def holds_block_draft(place: str | Path) -> bool:
    """Whether `place` is a folder of a block draft."""
    try:
        found = json.loads((Path(place).expanduser() / SETTINGS_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and found.get("kind") == KIND


class MaskedInputs(nn.Module):
    """The target's embeddings, and one learned vector for masked positions, whose token id is `mask_id`."""

    def __init__(self, embeddings: Any, hidden_size: int, place: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.mask_id = int(embeddings.num_embeddings)
        self.mask = nn.Parameter(torch.zeros(hidden_size, device=place, dtype=dtype))
        self._embeddings = (embeddings,)  # in a tuple: the target's, no part of this module's state

    @property
    def weight(self) -> Tensor:
        """The learned vector, whose device is where token ids go."""
        return self.mask

    def forward(self, input_ids: Tensor) -> Tensor:
        """Embeddings of token ids, `[..., hidden_size]`."""
        masked, (embeddings,) = input_ids == self.mask_id, self._embeddings
        known: Tensor = embeddings(input_ids.masked_fill(masked, 0)).to(self.mask.dtype)
        return torch.where(masked[..., None], self.mask, known)


class BlockHead(nn.Module):
    """Logits of the tokens that `rows` covers, and the logit of the confidence as one column more."""

    token_ids: Tensor

    def __init__(self, rows: Any, token_ids: Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.rows, place = rows, token_ids.device
        self.confidence = nn.Linear(rows.in_features, 1, device=place, dtype=dtype)
        self.register_buffer("token_ids", token_ids.long(), persistent=False)

    @property
    def weight(self) -> Tensor:
        """The rows of the head, `[num_head_tokens, hidden_size]`."""
        weight: Tensor = self.rows.weight
        return weight

    def forward(self, hidden: Tensor) -> Tensor:
        """`[..., hidden_size]` to `[..., num_head_tokens + 1]`."""
        return torch.cat([self.rows(hidden), self.confidence(hidden)], dim=-1)


class MarkovTerm(nn.Module):
    """What the token before adds to a row of logits: `left[previous] @ right`, of low rank.

    Tokens that the head does not cover share the last row of `left`.
    """

    def __init__(self, num_tokens: int, rank: int, place: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.left = nn.Parameter(torch.empty(num_tokens + 1, rank, device=place, dtype=dtype))
        self.right = nn.Parameter(torch.zeros(rank, num_tokens, device=place, dtype=dtype))

    def forward(self, previous: Tensor) -> Tensor:
        """Columns of the previous tokens in the head `[...]` to what they add, `[..., num_tokens]`."""
        return self.left[previous] @ self.right


class StateFusion(nn.Module):
    """The outputs of the target's layers as one vector per token: a linear map, then a norm."""

    def __init__(self, num_read: int, norm: nn.Module, hidden_size: int, place: torch.device, dtype: torch.dtype):
        super().__init__()
        self.linear = nn.Linear(num_read * hidden_size, hidden_size, bias=False, device=place, dtype=dtype)
        self.norm = norm

    def forward(self, states: Tensor) -> Tensor:
        """`[..., num_read * hidden_size]` to `[..., hidden_size]`."""
        fused: Tensor = self.norm(self.linear(states))
        return fused


WEIGHTS_FILE = "model.safetensors"

Weights = Mapping[str, Tensor]

if TYPE_CHECKING:
    _Model = PreTrainedModel
else:
    _Model = object  # a second base of transformers would hide what the class of the layers sets

log = logging.getLogger(__name__)


class BlockDraft(_Model):
    """The draft's layers as a causal model for the rows of a block, and what they read of the target.

    Its logits are `[..., num_head_tokens + 1]`; the last column is the logit of the confidence.
    """

    settings: BlockSettings
    fusion: StateFusion | None
    markov: MarkovTerm
    model: Any
    lm_head: Any

    @property
    def inputs(self) -> MaskedInputs:
        """The embeddings of known and masked tokens."""
        found: MaskedInputs = self.model.embed_tokens
        return found

    @property
    def head(self) -> BlockHead:
        """The head."""
        found: BlockHead = self.lm_head
        return found

    def keys_and_values(self, read: Tensor, first: int) -> list[tuple[Tensor, Tensor]]:
        """Each layer's keys and values `[1, kv_heads, tokens, head_dim]` of the text before the block.

        `read` `[tokens, num_read * hidden_size]` are the target's states of the tokens from position `first` on; for a
        draft that reads no target they are the ids `[tokens]` of the whole text from its beginning.
        """
        if self.fusion is None:
            cache = DynamicCache()
            self.model(input_ids=read[None], past_key_values=cache, use_cache=True)
            layers: list[Any] = cache.layers
            return [(layer.keys, layer.values) for layer in layers]
        fused = self.fusion(read.to(self.fusion.linear.weight.dtype))[None]
        positions = torch.arange(first, first + fused.shape[1], device=fused.device)[None]
        turns = self.model.rotary_emb(fused, position_ids=positions)
        return [self._kept_by(layer.self_attn, fused, turns) for layer in self.model.layers]

    def _kept_by(self, attention: Any, fused: Tensor, turns: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        shape = (*fused.shape[:-1], -1, self.settings.head_dim)
        key, value = (part(fused).view(shape) for part in (attention.k_proj, attention.v_proj))
        key = self._normed(attention, key).transpose(1, 2)
        return apply_rotary_pos_emb(key, key, *turns)[1], value.transpose(1, 2)

    def _normed(self, attention: Any, key: Tensor) -> Tensor:
        """Keys `[1, tokens, kv_heads, head_dim]` as the layers norm them."""
        return key

    def own_weights(self) -> dict[str, Tensor]:
        """The weights that are the draft's own, under the names that a folder has for them."""
        found = {f"layers.{name}": tensor for name, tensor in self.model.layers.state_dict().items()}
        found |= {f"norm.{name}": tensor for name, tensor in self.model.norm.state_dict().items()}
        if self.fusion is not None:
            found |= {f"fusion.{name}": tensor for name, tensor in self.fusion.state_dict().items()}
        found |= {f"markov.{name}": tensor for name, tensor in self.markov.state_dict().items()}
        found |= {f"confidence.{name}": tensor for name, tensor in self.head.confidence.state_dict().items()}
        return found | {"mask": self.inputs.mask}


class LlamaBlockDraft(BlockDraft, LlamaForCausalLM):
    """A draft of Llama's layers, as ours are."""


class Qwen3BlockDraft(BlockDraft, Qwen3ForCausalLM):
    """A draft of Qwen3's layers, as DFlash's are."""

    def _normed(self, attention: Any, key: Tensor) -> Tensor:
        normed: Tensor = attention.k_norm(key)
        return normed


def new_block_draft(
    target: PreTrainedModel, settings: BlockSettings, token_ids: Tensor, dtype: torch.dtype
) -> BlockDraft:
    """A draft with random weights (of torch's global generator) on the target's device, its Markov term zero.

    Raises UnsupportedError for a target that is spread over devices.
    """
    check_on_one_device(target, "block-draft")
    config = LlamaConfig(
        vocab_size=1, hidden_size=settings.hidden_size, intermediate_size=settings.intermediate_size,
        num_hidden_layers=settings.num_layers, num_attention_heads=settings.num_heads, head_dim=settings.head_dim,
        num_key_value_heads=settings.num_kv_heads, rms_norm_eps=settings.rms_norm_eps, tie_word_embeddings=False,
        max_position_embeddings=context_length(target.config.get_text_config()), pad_token_id=None,
        bos_token_id=None, eos_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": settings.rope_theta},
    )  # fmt: skip
    head: Any = target.get_output_embeddings()
    found = rows_of(head, token_ids.long())
    rows, ids = linear(found.to(dtype)), token_ids.to(found.device, torch.long)
    draft = assembled(LlamaBlockDraft(config), settings, target.get_input_embeddings(), rows, ids, dtype)
    _initialise(draft)
    return draft


def assembled(
    layers: Any, settings: BlockSettings, embeddings: Any, rows: nn.Module, token_ids: Tensor, dtype: torch.dtype
) -> BlockDraft:
    """A draft of these layers between embeddings and `rows` of a head, on the head's device; its parts are not filled.

    Layers on the meta device get memory there. Rotary embeddings stay in float32, as transformers loads them.
    """
    place, size = token_ids.device, settings.hidden_size
    meta = any(parameter.is_meta for parameter in layers.parameters())
    draft: BlockDraft = layers.to(dtype).to_empty(device=place) if meta else layers.to(place, dtype)
    draft.settings = settings
    draft.model.rotary_emb = type(draft.model.rotary_emb)(draft.config).to(place)
    draft.model.embed_tokens = MaskedInputs(embeddings, size, place, dtype)
    draft.lm_head = BlockHead(rows, token_ids, dtype)
    draft.fusion = None
    if settings.reads:
        norm: nn.Module = LlamaRMSNorm(size, eps=settings.rms_norm_eps).to(place, dtype)
        draft.fusion = StateFusion(len(settings.reads), norm, size, place, dtype)
    draft.markov = MarkovTerm(token_ids.numel(), settings.markov_rank, place, dtype)
    layers.eval()
    return draft


@torch.no_grad()
def _initialise(draft: BlockDraft) -> None:
    nn.init.normal_(draft.inputs.mask, std=0.02)
    nn.init.normal_(draft.markov.left, std=0.02)
    nn.init.zeros_(draft.head.confidence.weight)
    nn.init.zeros_(draft.head.confidence.bias)
    if draft.fusion is not None:
        share = torch.eye(draft.settings.hidden_size) / len(draft.settings.reads)  # begins as the mean of what is read
        draft.fusion.linear.weight.copy_(share.repeat(1, len(draft.settings.reads)))


def fill(draft: BlockDraft, weights: Weights, name: str = "the block draft") -> BlockDraft:
    """Copy weights of these names into a draft called `name`. Raises ModelLoadError for missing or misshapen ones."""
    own = draft.own_weights()
    wrong = sorted(own.keys() ^ (weights.keys() - {HEAD_TOKENS}))
    wrong += sorted(part for part in own.keys() & weights.keys() if own[part].shape != weights[part].shape)
    if wrong:
        raise ModelLoadError(f"the weights of {name} do not fit its config: {wrong[0]}")
    with torch.no_grad():
        for part, tensor in own.items():
            tensor.copy_(weights[part])
    return draft


def save_block_draft(folder: Path, draft: BlockDraft, dtype: torch.dtype) -> None:
    """Write a draft's folder; `config.json` is written last, so an incomplete folder is not taken for a draft."""
    kept = {name: tensor.to(dtype) for name, tensor in draft.own_weights().items()}
    save_tensors(folder / WEIGHTS_FILE, packed(kept) | {HEAD_TOKENS: draft.head.token_ids.to(torch.int32)})
    save_json(folder / SETTINGS_FILE, dataclasses.asdict(draft.settings))


def load_block_draft(folder: Path, target: PreTrainedModel, **changes: Any) -> BlockDraft:
    """Load a draft beside its target, in the target's dtype; `changes` replace some of its settings.

    Raises ModelLoadError, naming both, if it belongs to another target, and what `BlockSettings` raises.
    """
    settings, name = dataclasses.replace(BlockSettings.read(folder), **changes), name_of(target)
    if settings.embeddings != embeddings_fingerprint(target):
        raise ModelLoadError(
            f"the block draft {folder} was trained for {settings.target} and uses its embeddings, which differ from "
            f"those of {name}; give {settings.target} as the target, or train a draft for {name} with precedent "
            "train-draft --kind block"
        )
    if settings.layers != layers_fingerprint(target) and settings.condition == NONE:
        log.warning(
            "the block draft %s was trained for %s; %s has different layers: fewer of its tokens will be accepted",
            folder, settings.target, name,
        )  # fmt: skip
    elif settings.layers != layers_fingerprint(target):
        raise ModelLoadError(
            f"the block draft {folder} reads the layers of {settings.target}, and those of {name} differ: give "
            f"{settings.target} as the target, or train a draft for {name} with precedent train-draft --kind block"
        )
    weights = unpacked(load_file(folder / WEIGHTS_FILE))
    if weights.get(HEAD_TOKENS, torch.empty(0)).numel() != settings.num_head_tokens:
        raise ModelLoadError(f"the weights in {folder} do not fit its config: {HEAD_TOKENS}")
    draft = fill(new_block_draft(target, settings, weights[HEAD_TOKENS], target.dtype), weights)
    draft.requires_grad_(False)
    if is_quantised(target):
        quantise_linears(draft.model.layers)
    return draft
