"""Trains a chain: a few layers between the target's embeddings and head that read tokens alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from precedent.errors import ConfigError
from precedent.target.load.first_layers import base_of, layers_of
from precedent_drafts.heads import HEAD_TOKENS
from precedent_drafts.trained import Weights, draft_beside, holds_draft, initial_weights, load_weights
from precedent_drafts.training.lessons import Lesson, Teacher
from precedent_drafts.training.training import Recipe, Student, at_least, between, checked, learn_divergence

STARTS = ("ends", "first", "last")


@dataclass(frozen=True, kw_only=True)
class ChainRecipe(Recipe):
    """How to train a chain.

    Its `layers` start as copies of the target's: evenly spaced from first to last (`start` "ends"), its "first" or its
    "last" ones; or as those of a trained chain, if `start` is its folder. Each answer is seen with at most
    `context_tokens` tokens of context. In each of the `rounds` but the first it also learns from its own texts.
    """

    kind = "chain"

    layers: int = between(1, 3, 2)
    start: str = checked(
        "ends", lambda start: start in STARTS or holds_draft(start), f"must be {', '.join(STARTS)} or a draft's folder"
    )
    context_tokens: int = at_least(0, 256)
    rounds: int = at_least(1, 3)  # type: ignore[misc]  # a setting of this kind alone

    def begins_with(self, target: PreTrainedModel) -> tuple[tuple[int, ...], Weights]:
        """The target's layers whose shapes the chain's have, and its initial weights. Raises ConfigError."""
        if self.start in STARTS:
            chosen = initial_layers(self.start, self.layers, len(layers_of(target)))
            return chosen, initial_weights(target, chosen)
        settings, weights = load_weights(Path(self.start), target)
        if settings.exit_layer is not None or settings.fusion is not None:
            raise ConfigError(
                f"start={self.start!r} holds {settings.kind}, and only a chain of tokens alone is trained on"
            )
        if (count := len(settings.initial_layers)) != self.layers:
            raise ConfigError(f"the draft {self.start} has {count} layers, not {self.layers}; ask for as many")
        return settings.initial_layers, {name: tensor for name, tensor in weights.items() if name != HEAD_TOKENS}

    def teacher(self, target: PreTrainedModel) -> Teacher:
        """The target's distributions alone. Raises ConfigError if the draft would not be smaller than the target."""
        self.begins_with(target)
        return Teacher(target)

    def student(self, target: PreTrainedModel, head_tokens: Tensor | None) -> Student:
        """Layers of the target, or of the draft `start`."""
        layers, weights = self.begins_with(target)
        return ChainStudent(target, layers, head_tokens, self.learning_rate, weights, self.context_tokens)


def initial_layers(start: str, count: int, num_target_layers: int) -> tuple[int, ...]:
    """The target's layers, as many as `count`, from which `start` ("ends", "first" or "last") lets a draft begin.

    Raises ConfigError if the draft would not be smaller.
    """
    if num_target_layers <= count:
        raise ConfigError(f"a draft of {count} layers is not smaller than its target of {num_target_layers}")
    chosen = {
        "first": range(count),
        "last": range(num_target_layers - count, num_target_layers),
        "ends": [round(place * (num_target_layers - 1) / max(count - 1, 1)) for place in range(count)],
    }
    return tuple(chosen[start])


class ChainStudent(Student):
    """Trainable layers with the shapes of the target's `layers`, which start from `weights`."""

    def __init__(
        self,
        target: PreTrainedModel,
        layers: Sequence[int],
        head_tokens: Tensor | None,
        learning_rate: float,
        weights: Weights,
        context_tokens: int,
    ) -> None:
        super().__init__(target, head_tokens)
        self.own_settings, self._context_tokens = {"initial_layers": tuple(layers)}, context_tokens
        self._model = draft_beside(target, layers, weights, self.dtype).requires_grad_(False)
        own = base_of(self._model).layers.named_parameters()
        self.trains({f"layers.{name}": weight for name, weight in own}, learning_rate)

    def learn(self, lessons: Sequence[Lesson], number: int) -> float:
        """Add the gradient of the mean cross-entropy to the target, and return it."""
        share = 1.0 / sum(len(lesson.text.places) for lesson in lessons)
        return sum(self._learn(lesson, share) for lesson in lessons)

    def _learn(self, lesson: Lesson, share: float) -> float:
        text = lesson.text
        start = max(0, text.num_context_tokens - self._context_tokens)
        hidden = self.hidden(text.token_ids[start:-1])[-text.num_answer_tokens :][text.places]
        rows = hidden.detach().requires_grad_(True)
        loss = learn_divergence(self.head, rows, lesson.hidden[text.places], lesson.log_total[text.places], share)
        hidden.backward(rows.grad)
        return loss

    def hidden(self, token_ids: Sequence[int]) -> Tensor:
        """Final hidden states of one text, `[tokens, hidden_size]`."""
        ids = torch.tensor([token_ids], device=self.target.device)
        embedded = self.target.get_input_embeddings()(ids).to(self.dtype)
        hidden: Tensor = base_of(self._model)(inputs_embeds=embedded, use_cache=False).last_hidden_state
        return hidden[0]
