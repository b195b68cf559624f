"""The weights that a training changes, with their optimiser: AdamW, a warm-up, then a cosine."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

WARM_UP = 0.05
"""Share of the steps in which the learning rate rises; then it falls along a cosine to a tenth."""

LEAST_RATE = 0.1

LARGEST_NORM = 1.0
"""Maximum gradient norm; larger gradients are scaled down."""


class LearnedWeights:
    """Weights by name, which require gradients from now on."""

    def __init__(self, weights: Mapping[str, Tensor], learning_rate: float) -> None:
        self.by_name = {name: weight.requires_grad_(True) for name, weight in weights.items()}
        self._learning_rate = learning_rate
        self._optimizer = torch.optim.AdamW(self.by_name.values(), lr=learning_rate, betas=(0.9, 0.98), eps=1e-8)

    def forget_gradients(self) -> None:
        """Drop the gradients of the last step."""
        self._optimizer.zero_grad(set_to_none=True)

    def step(self, done: float) -> None:
        """Take a step along the gradients; `done` is the share of all steps that are done."""
        torch.nn.utils.clip_grad_norm_(self.by_name.values(), LARGEST_NORM)
        for group in self._optimizer.param_groups:
            group["lr"] = self._learning_rate * rate_at(done)
        self._optimizer.step()

    def learn(self, loss: Callable[[], float], done: float) -> float:
        """Take a step along the gradients that `loss` adds, and return what it does."""
        self.forget_gradients()
        found = loss()
        self.step(done)
        return found

    def state(self) -> dict[str, Tensor]:
        """Weights and the optimiser's moments by name."""
        found: dict[str, Tensor] = {f"weight.{name}": weight for name, weight in self.by_name.items()}
        for name, weight in self.by_name.items():
            found |= {f"{key}.{name}": value for key, value in self._optimizer.state[weight].items()}
        return found

    @torch.no_grad()
    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a saved `state`."""
        for name, weight in self.by_name.items():
            weight.copy_(state[f"weight.{name}"])
            self._optimizer.state[weight] = {
                key: state[f"{key}.{name}"].to(weight.device if key != "step" else "cpu")
                for key in ("step", "exp_avg", "exp_avg_sq")
            }


def rate_at(done: float) -> float:
    """The learning rate's factor after the share `done` of all steps."""
    if done < WARM_UP:
        return max(done, WARM_UP / 10) / WARM_UP
    return LEAST_RATE + (1 - LEAST_RATE) * 0.5 * (1 + math.cos(math.pi * (done - WARM_UP) / (1 - WARM_UP)))
