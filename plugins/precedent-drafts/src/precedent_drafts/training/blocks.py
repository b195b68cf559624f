"""Trains a block draft: blocks behind many tokens of a text at once.

The loss of a position is half the cross-entropy to the target and half the total variation, which is the share of
samples that verification rejects (DSpark, 2607.05147, weighs the second by 0.9); it fades with the depth in the block,
because a position counts only if those before it were right (DFlash, 2602.06036).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits
from transformers import DynamicCache, PreTrainedModel

from precedent.errors import ConfigError
from precedent.runtime.instructions import native_bfloat16
from precedent.target.load.first_layers import layers_of
from precedent_drafts.block_draft import (
    NONE,
    TARGET,
    BlockDraft,
    BlockSettings,
    load_block_draft,
    new_block_draft,
    save_block_draft,
)
from precedent_drafts.fingerprints import embeddings_fingerprint, layers_fingerprint, name_of
from precedent_drafts.trained import initial_layers
from precedent_drafts.training.lessons import Lesson, Teacher
from precedent_drafts.training.training import Recipe, Student

NUM_READS, MARKOV_RANK, BLOCKS = 3, 64, 24
"""Layers of the target that a draft reads, the rank of its Markov term, and blocks of a text learned in a step."""

FILLED = 0.5
"""Share of blocks with some true tokens in them, where several forwards fill a block."""

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

    def to(self, place: torch.device) -> Blocks:
        """The same on a device."""
        return Blocks(**{field.name: getattr(self, field.name).to(place) for field in fields(self)})


@dataclass(frozen=True, kw_only=True)
class BlockRecipe(Recipe):
    """How to train a block draft.

    It reads three of the target's layers, in their later half, or with `condition` "none" tokens alone, and fills
    `block_size` positions in `iterations` forwards, with `layers` layers of its own, which start as the target's; of a
    prompt it sees the last `context_tokens`.
    """

    kind = "block draft"

    layers: int = 2
    block_size: int = 8
    context_tokens: int = 256
    iterations: int = 1
    condition: str = TARGET

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.iterations > self.block_size:
            raise ConfigError(f"iterations={self.iterations} must lie between 1 and block_size")

    def reads(self, num_layers: int) -> tuple[int, ...]:
        """The layers that the draft reads, counted from 1, of a target with so many.

        Evenly spaced from the middle to a tenth before the last: later layers say more about what comes next.
        """
        if self.condition == NONE:
            return ()
        first, last = -(-num_layers // 2), num_layers - num_layers // 10
        gap = (last - first) / (NUM_READS - 1)
        return tuple(sorted({round(last - place * gap) for place in range(NUM_READS)}))

    def teacher(self, target: PreTrainedModel) -> Teacher:
        """The outputs of the layers that the draft reads."""
        return Teacher(target, self.reads(len(layers_of(target))), self.context_tokens)

    def student(self, target: PreTrainedModel, head_tokens: Tensor | None) -> Student:
        """Layers of the target."""
        head: Any = target.get_output_embeddings()
        ids = torch.arange(head.weight.shape[0]) if head_tokens is None else head_tokens
        return BlockStudent(target, self, ids)

    def settings(self, target: PreTrainedModel, num_head_tokens: int) -> BlockSettings:
        """Those of a draft beside this target."""
        config = target.config.get_text_config()
        heads, rope = config.num_attention_heads, getattr(config, "rope_parameters", None) or {}
        return BlockSettings(
            target=name_of(target), embeddings=embeddings_fingerprint(target), layers=layers_fingerprint(target),
            reads=self.reads(len(layers_of(target))), hidden_size=config.hidden_size, num_head_tokens=num_head_tokens,
            intermediate_size=config.intermediate_size, num_heads=heads,
            num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            rope_theta=float(rope.get("rope_theta", 10000.0)),
            rms_norm_eps=float(getattr(config, "rms_norm_eps", 1e-6)), num_layers=self.layers,
            block_size=self.block_size, context_tokens=self.context_tokens, markov_rank=MARKOV_RANK,
            iterations=self.iterations, condition=self.condition,
        )  # fmt: skip


class BlockStudent(Student):
    """A trainable block draft on a frozen target, with layers of the target where their shapes fit."""

    def __init__(self, target: PreTrainedModel, recipe: BlockRecipe, token_ids: Tensor) -> None:
        super().__init__(target, token_ids)
        self._recipe = recipe
        with torch.random.fork_rng():
            torch.manual_seed(recipe.seed)
            settings = recipe.settings(target, token_ids.numel())
            self.draft = new_block_draft(target, settings, token_ids, self.dtype)
        _begin_with(self.draft, target)
        parameters = {weight.data_ptr(): weight for weight in self.draft.parameters()}
        own = {name: parameters[weight.data_ptr()] for name, weight in self.draft.own_weights().items()}
        self.trains(own, recipe.learning_rate)
        self._place, self._half = target.device, target.dtype == torch.bfloat16 and _multiplies_bfloat16(target)
        self._columns = torch.full((self.draft.inputs.mask_id,), token_ids.numel(), device=self._place)
        self._columns[token_ids.to(self._place)] = torch.arange(token_ids.numel(), device=self._place)

    def learn(self, lessons: Sequence[Lesson], number: int) -> float:
        """Add the gradient of the mean loss of random blocks of each lesson, and return it."""
        total, filled = 0.0, FILLED if self._recipe.iterations > 1 else 0.0
        for place, lesson in enumerate(lessons):
            random = np.random.default_rng([self._recipe.seed, number, place])
            blocks = blocks_of(lesson, self.draft, BLOCKS, filled, random).to(self._place)
            loss = self.loss(lesson.to(self._place), blocks) / len(lessons)
            loss.backward()
            total += float(loss.detach())
        return total

    def save(self, folder: Path) -> PreTrainedModel:
        """Write the draft's folder, and return the draft."""
        save_block_draft(folder, self.draft, torch.float32 if self.dtype == self.target.dtype else self.target.dtype)
        return load_block_draft(folder, self.target)

    def loss(self, lesson: Lesson, blocks: Blocks) -> Tensor:
        """The mean loss over the positions that count, weighted by their depth."""
        with torch.autocast(self._place.type, torch.bfloat16, enabled=self._half):
            read = lesson.states.to(self.dtype) if self.draft.settings.reads else lesson.read_ids
            hidden = block_rows(self.draft, read, blocks.tokens, blocks.starts)[:, 1:]
            rows, added = self.draft.head.rows(hidden), self.draft.markov(self._columns[blocks.before])
        hidden, logits = hidden.to(self.dtype), rows.to(self.dtype) + added
        with torch.no_grad():
            thought = self.head(lesson.hidden[blocks.rows].flatten(0, 1)).view_as(logits)
            target_probs = (thought - lesson.log_total[blocks.rows].to(thought)[..., None]).exp()
        log_probs = logits.log_softmax(-1)
        crossed = -(target_probs * log_probs).sum(-1)
        rejected = 0.5 * ((log_probs.exp() - target_probs).abs().sum(-1) + 1.0 - target_probs.sum(-1))
        sure = self.draft.head.confidence(hidden.detach())[..., 0]
        doubt = binary_cross_entropy_with_logits(sure, 1.0 - rejected.detach(), reduction="none")
        fading = torch.exp(-torch.arange(logits.shape[1], dtype=self.dtype, device=logits.device) / FADING)
        weights = fading * blocks.counts
        mean: Tensor = (weights * (0.5 * crossed + 0.5 * rejected + CONFIDENCE_SHARE * doubt)).sum() / weights.sum()
        return mean


