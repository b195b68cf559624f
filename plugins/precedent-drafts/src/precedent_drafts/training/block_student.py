"""A block draft in training: blocks behind many tokens of a text at once, their loss, and one step of the optimiser.

The loss of a position is half the cross-entropy to the target and half the total variation, which is the share of
samples that verification rejects (DSpark, 2607.05147, weighs the second by 0.9); it fades with the depth in the block,
because a position counts only if those before it were right (DFlash, 2602.06036).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, scaled_dot_product_attention
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from precedent.runtime.instructions import native_bfloat16
from precedent.target.load.first_layers import layers_of
from precedent_drafts.block_draft import BlockDraft, BlockSettings, new_block_draft
from precedent_drafts.training.block_lessons import BlockLesson
from precedent_drafts.training.head import OutputHead
from precedent_drafts.training.learned_weights import LARGEST_NORM, rate_at

FADING = 4.0
"""Positions over which a position's weight falls to 1/e."""

CONFIDENCE_SHARE = 0.1
"""Weight of the confidence's loss, which reaches only its own weights."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks of one lesson to learn from.

    `tokens` `[blocks, block_size + 1]` are what the draft sees: the token before each block, then masks, some of which
    may be filled. `starts` `[blocks]` is how many tokens that were read each block sees; `before` and `rows`
    `[blocks, block_size]` are the true token before each position and the row of its distribution in the lesson;
    `counts` `[blocks, block_size]` says which positions are learned.
    """

    tokens: Tensor
    starts: Tensor
    before: Tensor
    rows: Tensor
    counts: Tensor


