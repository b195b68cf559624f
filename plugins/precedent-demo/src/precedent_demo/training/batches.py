"""Batches of conversations of similar length; a restart yields the same ones."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice

import torch
from torch import Tensor

from precedent_demo.training.trajectories import Conversation, Encoder, conversations

POOL = 240
"""Conversations sorted by length at a time, enough to waste few positions on padding."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Conversations `[batch, length]` padded on the right, a mask of the assistant's tokens, and the place in order."""

    token_ids: Tensor
    written: Tensor
    pool: int = 0
    number: int = 0

    @property
    def num_tokens(self) -> int:
        """Positions in the batch, including padding."""
        return self.token_ids.numel()


def batches(
    encoder: Encoder, set_name: str, tokens: int, pool: int = 0, number: int = 0, *, pool_size: int = POOL
) -> Iterator[Batch]:
    """Endless batches of at most `tokens` positions, starting with batch `number` of pool `pool`.

    A pool is `pool_size` conversations, sorted by length.
    """
    for current in count(pool):
        drawn = islice(conversations(encoder, set_name, current), pool_size)
        found = sorted(drawn, key=lambda one: len(one.token_ids))
        groups = list(_groups(found, tokens))
        random.Random(current).shuffle(groups)
        for position in range(number if current == pool else 0, len(groups)):
            yield replace(padded(groups[position]), pool=current, number=position)


def _groups(ordered: Sequence[Conversation], tokens: int) -> Iterator[list[Conversation]]:
    group: list[Conversation] = []
    for one in ordered:
        if group and (len(group) + 1) * len(one.token_ids) > tokens:
            yield group
            group = []
        group.append(one)
    yield group


def padded(group: Sequence[Conversation]) -> Batch:
    """Several conversations as one batch, padded with token 0; no earlier token attends to the padding."""
    length = max(len(one.token_ids) for one in group)
    token_ids = torch.zeros((len(group), length), dtype=torch.long)
    written = torch.zeros((len(group), length), dtype=torch.bool)
    for row, one in enumerate(group):
        token_ids[row, : len(one.token_ids)] = torch.tensor(one.token_ids)
        written[row, : len(one.written)] = torch.tensor(one.written)
    return Batch(token_ids, written)
