"""The only place where logits become probabilities."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from precedent.config import SamplingParams

INFINITY, NEGATIVE_INFINITY = 0x7F80, 0xFF80  # as bits of bfloat16
COLDEST = 1e-30  # colder, float32 logits overflow; probabilities are one-hot (shared by exact ties) long before


def largest_id(row: Tensor) -> int:
    """The lowest id of the largest number of a row `[vocab_size]`, or the id of a NaN if it holds one."""
    return largest(row)[1] if row.is_cpu else int(row.argmax())  # on a GPU, reading the number is a second wait


def largest(row: Tensor) -> tuple[float, int]:
    """The largest number of a row `[vocab_size]`, or NaN if it holds one, and its lowest id."""
    if not row.is_cpu:
        value, token = torch.stack([number.double() for number in row.max(-1)]).tolist()
        return value, int(token)
    values = row.detach()
    if row.dtype == torch.bfloat16:
        bits = values.view(torch.int16).numpy()
        token = int(bits.argmax())
        # The bits of positive numbers sort like the numbers; those of NaN lie above infinity's, for either sign.
        if 0 < bits[token] <= INFINITY and bits.view(np.uint16).max() <= NEGATIVE_INFINITY:
            return float(values[token]), token
    wide = values if row.dtype in (torch.float32, torch.float64) else values.float()
    numbers = wide.numpy()
    token = int(numbers.argmax())  # several times as fast as torch's argmax, especially in bfloat16
    return float(numbers[token]), token


def probs_of(logits: Tensor, params: SamplingParams) -> Tensor:
    """Probabilities of logits `[..., vocab_size]` under `params` (temperature, top-k, top-p, min-p, in this order).

    The result is float32, or float64 for float64 logits. At temperature 0 a row is one-hot at the argmax (lowest id on
    ties). Order and meaning of the warpers follow transformers' logits processors.
    """
    rows = logits if logits.dtype == torch.float64 else logits.float()
    if params.greedy:
        return torch.zeros_like(rows).scatter_(-1, rows.argmax(-1, keepdim=True), 1.0)
    rows = rows / max(params.temperature, COLDEST)
    if params.top_k:
        rows = _keep_top_k(rows, params.top_k)
    probs = rows.softmax(-1)
    if params.top_p < 1.0:
        probs = _keep_top_p(probs, params.top_p)
    if params.min_p > 0.0:
        probs = torch.where(probs < params.min_p * probs.amax(-1, keepdim=True), 0.0, probs)
        probs = probs / probs.sum(-1, keepdim=True)
    return probs


def _keep_top_k(rows: Tensor, top_k: int) -> Tensor:
    smallest_kept = rows.topk(min(top_k, rows.shape[-1])).values[..., -1:]
    return rows.masked_fill(rows < smallest_kept, -torch.inf)


def _keep_top_p(probs: Tensor, top_p: float) -> Tensor:
    """Drop the least likely tokens up to a mass of 1 - top_p, as transformers and vLLM do; the likeliest stays.

    They leave it to the sort which of equally likely tokens at the edge stay. Here those with the highest ids do (as
    after a stable sort), so that a row keeps the same tokens on every machine, in a draft and in the target.
    """
    ordered = probs.sort().values
    dropped = ordered.cumsum(-1) <= 1.0 - top_p
    dropped[..., -1] = False
    num_kept = (~dropped).sum(-1, keepdim=True)
    edge = ordered.gather(-1, probs.shape[-1] - num_kept)
    above, tied = probs > edge, probs == edge
    tied &= tied.flip(-1).cumsum(-1).flip(-1) <= num_kept - above.sum(-1, keepdim=True)
    kept = torch.where(above | tied, probs, 0.0)
    return kept / kept.sum(-1, keepdim=True)
