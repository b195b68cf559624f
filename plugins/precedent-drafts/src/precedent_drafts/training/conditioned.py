"""Trains a chain that also reads its target: passes over a text that read more and more of its own hidden states.

Drafting reads the target's hidden states of committed tokens, and the draft's own behind them. So does training: pass 0
reads the target's, and every later one what the pass before it put out, a token further; what is behind it in the text
it sees as earlier passes left it (HASS, 2408.15766). GRIFFIN (2502.11018) leaves a token out of a later pass unless the
pass before had it among its likeliest ones, and its predecessor too: a draft would not have come there.

The loss of a pass is the forward divergence to the target, plus the smooth L1 distance of the draft's hidden states
from the target's, whose place they take.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import smooth_l1_loss
from transformers import DynamicCache, PreTrainedModel

from precedent.errors import ConfigError, UnsupportedError
from precedent.target.fingerprints import name_of
from precedent.target.kv.layer_kinds import FULL_ATTENTION, attention_kinds
from precedent.target.load.first_layers import base_of, layers_of
from precedent_drafts.trained import (
    FUSION,
    FUSIONS,
    LINEAR,
    ConditionedInputs,
    conditioned_beside,
    fusion_of,
    initial_weights,
)
from precedent_drafts.training.chain import STARTS, initial_layers
from precedent_drafts.training.lessons import Lesson, Teacher
from precedent_drafts.training.training import Recipe, Student, at_least, between, checked, learn_divergence


@dataclass(frozen=True, kw_only=True)
class ConditionedRecipe(Recipe):
    """How to train a chain that reads its target's hidden states.

    Its `layers` start as copies of the target's (`start`), behind a `fusion` of embeddings and hidden states. It learns
    in `passes` passes over each text, with at most `context_tokens` tokens of context; with `mask_top_k` a token counts
    in a later pass only if the pass before had it among so many likeliest ones (0: always).
    """

    kind = "chain that reads its target"

    layers: int = between(1, 3, 1)
    start: str = checked("ends", STARTS.__contains__, f"must be {', '.join(STARTS)}")
    fusion: str = checked(LINEAR, FUSIONS.__contains__, f"must be {' or '.join(FUSIONS)}")
    passes: int = between(1, 8, 3)
    mask_top_k: int = at_least(0, 0)
    context_tokens: int = at_least(1, 256)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mask_top_k and self.passes == 1:
            raise ConfigError("mask_top_k leaves tokens out of later passes, and passes=1 has none: give more passes")

    def teacher(self, target: PreTrainedModel) -> Teacher:
        """The final hidden states. Raises UnsupportedError unless all layers are full attention."""
        kinds = attention_kinds(target.config.get_text_config())
        if kinds != {FULL_ATTENTION}:
            raise UnsupportedError(
                f"{name_of(target)} has layers of {', '.join(sorted(map(str, kinds)))}, and a chain that reads its "
                "target (--condition target) is trained on full attention alone: leave --condition out"
            )
        return Teacher(target, None, self.context_tokens)

    def student(self, target: PreTrainedModel, head_tokens: Tensor | None) -> Student:
        """Layers of the target behind a fusion that reads the token alone."""
        layers = initial_layers(self.start, self.layers, len(layers_of(target)))
        return ConditionedStudent(target, layers, head_tokens, self)


@dataclass(frozen=True, slots=True)
class Entries:
    """What a conditioned draft learns from a lesson: entry j reads a hidden state and the token behind it.

    `token_ids` and `states` `[entries, hidden_size]` are read, `wanted` `[entries, hidden_size]` is the target's hidden
    state at that token; `next_ids`, `learned` and `log_total` `[entries]` are the token to predict, whether it is
    learned, and the log-sum-exp of the target's logits before it.
    """

    token_ids: Tensor
    states: Tensor
    wanted: Tensor
    next_ids: Tensor
    learned: Tensor
    log_total: Tensor


class ConditionedStudent(Student):
    """Trainable layers and fusion on a frozen target."""

    def __init__(
        self, target: PreTrainedModel, layers: Sequence[int], head_tokens: Tensor | None, recipe: ConditionedRecipe
    ) -> None:
        super().__init__(target, head_tokens)
        self.own_settings = {"initial_layers": tuple(layers), "fusion": recipe.fusion}
        self._passes, self._mask_top_k = recipe.passes, recipe.mask_top_k
        with torch.random.fork_rng():
            torch.manual_seed(recipe.seed)
            fused = fusion_of(recipe.fusion, target.config.get_text_config().hidden_size).state_dict()
        begun = initial_weights(target, layers) | {f"{FUSION}{name}": weight for name, weight in fused.items()}
        self.model = conditioned_beside(target, layers, recipe.fusion, begun, self.dtype).requires_grad_(False)
        self.inputs: ConditionedInputs = self.model.get_input_embeddings()  # type: ignore[assignment]
        own = {f"layers.{name}": weight for name, weight in base_of(self.model).layers.named_parameters()}
        own |= {f"{FUSION}{name}": weight for name, weight in self.inputs.fusion.named_parameters()}
        self.trains(own, recipe.learning_rate)

    def learn(self, lessons: Sequence[Lesson], number: int) -> float:
        """Add the gradient of the loss, a mean over passes of means over the tokens that count, and return it."""
        entries = [entries_of(lesson) for lesson in lessons]
        outputs = [self.outputs(each) for each in entries]
        masks = [self.masks(each, rows) for each, rows in zip(entries, outputs, strict=True)]
        counts = [max(1, sum(int(mask.sum()) for mask in of_pass)) for of_pass in zip(*masks, strict=True)]
        shares = [1.0 / count / len(counts) for count in counts]
        return sum(self._learn(*each, shares) for each in zip(entries, outputs, masks, strict=True))

    def outputs(self, entries: Entries) -> list[Tensor]:
        """The final hidden states of every pass, `[entries, hidden_size]` each.

        They are zero, and not computed, where no draft comes in that pass: it would begin before the target's words.
        """
        place, count = self.target.device, len(entries.states)
        with torch.no_grad():
            embedded = self.inputs.embeddings(entries.token_ids.to(place))
        states, cache, found = entries.states.to(place, self.dtype), DynamicCache(), list[Tensor]()
        reached, columns = entries.learned, torch.zeros(0, dtype=torch.long)
        for number in range(self._passes):
            rows = torch.arange(count) if number == 0 else reached.nonzero()[:, 0]
            columns = torch.cat([columns, rows + number * count])
            hidden: Tensor = base_of(self.model)(
                inputs_embeds=self.inputs.fused(embedded[rows], states[rows])[None],
                attention_mask=seen_in_pass(number, count)[rows][:, columns].to(place)[None, None],
                position_ids=rows.to(place)[None],
                past_key_values=cache,
                use_cache=True,
            )[0][0]
            found.append(hidden.new_zeros(count, hidden.shape[1]).index_copy(0, rows.to(place), hidden))
            states = torch.cat([states[:1], found[-1][:-1].detach()])
            reached = reached_next(entries.learned, reached)
            if not bool(reached.any()):
                break
        return [*found, *(torch.zeros_like(found[0]) for _ in range(self._passes - len(found)))]

    @torch.no_grad()
    def masks(self, entries: Entries, outputs: Sequence[Tensor]) -> list[Tensor]:
        """Which tokens count in each pass, `[entries]` each."""
        found = [entries.learned]
        for rows in outputs[:-1]:
            counted = reached_next(entries.learned, found[-1])
            if self._mask_top_k:
                counted[counted.clone()] = self._among_likeliest(
                    rows[counted.to(rows.device)], entries.next_ids[counted]
                )
            found.append(counted)
        return found

    def _among_likeliest(self, rows: Tensor, next_ids: Tensor) -> Tensor:
        """Whether each row has its next token among the likeliest ones, `[rows]`."""
        logits = self.head(rows)
        likeliest = logits.topk(min(self._mask_top_k, logits.shape[-1]), -1).indices.cpu()
        ids = likeliest if self.head_tokens is None else self.head_tokens.cpu()[likeliest]
        return (ids == next_ids[:, None]).any(-1)

    def _learn(
        self, entries: Entries, outputs: Sequence[Tensor], masks: Sequence[Tensor], shares: Sequence[float]
    ) -> float:
        """Add the gradient of all passes over one lesson, and return its part of the loss."""
        loss, roots, gradients = 0.0, list[Tensor](), list[Tensor | None]()
        for hidden, mask, share in zip(outputs, masks, shares, strict=True):
            if not bool(mask.any()):
                continue
            chosen = hidden[mask.to(hidden.device)]
            wanted, totals = entries.wanted[mask].to(chosen), entries.log_total[mask].to(chosen)
            rows = chosen.detach().requires_grad_(True)
            loss += learn_divergence(self.head, rows, wanted, totals, share)
            distance = smooth_l1_loss(chosen, wanted, reduction="none").mean(-1).sum()
            feature = share * distance
            loss += float(feature.detach())
            roots += [chosen, feature]
            gradients += [rows.grad, None]
        if roots:
            torch.autograd.backward(roots, gradients)
        return loss


def entries_of(lesson: Lesson) -> Entries:
    """The entries of a lesson whose states are the target's final hidden states."""
    text, first, count = lesson.text, lesson.first, len(lesson.states) - 1
    ids = torch.tensor(text.token_ids)
    learned, log_total = torch.zeros(len(ids), dtype=torch.bool), lesson.log_total.new_zeros(len(ids))
    learned[text.num_context_tokens + torch.tensor(text.places, dtype=torch.long)] = True
    log_total[text.num_context_tokens :] = lesson.log_total
    predicted = slice(first + 2, first + 2 + count)
    return Entries(
        token_ids=ids[first + 1 : first + 1 + count],
        states=lesson.states[:count],
        wanted=lesson.states[1:],
        next_ids=ids[predicted],
        learned=learned[predicted],
        log_total=log_total[predicted],
    )


def seen_in_pass(number: int, count: int) -> Tensor:
    """Which keys of all passes so far the entries of pass `number` see, `[count, (number + 1) * count]`.

    Entry j sees itself, the entry before it as the pass before left it, and so on; from entry j - `number` down all as
    pass 0 left them.
    """
    behind = torch.arange(count)[:, None] - torch.arange(count)
    return torch.cat([behind >= number, *(behind == number - each for each in range(1, number + 1))], dim=1)


def reached_next(learned: Tensor, counted: Tensor) -> Tensor:
    """Which learned tokens `[entries]` follow one that counted in the pass before."""
    return learned & torch.cat([counted.new_zeros(1), counted[:-1]])
