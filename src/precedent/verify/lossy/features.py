"""What a trained judge knows of a rejected token: numbers from both models' rows, and the target's hidden state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from precedent.errors import ConfigError

LEAST = -30.0
"""The least log-probability that counts: rows hold -inf where a constraint, or a restricted head, excludes a token."""


@dataclass(frozen=True, slots=False, eq=False)
class Rejected:
    """A rejected token and the rows in which it stood: the target's and the draft's logits, each `[vocab_size]`.

    They are those under the request's constraints, before temperature. `hidden` `[hidden_size]` is the target's hidden
    state of the token itself.
    """

    token: int
    target_logits: Tensor
    draft_logits: Tensor
    hidden: Tensor | None = None

    @cached_property
    def target_log_probs(self) -> Tensor:
        """`[vocab_size]`, at temperature 1."""
        return self.target_logits.float().log_softmax(-1).clamp(min=LEAST)

    @cached_property
    def draft_log_probs(self) -> Tensor:
        """`[vocab_size]`, at temperature 1."""
        return self.draft_logits.float().log_softmax(-1).clamp(min=LEAST)


def _entropy(log_probs: Tensor) -> Tensor:
    return -(log_probs.exp() * log_probs).sum()


def _divergence(of: Tensor, other: Tensor) -> Tensor:
    """The Kullback-Leibler divergence in nats between two rows of log-probabilities."""
    return (of.exp() * (of - other)).sum()


def _hidden(seen: Rejected) -> Tensor:
    assert seen.hidden is not None, "a judge that reads hidden states was given none"
    return seen.hidden


HIDDEN = "hidden"

FEATURES: Mapping[str, Callable[[Rejected], Tensor]] = {
    "log_prob": lambda seen: seen.target_log_probs[seen.token],
    "margin": lambda seen: seen.target_log_probs.max() - seen.target_log_probs[seen.token],
    "rank": lambda seen: (seen.target_log_probs > seen.target_log_probs[seen.token]).sum().log1p(),
    "entropy": lambda seen: _entropy(seen.target_log_probs),
    "draft_log_prob": lambda seen: seen.draft_log_probs[seen.token],
    "draft_entropy": lambda seen: _entropy(seen.draft_log_probs),
    "divergence": lambda seen: _divergence(seen.target_log_probs, seen.draft_log_probs),
    HIDDEN: _hidden,
}
"""Feature to its value: of the target's row the token's log-probability, how far it lies below the likeliest, the
logarithm of one plus how many are likelier, the entropy; of the draft's row the first and the last; and KL(target ||
draft), all in nats. `hidden` is as many numbers as the target's hidden state has."""

OF_ROWS = tuple(name for name in FEATURES if name != HIDDEN)
"""The features that rows alone give."""


def check_features(names: Sequence[str]) -> tuple[str, ...]:
    """The names as they are. Raises ConfigError if there are none, or if one is unknown or named twice."""
    unknown = [name for name in names if name not in FEATURES]
    if unknown or not names or len(set(names)) != len(names):
        raise ConfigError(f"features={','.join(names)} must be distinct names of {', '.join(FEATURES)}")
    return tuple(names)


def features_of(rejected: Rejected, names: Sequence[str]) -> list[float]:
    """The numbers of these features, in order, read from the device at once."""
    values: list[float] = torch.cat([FEATURES[name](rejected).float().reshape(-1) for name in names]).tolist()
    return values


def widths_of(names: Sequence[str], num_values: int) -> list[int]:
    """How many of `num_values` numbers each feature has. Raises ConfigError if there are fewer than features."""
    rest = num_values - len(names)
    if rest < 0 or (rest and HIDDEN not in names):
        raise ConfigError(f"{num_values} numbers cannot be the features {', '.join(names)}")
    return [1 + rest if name == HIDDEN else 1 for name in names]