def blocks_of(lesson: Lesson, draft: BlockDraft, number: int, filled: float, random: np.random.Generator) -> Blocks:
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
    count, cache, place = tokens.shape[1], DynamicCache(), tokens.device
    for index, pair in enumerate(draft.keys_and_values(states, 0)):
        keys, values = (part.expand(len(tokens), -1, -1, -1) for part in pair)
        cache.update(keys, values, index)
    before = torch.arange(len(states), device=place) < starts[:, None]
    seen = torch.cat([before, before.new_ones(len(starts), count)], 1)
    hidden: Tensor = draft.model(
        inputs_embeds=draft.inputs(tokens),
        attention_mask=seen[:, None, None].expand(-1, -1, count, -1),
        position_ids=starts[:, None] + torch.arange(count, device=place),
        past_key_values=cache,
        use_cache=True,
    ).last_hidden_state
    return hidden


def _multiplies_bfloat16(target: PreTrainedModel) -> bool:
    """Whether products in bfloat16, the precision in which the draft will run, are fast here."""
    return target.device.type == "cuda" or (target.device.type == "cpu" and native_bfloat16())


@torch.no_grad()
def _begin_with(draft: BlockDraft, target: PreTrainedModel) -> None:
    """Copy the target's layers into the draft's, as far as names and shapes agree."""
    model: Any = draft.model
    chosen = initial_layers(draft.settings.num_layers, len(layers_of(target)))
    for layer, index in zip(model.layers, chosen, strict=True):
        theirs = layers_of(target)[index].state_dict()
        for name, weight in layer.state_dict().items():
            if name in theirs and theirs[name].shape == weight.shape:
                weight.copy_(theirs[name])
