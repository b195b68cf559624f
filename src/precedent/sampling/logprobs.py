"""Log-probabilities of committed tokens, from the rows that verification reads anyway."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from precedent.sampling.target_rows import TargetRows


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token of the answer, its log-probability (natural), and `(token id, log-probability)` of the likeliest tokens.

    Probabilities are the target model's at temperature 1, after constraints and before truncation. They depend neither
    on how the token was chosen nor on which drafter proposed it.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def logprobs_of(
    rows: TargetRows, nodes: Sequence[int], token_ids: Sequence[int], num_top: int | None
) -> tuple[TokenLogprob, ...]:
    """The log-probabilities of `token_ids`, each of which follows its node in `nodes`; empty if `num_top` is None."""
    if num_top is None:
        return ()
    return logprobs_after(torch.stack([rows.logits(node) for node in nodes]), token_ids, num_top)


def logprobs_after(logits: Tensor, token_ids: Sequence[int], num_top: int) -> tuple[TokenLogprob, ...]:
    """The log-probabilities of `token_ids`, each of which follows its row of `logits` `[rows, vocab_size]`.

    Costs one softmax over the vocabulary per token.
    """
    distributions = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    chosen = (
        distributions.gather(1, torch.tensor(token_ids, device=distributions.device).unsqueeze(1)).squeeze(1).tolist()
    )
    best, ids = (found.tolist() for found in distributions.topk(min(num_top, distributions.shape[1])))
    return tuple(map(TokenLogprob, token_ids, chosen, map(_likeliest, ids, best)))


def _likeliest(token_ids: Sequence[int], logprobs: Sequence[float]) -> tuple[tuple[int, float], ...]:
    """Pairs of token id and log-probability, without tokens that a constraint forbids."""
    return tuple((token, value) for token, value in zip(token_ids, logprobs, strict=True) if value > -math.inf)
