"""Targets with forwards of fixed size and without, and that they compute alike."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from helpers.hybrids import random_ids, random_tree
from precedent.target import Slot, TargetModel
from precedent_cuda import StaticSettings
from precedent_cuda.attention import StaticRows
from precedent_testing.tiny_models import tiny_causal_lm

WITHOUT_GRAPHS = StaticSettings(arena_tokens=8192, capture=False)


def static_target(model_type: str = "llama", **settings: object) -> TargetModel:
    return TargetModel(tiny_causal_lm(model_type, **settings), cuda_graphs=WITHOUT_GRAPHS)


def plain_target(model_type: str = "llama", **settings: object) -> TargetModel:
    return TargetModel(tiny_causal_lm(model_type, **settings))


def keys_and_values(slot: Slot) -> Tensor:
    """Everything committed, [layers, 2, heads, length, head_dim]."""
    return torch.stack([torch.cat(layer.rows(0, slot.kv.length)) for layer in slot.kv.layers])


def alike(
    static: TargetModel,
    plain: TargetModel,
    prompts: Sequence[int],
    rounds: int,
    widths: Sequence[int],
    tolerance: float = 1e-9,
) -> None:
    """Play the same requests on both: prompts, then rounds of trees that are scored together and partly committed."""
    ours, theirs = ([target.new_slot() for _ in prompts] for target in (static, plain))
    for number, (length, *pair) in enumerate(zip(prompts, ours, theirs, strict=True)):
        for target, slot in zip((static, plain), pair, strict=True):
            target.prefill(slot, random_ids(number, length))
    for round_number in range(rounds):
        trees = [random_tree(100 * round_number + i, width) for i, width in enumerate(widths)]
        found = static.score(list(zip(ours, trees, strict=True)))
        expected = plain.score(list(zip(theirs, trees, strict=True)))
        paths = [tree.path_to(random.Random(round_number).randrange(len(tree))) if tree else () for tree in trees]
        static.commit_all(list(zip(ours, trees, paths, [round_number] * len(trees), strict=True)))
        for twin, tree, path in zip(theirs, trees, paths, strict=True):
            plain.commit(twin, tree, path, round_number)
        for one, other, slot, twin in zip(found, expected, ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=tolerance)
            torch.testing.assert_close(keys_and_values(slot), keys_and_values(twin), rtol=0, atol=tolerance)


def reversed_lineage(rows: StaticRows) -> Tensor:
    """In place of `StaticRows.lineage`: a row, then its ancestors up to the root."""
    width = rows.width
    return width - 1 - rows.ancestors.logical_not().flip(-1).to(torch.uint8).sort(dim=-1, stable=True).indices
