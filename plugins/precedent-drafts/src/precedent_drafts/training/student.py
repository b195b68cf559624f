"""The draft in training: its layers in full precision, its loss, and one step of its optimiser."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from precedent.target.load.first_layers import base_of
from precedent_drafts.borrowed import HEAD_TOKENS
from precedent_drafts.trained import Weights, draft_beside, initial_weights, layer_weights
from precedent_drafts.training.divergence import learn_divergence
from precedent_drafts.training.head import OutputHead
from precedent_drafts.training.learned_weights import LearnedWeights
from precedent_drafts.training.texts import Lesson


class Student:
    """Trainable layers on a frozen target. `head_tokens` `[tokens]` are the ids that its head covers, None for all.

    The layers have the shapes of the target's `initial_layers`. They start from `weights`, or, if None, from the
    weights of these layers.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        initial_layers: Sequence[int],
        head_tokens: Tensor | None,
        learning_rate: float,
        weights: Weights | None = None,
    ) -> None:
        self.initial_layers, self.head_tokens = tuple(initial_layers), head_tokens
        self._target = target
        self._dtype = torch.float64 if target.dtype == torch.float64 else torch.float32
        begun = initial_weights(target, initial_layers) if weights is None else layer_weights(weights)
        self._model = draft_beside(target, initial_layers, begun, self._dtype)
        self._model.requires_grad_(False)
        self._layers = base_of(self._model).layers.requires_grad_(True)
        self._head = OutputHead(target, self._dtype, head_tokens)
        self._learned = LearnedWeights(dict(self._layers.named_parameters()), learning_rate)

    def step(self, lessons: Sequence[Lesson], done: float, longest_context: int) -> float:
        """Take one step on a batch of lessons and return the mean cross-entropy to the target.

        `done` is the share of all steps that are done.
        """
        count = sum(lesson.num_learned for lesson in lessons)
        self._learned.forget_gradients()
        loss = sum(self._learn(lesson, count, longest_context) for lesson in lessons)
        self._learned.step(done)
        return loss

    def _learn(self, lesson: Lesson, count: int, longest_context: int) -> float:
        """Accumulate a lesson's gradient and return its part of the mean loss."""
        text = lesson.text
        start = max(0, text.num_context_tokens - longest_context)
        hidden = self._hidden(text.token_ids[start:-1])[-text.num_answer_tokens :][text.places]
        rows = hidden.detach().requires_grad_(True)
        shares = torch.full((len(rows),), 1.0 / count, dtype=self._dtype)
        loss = learn_divergence(self._head, rows, lesson.hidden, lesson.log_total, shares)
        hidden.backward(rows.grad)
        return loss

    def _hidden(self, token_ids: Sequence[int]) -> Tensor:
        """Final hidden states of one text, `[tokens, hidden_size]`."""
        ids = torch.tensor([token_ids], device=self._target.device)
        embedded = self._target.get_input_embeddings()(ids).to(self._dtype)
        hidden: Tensor = base_of(self._model)(inputs_embeds=embedded, use_cache=False).last_hidden_state
        return hidden[0]

    def weights(self) -> dict[str, Tensor]:
        """The weights to save in a draft's folder, in the target's precision."""
        saved = torch.float32 if self._dtype == self._target.dtype else self._target.dtype
        found = {f"layers.{name}": tensor.to(saved) for name, tensor in self._layers.state_dict().items()}
        return found if self.head_tokens is None else {**found, HEAD_TOKENS: self.head_tokens.to(torch.int32)}

    def draft(self) -> PreTrainedModel:
        """The draft model with the current weights."""
        draft = draft_beside(self._target, self.initial_layers, self.weights())
        return draft.requires_grad_(False)

    def state(self) -> dict[str, Tensor]:
        """Weights and the optimiser's moments by name."""
        return self._learned.state()

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a saved `state`."""
        self._learned.restore(state)
