"""A draft in training: its weights with their optimiser, and the divergence that it learns at a frozen head."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from precedent_drafts.borrowed import HEAD_TOKENS
from precedent_drafts.kinds import TRAINED
from precedent_drafts.trained import DraftSettings, save_draft
from precedent_drafts.training.head import OutputHead
from precedent_drafts.training.lessons import ROWS_AT_ONCE, Lesson

WARM_UP, LEAST_RATE = 0.05, 0.1
"""Share of the steps in which the learning rate rises; then it falls along a cosine to this share of its maximum."""

LARGEST_NORM = 1.0
"""Maximum gradient norm; larger gradients are scaled down."""


class Student(ABC):
    """A draft in training beside a frozen target. `head_tokens` `[tokens]` are the ids that its head covers, None: all.

    It trains in float32, or in float64 as its target. A subclass calls `trains` with its weights by the names of its
    folder; `own_settings` are those of `DraftSettings` that say what it is.
    """

    own_settings: Mapping[str, Any]

    def __init__(self, target: PreTrainedModel, head_tokens: Tensor | None) -> None:
        self.target, self.head_tokens = target, head_tokens
        self.dtype = torch.float64 if target.dtype == torch.float64 else torch.float32
        self.head = OutputHead(target, self.dtype, head_tokens)

    def trains(self, weights: Mapping[str, Tensor], learning_rate: float) -> None:
        """Begin to train these weights: AdamW, a warm-up, then a cosine."""
        self.by_name = {name: weight.requires_grad_(True) for name, weight in weights.items()}
        self._learning_rate = learning_rate
        self.optimizer = torch.optim.AdamW(self.by_name.values(), lr=learning_rate, betas=(0.9, 0.98), eps=1e-8)

    @abstractmethod
    def learn(self, lessons: Sequence[Lesson], number: int) -> float:
        """Add the gradient of the mean loss of step `number` on some lessons, and return that loss."""

    def step(self, lessons: Sequence[Lesson], number: int, steps: int) -> float:
        """Take step `number` of so many on a batch of lessons, and return the mean loss."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.learn(lessons, number)
        torch.nn.utils.clip_grad_norm_(self.by_name.values(), LARGEST_NORM)
        for group in self.optimizer.param_groups:
            group["lr"] = self._learning_rate * rate_at(number / steps)
        self.optimizer.step()
        return loss

    def weights(self) -> dict[str, Tensor]:
        """The weights to save in a draft's folder, in the target's precision."""
        saved = torch.float32 if self.dtype == self.target.dtype else self.target.dtype
        found = {name: weight.detach().to(saved) for name, weight in self.by_name.items()}
        return found if self.head_tokens is None else {**found, HEAD_TOKENS: self.head_tokens.to(torch.int32)}

    def save(self, folder: Path) -> PreTrainedModel:
        """Write the draft's folder, and return the draft."""
        covered = None if self.head_tokens is None else self.head_tokens.numel()
        save_draft(folder, DraftSettings.of(self.target, num_head_tokens=covered, **self.own_settings), self.weights())
        return TRAINED.load(folder, self.target)

    def state(self) -> dict[str, Tensor]:
        """Weights and the optimiser's moments by name."""
        found: dict[str, Tensor] = {f"weight.{name}": weight for name, weight in self.by_name.items()}
        for name, weight in self.by_name.items():
            found |= {f"{key}.{name}": value for key, value in self.optimizer.state[weight].items()}
        return found

    @torch.no_grad()
    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a saved `state`."""
        for name, weight in self.by_name.items():
            weight.copy_(state[f"weight.{name}"])
            self.optimizer.state[weight] = {
                key: state[f"{key}.{name}"].to(weight.device if key != "step" else "cpu")
                for key in ("step", "exp_avg", "exp_avg_sq")
            }


def rate_at(done: float) -> float:
    """The learning rate's factor after the share `done` of all steps."""
    if done < WARM_UP:
        return max(done, WARM_UP / 10) / WARM_UP
    return LEAST_RATE + (1 - LEAST_RATE) * 0.5 * (1 + math.cos(math.pi * (done - WARM_UP) / (1 - WARM_UP)))


def learn_divergence(head: OutputHead, rows: Tensor, hidden: Tensor, log_total: Tensor, share: float) -> float:
    """Add the gradient of the divergence to `rows.grad`, and return the cross-entropy; each row counts by its `share`.

    `rows` `[rows, hidden_size]` are a draft's final hidden states, a leaf that requires gradients; `hidden` are the
    target's, with the log-sum-exp of all its logits `log_total` `[rows]`. The gradient at the logits is
    `draft_probs * mass - target_probs`, where `mass` is what the target gives to the head's tokens: all others count
    with probability 0 on both sides, because nothing can be learned about them.
    """
    total, parts = 0.0, (part.split(ROWS_AT_ONCE) for part in (rows, hidden, log_total))
    for some, thought, log_totals in zip(*parts, strict=True):
        with torch.no_grad():
            target_logits = head(thought.to(some.device))
            target_probs = (target_logits - log_totals.to(target_logits)[:, None]).exp()
        logits = head(some)
        with torch.no_grad():
            log_probs = logits.log_softmax(-1)
            total -= share * float((target_probs * log_probs).sum())
            gradient = share * (log_probs.exp() * target_probs.sum(-1, keepdim=True) - target_probs)
        logits.backward(gradient)
    return total
