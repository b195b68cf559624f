"""Trains an exit: an adapter behind frozen layers of the target, whose outputs are read once (FREE, 2310.05424).

The loss of a token is the forward divergence to the target plus, from the paper, the distance of the exit's final
hidden state from the target's (its `KD-last`): the squared one, relative to the length of the target's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from precedent.errors import ConfigError
from precedent.target.load.first_layers import base_of, layers_of
from precedent_drafts.trained import ADAPTER, ExitAdapter, check_exits
from precedent_drafts.training.lessons import Lesson, Teacher
from precedent_drafts.training.training import Recipe, Student, at_least, learn_divergence


@dataclass(frozen=True, kw_only=True)
class ExitRecipe(Recipe):
    """How to train an exit.

    It stands behind the target's layer `exit_layer`, counted from 1, with a gated unit of `exit_width`. `layerwise`
    weighs the distance of hidden states beside the divergence of distributions.
    """

    kind = "exit"

    exit_layer: int = at_least(1, 4)
    exit_width: int = at_least(1, 1024)
    layerwise: float = at_least(0, 1.0)
    batch_texts: int = at_least(1, 8)

    def teacher(self, target: PreTrainedModel) -> Teacher:
        """The outputs of the exit's layer. Raises ConfigError for a layer that is not before the target's last."""
        last = len(layers_of(target)) - 1
        if self.exit_layer > last:
            raise ConfigError(f"exit_layer={self.exit_layer}: an exit of this target stands behind layer 1 to {last}")
        return Teacher(target, (self.exit_layer,))

    def student(self, target: PreTrainedModel, head_tokens: Tensor | None) -> Student:
        """An adapter that changes nothing yet."""
        return ExitStudent(target, head_tokens, self)


class ExitStudent(Student):
    """A trainable adapter on a frozen target. Raises UnsupportedError for a target without a place for one."""

    def __init__(self, target: PreTrainedModel, head_tokens: Tensor | None, recipe: ExitRecipe) -> None:
        check_exits(target)
        super().__init__(target, head_tokens)
        self.own_settings, self._layerwise = {"exit_layer": recipe.exit_layer}, recipe.layerwise
        with torch.random.fork_rng():
            torch.manual_seed(recipe.seed)
            adapter = ExitAdapter(target.config.get_text_config().hidden_size, recipe.exit_width)
        self.adapter: ExitAdapter = adapter.to(target.device, self.dtype)
        own = self.adapter.named_parameters()
        self.trains({f"{ADAPTER}{name}": weight for name, weight in own}, recipe.learning_rate)

    def learn(self, lessons: Sequence[Lesson], number: int) -> float:
        """Add the gradient of the mean loss over the tokens to learn, and return that loss.

        Each lesson holds the output of the exit's layer before every token of its answer.
        """
        states, thought, log_total = (
            torch.cat([getattr(lesson, name)[lesson.text.places] for lesson in lessons]).to(self.target.device)
            for name in ("states", "hidden", "log_total")
        )
        hidden: Tensor = base_of(self.target).norm(self.adapter(states.to(self.dtype)))
        rows, wanted = hidden.detach().requires_grad_(True), thought.to(self.dtype)
        loss = learn_divergence(self.head, rows, thought, log_total, 1.0 / len(hidden))
        distance = ((hidden - wanted).square().sum(-1) / wanted.square().sum(-1)).mean()
        torch.autograd.backward([hidden, self._layerwise * distance], [rows.grad, None])
        return loss + self._layerwise * float(distance.detach())
