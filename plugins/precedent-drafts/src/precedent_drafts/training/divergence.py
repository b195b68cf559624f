"""The forward Kullback-Leibler divergence to a target, learned at a frozen head without a traced softmax."""

from __future__ import annotations

import torch
from torch import Tensor

from precedent_drafts.training.head import OutputHead

ROWS_AT_ONCE = 256
"""Number of logit rows held at a time."""


def learn_divergence(head: OutputHead, rows: Tensor, hidden: Tensor, log_total: Tensor, shares: Tensor) -> float:
    """Add the gradient of the divergence to `rows.grad`, and return the cross-entropy.

    `rows` `[rows, hidden_size]` are a draft's final hidden states, a leaf that requires gradients; `hidden` are the
    target's, with the log-sum-exp of all its logits `log_total` `[rows]`. Each row counts with its part of `shares`
    `[rows]`; both results are sums. The gradient at the logits is `draft_probs * mass - target_probs`, where `mass` is
    what the target gives to the head's tokens: all others count with probability 0 on both sides, because nothing can
    be learned about them.
    """
    parts = (part.split(ROWS_AT_ONCE) for part in (rows, hidden, log_total, shares))
    return sum(_learn(head, *part) for part in zip(*parts, strict=True))


def _learn(head: OutputHead, rows: Tensor, hidden: Tensor, log_total: Tensor, shares: Tensor) -> float:
    with torch.no_grad():
        target_logits = head(hidden.to(rows.device))
        target_probs = (target_logits - log_total.to(target_logits)[:, None]).exp()
    logits = head(rows)
    with torch.no_grad():
        weights = shares.to(logits)[:, None]
        log_probs = logits.log_softmax(-1)
        loss = -float((weights * target_probs * log_probs).sum())
        gradient = weights * (log_probs.exp() * target_probs.sum(-1, keepdim=True) - target_probs)
    logits.backward(gradient)
    return loss
