"""The draft in training: its layers in full precision, its loss, and one step of its optimiser."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from precedent.target.load.first_layers import base_of
from precedent.target.load.trained_draft import HEAD_TOKENS, Weights, draft_beside, initial_weights, layer_weights
from precedent.training.head import OutputHead
from precedent.training.texts import Lesson

ROWS_AT_ONCE = 256
"""Number of logit rows held at a time."""

WARM_UP = 0.05
"""Share of the steps in which the learning rate rises; then it falls along a cosine to a tenth."""

LEAST_RATE = 0.1

LARGEST_NORM = 1.0
"""Maximum gradient norm; larger gradients are scaled down."""


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
        self._target, self._learning_rate = target, learning_rate
        self._dtype = torch.float64 if target.dtype == torch.float64 else torch.float32
        begun = initial_weights(target, initial_layers) if weights is None else layer_weights(weights)
        self._model = draft_beside(target, initial_layers, begun, self._dtype)
        self._model.requires_grad_(False)
        self._layers = base_of(self._model).layers.requires_grad_(True)
        self._head = OutputHead(target, self._dtype, head_tokens)
        self._optimizer = torch.optim.AdamW(self._layers.parameters(), lr=learning_rate, betas=(0.9, 0.98), eps=1e-8)

    def step(self, lessons: Sequence[Lesson], done: float, longest_context: int) -> float:
        """Take one step on a batch of lessons and return the mean cross-entropy to the target.

        `done` is the share of all steps that are done.
        """
        count = sum(lesson.num_learned for lesson in lessons)
        self._optimizer.zero_grad(set_to_none=True)
        loss = sum(self._learn(lesson, count, longest_context) for lesson in lessons)
        torch.nn.utils.clip_grad_norm_(self._layers.parameters(), LARGEST_NORM)
        for group in self._optimizer.param_groups:
            group["lr"] = self._learning_rate * rate_at(done)
        self._optimizer.step()
        return loss

    def _learn(self, lesson: Lesson, count: int, longest_context: int) -> float:
        """Accumulate a lesson's gradient and return its part of the mean loss."""
        text = lesson.text
        start = max(0, text.num_context_tokens - longest_context)
        hidden = self._hidden(text.token_ids[start:-1])[-text.num_answer_tokens :][text.places]
        rows = hidden.detach().requires_grad_(True)
        loss = 0.0
        for piece, thought, total in zip(
            rows.split(ROWS_AT_ONCE), lesson.hidden.split(ROWS_AT_ONCE), lesson.log_total.split(ROWS_AT_ONCE),
            strict=True,
        ):  # fmt: skip
            loss += self._compare(piece, thought, total, count)
        hidden.backward(rows.grad)
        return loss

    def _compare(self, rows: Tensor, thought: Tensor, log_total: Tensor, count: int) -> float:
        """Forward KL to the target, up to a constant. The gradient at the logits: `draft_probs * mass - target_probs`.

        Tokens outside the head count with probability 0 on both sides, because nothing can be learned about them.
        """
        with torch.no_grad():
            target_logits = self._head(thought.to(rows.device))
            target_probs = (target_logits - log_total.to(target_logits)[:, None]).exp()
        logits = self._head(rows)
        with torch.no_grad():
            log_probs = logits.log_softmax(-1)
            loss = -float((target_probs * log_probs).sum()) / count
            gradient = (log_probs.exp() * target_probs.sum(-1, keepdim=True) - target_probs) / count
        logits.backward(gradient)
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
        found = {f"weight.{name}": tensor for name, tensor in self._layers.state_dict().items()}
        for name, parameter in self._layers.named_parameters():
            for key, value in self._optimizer.state[parameter].items():
                found[f"{key}.{name}"] = value
        return found

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a saved `state`."""
        self._layers.load_state_dict(_below(state, "weight."))
        for name, parameter in self._layers.named_parameters():
            self._optimizer.state[parameter] = {
                key: state[f"{key}.{name}"].to(parameter.device if key != "step" else "cpu")
                for key in ("step", "exp_avg", "exp_avg_sq")
            }


def rate_at(done: float) -> float:
    """The learning rate's factor after the share `done` of all steps."""
    if done < WARM_UP:
        return max(done, WARM_UP / 10) / WARM_UP
    return LEAST_RATE + (1 - LEAST_RATE) * 0.5 * (1 + math.cos(math.pi * (done - WARM_UP) / (1 - WARM_UP)))


def _below(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