class BlockStudent:
    """A trainable block draft on a frozen target, with the target's layers `initial_layers` where their shapes fit."""

    def __init__(
        self,
        target: PreTrainedModel,
        settings: BlockSettings,
        token_ids: Tensor,
        initial_layers: Sequence[int],
        learning_rate: float,
        seed: int = 0,
    ) -> None:
        self._dtype = torch.float64 if target.dtype == torch.float64 else torch.float32
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.draft = new_block_draft(target, settings, token_ids, self._dtype)
        _begin_with(self.draft, target, initial_layers)
        self._own = {name: weight.requires_grad_(True) for name, weight in _parameters(self.draft).items()}
        self._teacher, self._learning_rate, self._seed = OutputHead(target, self._dtype, token_ids), learning_rate, seed
        self._place, self._half = target.device.type, target.dtype == torch.bfloat16 and _multiplies_bfloat16(target)
        self._columns = torch.full((self.draft.inputs.mask_id,), token_ids.numel())
        self._columns[token_ids] = torch.arange(token_ids.numel())
        self._optimizer = torch.optim.AdamW(self._own.values(), lr=learning_rate, betas=(0.9, 0.98), eps=1e-8)

    def step(self, lessons: Sequence[BlockLesson], number: int, done: float, anchors: int, filled: float) -> float:
        """Take step `number` on `anchors` random blocks of each lesson, and return the mean loss.

        `done` is the share of all steps that are done; a share `filled` of the blocks has some true tokens in it.
        """
        self._optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for place, lesson in enumerate(lessons):
            random = np.random.default_rng([self._seed, number, place])
            loss = self.loss(lesson, blocks_of(lesson, self.draft, anchors, filled, random)) / len(lessons)
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(self._own.values(), LARGEST_NORM)
        for group in self._optimizer.param_groups:
            group["lr"] = self._learning_rate * rate_at(done)
        self._optimizer.step()
        return total

    def loss(self, lesson: BlockLesson, blocks: Blocks) -> Tensor:
        """The mean loss over the positions that count, weighted by their depth."""
        with torch.autocast(self._place, torch.bfloat16, enabled=self._half):
            read = lesson.states.to(self._dtype) if self.draft.settings.reads else lesson.read_ids
            hidden = block_rows(self.draft, read, blocks.tokens, blocks.starts)[:, 1:]
            rows, added = self.draft.head.rows(hidden), self.draft.markov(self._columns[blocks.before])
        hidden, logits = hidden.to(self._dtype), rows.to(self._dtype) + added
        with torch.no_grad():
            thought = self._teacher(lesson.hidden[blocks.rows].flatten(0, 1)).view_as(logits)
            target_probs = (thought - lesson.log_total[blocks.rows].to(thought)[..., None]).exp()
        log_probs = logits.log_softmax(-1)
        crossed = -(target_probs * log_probs).sum(-1)
        rejected = 0.5 * ((log_probs.exp() - target_probs).abs().sum(-1) + 1.0 - target_probs.sum(-1))
        sure = self.draft.head.confidence(hidden.detach())[..., 0]
        doubt = binary_cross_entropy_with_logits(sure, 1.0 - rejected.detach(), reduction="none")
        fading = torch.exp(-torch.arange(logits.shape[1], dtype=self._dtype) / FADING)
        weights = fading * blocks.counts
        mean: Tensor = (weights * (0.5 * crossed + 0.5 * rejected + CONFIDENCE_SHARE * doubt)).sum() / weights.sum()
        return mean

    def state(self) -> dict[str, Tensor]:
        """Weights and the optimiser's moments by name."""
        found: dict[str, Tensor] = {f"weight.{name}": weight for name, weight in self._own.items()}
        for name, weight in self._own.items():
            found |= {f"{key}.{name}": value for key, value in self._optimizer.state[weight].items()}
        return found

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a saved `state`."""
        for name, weight in self._own.items():
            with torch.no_grad():
                weight.copy_(state[f"weight.{name}"])
            self._optimizer.state[weight] = {key: state[f"{key}.{name}"] for key in ("step", "exp_avg", "exp_avg_sq")}


def blocks_of(
    lesson: BlockLesson, draft: BlockDraft, number: int, filled: float, random: np.random.Generator
) -> Blocks:
    """At most `number` random blocks of a lesson."""
    size, ids = draft.settings.block_size, np.array(lesson.text.token_ids)
    chosen = random.permutation(lesson.anchors)[:number]
    places = chosen[:, None] + 1 + np.arange(size)
    inside = np.minimum(places, len(ids) - 1)
    learned = np.zeros(len(ids), np.bool_)
    learned[np.array(lesson.anchors) + 1] = True
    known = (random.random(len(chosen)) < filled)[:, None] & (
        random.random(places.shape) < random.random((len(chosen), 1))
    )
    known &= places < len(ids)
    behind = np.where(known, ids[inside], draft.inputs.mask_id)
    counts = np.logical_and.accumulate((places < len(ids)) & learned[inside], axis=1) & ~known
    counts[:, 0] |= ~counts.any(axis=1)  # a block that is known altogether learns its first position
    return Blocks(
        tokens=torch.from_numpy(np.concatenate([ids[chosen][:, None], behind], axis=1)),
        starts=torch.from_numpy(chosen - lesson.first),
        before=torch.from_numpy(ids[np.minimum(places - 1, len(ids) - 1)]),
        rows=torch.from_numpy(inside - lesson.text.num_context_tokens),
        counts=torch.from_numpy(counts),
    )


def block_rows(draft: BlockDraft, states: Tensor, tokens: Tensor, starts: Tensor) -> Tensor:
    """Final hidden states of blocks `tokens` `[blocks, rows]` of one text, `[blocks, rows, hidden_size]`.

    `states` are those of the text, or its token ids, as `BlockDraft.keys_and_values` takes them; block b sees the first
    `starts[b]` of them and its own rows.
    """
    model: Any = draft.model
    hidden, count = draft.inputs(tokens), tokens.shape[1]
    positions = starts[:, None] + torch.arange(count)
    turns = model.rotary_emb(hidden, position_ids=positions)
    seen = torch.cat([torch.arange(len(states)) < starts[:, None], torch.ones(len(starts), count, dtype=torch.bool)], 1)
    for layer, kept in zip(model.layers, draft.keys_and_values(states, 0), strict=True):
        attended = _attended(layer.self_attn, layer.input_layernorm(hidden), turns, kept, seen)
        hidden = hidden + layer.self_attn.o_proj(attended)
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    normed: Tensor = model.norm(hidden)
    return normed


def _attended(
    attention: Any, hidden: Tensor, turns: tuple[Tensor, Tensor], kept: tuple[Tensor, Tensor], seen: Tensor
) -> Tensor:
    """What the rows of each block read from the text and from each other, `[blocks, rows, num_heads * head_dim]`."""
    shape = (*hidden.shape[:-1], -1, attention.head_dim)
    query, key, value = (
        part(hidden).view(shape).transpose(1, 2) for part in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    query, key = apply_rotary_pos_emb(query, key, *turns)
    keys, values = (
        torch.cat([before.expand(len(hidden), -1, -1, -1), own], dim=2)
        for before, own in zip(kept, (key, value), strict=True)
    )
    found = scaled_dot_product_attention(query, keys, values, attn_mask=seen[:, None, None], enable_gqa=True)
    return found.transpose(1, 2).flatten(2)


def _multiplies_bfloat16(target: PreTrainedModel) -> bool:
    """Whether products in bfloat16, the precision in which the draft will run, are fast here."""
    return target.device.type == "cuda" or (target.device.type == "cpu" and native_bfloat16())


def _parameters(draft: BlockDraft) -> dict[str, Tensor]:
    """The draft's own weights as parameters, by the names of its folder."""
    found = {weight.data_ptr(): weight for weight in draft.parameters()}
    return {name: found[weight.data_ptr()] for name, weight in draft.own_weights().items()}


@torch.no_grad()
def _begin_with(draft: BlockDraft, target: PreTrainedModel, initial_layers: Sequence[int]) -> None:
    """Copy the target's layers into the draft's, as far as names and shapes agree."""
    model: Any = draft.model
    for layer, index in zip(model.layers, initial_layers, strict=True):
        theirs = layers_of(target)[index].state_dict()
        for name, weight in layer.state_dict().items():
            if name in theirs and theirs[name].shape == weight.shape:
                weight.copy_(theirs[name])


def initial_layers(count: int, of: int) -> tuple[int, ...]:
    """Layers of the target, evenly spaced from first to last."""
    return tuple(math.floor(place * (of - 1) / max(1, count - 1) + 0.5) for place in range(count))
