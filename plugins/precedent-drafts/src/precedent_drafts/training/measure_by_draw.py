"""Acceptance of each sample of a step, for a draft that reads its own hidden states behind the committed text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from precedent.config import SamplingParams
from precedent.sampling.probabilities import probs_of
from precedent.target import Slot, TargetModel
from precedent.tree import EMPTY_TREE
from precedent_drafts.head import HeadModel
from precedent_drafts.training.texts import Text


@torch.inference_mode()
def compared_by_draw(
    target: TargetModel, head: HeadModel, text: Text, sampling: SamplingParams, most_draws: int
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Acceptance of each sample behind every position of an answer, and whether the first one's likeliest token agrees.

    The first is `[num_answer_tokens, most_draws]`, NaN beyond the end of the answer: the draft is given the true tokens
    before a sample, and reads its own hidden states of all but the first.
    """
    prompt, answer = text.token_ids[: text.num_context_tokens], text.token_ids[text.num_context_tokens :]
    slot, drafted = target.new_slot(), head.new_slot()
    head.bind(drafted, lambda: slot)
    target.prefill(slot, prompt)
    head.prefill(drafted, prompt[1:])
    rows, chains = list[Tensor](), list[list[Tensor]]()
    for place, token in enumerate(answer):
        chains.append(_chain(head, drafted, answer[place : place + most_draws], len(prompt) + place))
        rows.append(target.plain_step(slot)[0])
        target.commit(slot, EMPTY_TREE, (), token)
        drafted.pending = token
    probs = [probs_of(row, sampling) for row in rows]
    accepted = np.full((len(answer), most_draws), np.nan)
    for place, chain in enumerate(chains):
        for draw, row in enumerate(chain):
            accepted[place, draw] = float(torch.minimum(probs_of(row, sampling), probs[place + draw]).sum())
    agreed = [int(row.argmax()) == int(chain[0].argmax()) for row, chain in zip(rows, chains, strict=True)]
    return accepted, np.array(agreed)


def _chain(head: HeadModel, slot: Slot, token_ids: Sequence[int], length: int) -> list[Tensor]:
    """The draft's logits before each of these tokens behind `length` committed ones, `[vocab_size]` each."""
    found = []
    for token in token_ids:
        found.append(head.plain_step(slot)[0])
        head.commit(slot, EMPTY_TREE, (), token)
    head.rewind(slot, length - 1)  # entries of the text's tokens but the first
    return found
