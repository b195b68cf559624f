"""The vocabulary of a published draft: which of its target's tokens its head covers."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from precedent.errors import ModelLoadError

D2T, T2D = "d2t", "t2d"
"""Tensors of a draft: what to add to each of its token ids for the target's, and which of the target's it has."""


def covered_tokens(weights: Mapping[str, Tensor], num_rows: int, vocab_size: int, draft: object) -> Tensor:
    """The target's token id of each row of a draft's head, `[num_rows]`.

    `weights` may hold `d2t` `[num_rows]` and `t2d` `[vocab_size]`. Raises ModelLoadError, naming `draft`, if they do
    not agree with each other or with the target's vocabulary.
    """
    marked = weights[T2D].bool() if T2D in weights else None
    if marked is not None and marked.numel() != vocab_size:
        raise _misfit(draft, f"a vocabulary of {marked.numel()} tokens, and the target's has {vocab_size}")
    if D2T in weights:
        offsets = weights[D2T].long()
        if offsets.numel() != num_rows:
            raise _torn(draft, f"d2t has {offsets.numel()} entries for a head of {num_rows} rows")
        found = torch.arange(num_rows) + offsets
    elif marked is not None:
        found = marked.nonzero()[:, 0]
    else:
        found = torch.arange(num_rows)
    if found.numel() != num_rows or (D2T not in weights and marked is None and num_rows != vocab_size):
        raise _misfit(draft, f"a head of {num_rows} tokens without a d2t that says which, and the target {vocab_size}")
    _check(found, marked, vocab_size, draft)
    return found


def _check(found: Tensor, marked: Tensor | None, vocab_size: int, draft: object) -> None:
    if int(found.min()) < 0 or int(found.max()) >= vocab_size:
        raise _misfit(draft, f"tokens up to {int(found.max())}, and the target's vocabulary has {vocab_size}")
    if found.unique().numel() != found.numel():
        raise _torn(draft, "d2t gives one token to two rows of the head")
    if marked is not None and not bool(marked[found].all()):
        raise _torn(draft, "d2t and t2d name different tokens")


def _misfit(draft: object, has: str) -> ModelLoadError:
    return ModelLoadError(f"{draft} has {has}: give the target that it was trained for")


def _torn(draft: object, says: str) -> ModelLoadError:
    return ModelLoadError(f"the vocabulary of {draft} is damaged: {says}; get its files again")
