"""Hybrids as target models: trees, batches, commits, rewinds, forks and prefixes are those of plain forwards."""

from __future__ import annotations

import random

import pytest
import torch
from helpers.hybrids import FAMILIES, ONE_PATH, hybrid, prefilled, random_ids, random_tree
from helpers.packages import graph_settings

from precedent.errors import UnsupportedError
from precedent.target import Slot, TargetModel
from precedent.target.prefix_pool import PrefixPool
from precedent.tree import EMPTY_TREE
from precedent_models.recurrent.states import MOST_SNAPSHOTS
from precedent_testing.sweep import IN_FLOAT32, compare, in_float64, tiny_model

EXACT = 1e-9
"""Ours against ours: all of our recurrences compute in the model's dtype, or more precisely."""

FLOAT32_INSIDE = frozenset(FAMILIES) - {"lfm2", "minimax"} | {"bloom"}
"""Their gates or norms are in float32 whatever the model's dtype is."""

ALL = (*FAMILIES, *ONE_PATH)
ALIKE = ("bamba", "zamba", "mamba2", "mamba", "trocr")
"""Models whose states, or positions, are of a kind that another one has too."""

SAMPLED = [pytest.param(name, marks=pytest.mark.exhaustive if name in ALIKE else ()) for name in ALL]


def close(found: torch.Tensor, expected: torch.Tensor, model_type: str) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4 if model_type in FLOAT32_INSIDE else EXACT)


def next_logits(slot: Slot, target: TargetModel) -> torch.Tensor:
    logits = target.plain_step(slot)
    target.discard(slot)
    return logits


def as_fresh(slot: Slot, target: TargetModel, model_type: str) -> None:
    """The next logits are those of a fresh prefill."""
    fresh = prefilled(target, [*slot.token_ids, slot.pending])
    close(next_logits(slot, target), next_logits(fresh, target), model_type)


@pytest.mark.parametrize("model_type", SAMPLED)
@pytest.mark.sampled(3)
def test_trees_are_plain_forwards_along_every_path(model_type: str) -> None:
    """Of transformers' own module, untouched and without a cache; again after an accepted path."""
    assert compare(hybrid(model_type), in_float64(tiny_model(model_type))) < IN_FLOAT32


@pytest.mark.parametrize("model_type", SAMPLED)
@pytest.mark.sampled(3)
def test_going_back_is_never_having_gone_there(model_type: str) -> None:
    """A prompt in pieces, random commits, rewinds and forks: the next logits are those of a fresh prefill."""
    target, choose = hybrid(model_type), random.Random(2)
    slot = prefilled(target, random_ids(2, 80), chunk=7)
    as_fresh(slot, target, model_type)
    for step in range(6):
        tree = random_tree(step, 8, one_path=target.one_path)
        target.score([(slot, tree)])
        target.commit(slot, tree, tree.path_to(choose.randrange(8)), choose.randrange(250))
        if step % 2:
            remain = target.rewind(slot, len(slot.token_ids) - choose.choice([0, 1, 2, 30]))
            assert remain == len(slot.token_ids) == slot.kv.length
            slot.pending = 5
        fork = target.fork(slot, len(slot.token_ids))
        fork.pending = slot.pending
        as_fresh(slot, target, model_type)
        as_fresh(fork, target, model_type)


@pytest.mark.parametrize("model_type", SAMPLED[: len(FAMILIES)])
def test_within_the_last_step_every_length_can_be_gone_back_to(model_type: str) -> None:
    """An answer that ends in the middle of an accepted path leaves the state at its end."""
    target, tree = hybrid(model_type), random_tree(1, 6, one_path=True)
    for lengths in ((34,), (31, 29)):
        slot = prefilled(target, random_ids(3, 30))
        target.score([(slot, tree)])
        target.commit(slot, tree, range(6), 3)
        for length in lengths:
            assert target.rewind(slot, length) == length
            slot.pending = 9
            as_fresh(slot, target, model_type)
            assert slot.kv.nearest(length - 1) == (29 if length > 29 else 0)  # the step is forgotten


@pytest.mark.parametrize("model_type", ["qwen3_next", "jamba", "zaya"])
def test_a_conversation_computes_what_is_new(model_type: str) -> None:
    """The next turn continues; one that was rendered anew goes back to the prompt's end; another shares the system."""
    target = hybrid(model_type)
    pool, system = PrefixPool(target), random_ids(5, 100)
    slot = pool.acquire("a", [*system, 1, 2])
    assert target.prefill(slot, [*system, 1, 2], chunk=50) == 0
    for token in (3, 4, 5):
        target.plain_step(slot)
        target.commit(slot, EMPTY_TREE, (), token)
    pool.release("a", slot)
    for prompt, reused in (
        ([*system, 1, 2, 3, 4, 5, 6], 104),
        ([*system, 1, 2, 3, 9, 9], 101),
        ([*system[:90], *range(40)], 50),
    ):
        slot = pool.acquire("a", prompt)
        assert target.prefill(slot, prompt) == reused
        as_fresh(slot, target, model_type)
        target.rewind(slot, len(prompt) - 1)
        pool.release("a", slot)


def test_snapshots_are_bounded_and_counted() -> None:
    """A long prompt leaves a few, far apart, the last at its end; the account of a request covers all of them.

    A prompt's last piece is long: it is kept whole, so that only snapshots remain.
    """
    target = hybrid("qwen3_next")
    slot = prefilled(target, random_ids(1, 331), chunk=66)
    kept = [length for length in range(1, 331) if slot.kv.nearest(length) == length]
    assert len(kept) == MOST_SNAPSHOTS
    assert kept[-1] == 330
    assert max(after - before for before, after in zip([0, *kept], kept, strict=False)) < 200
    rows = 9
    target.score([(slot, random_tree(1, rows - 1))])
    assert target.kv_shape.state.nbytes > 0
    assert slot.kv.state.kept_bytes <= rows * target.kv_shape.state.kept_bytes
    target.commit(slot, random_tree(1, rows - 1), (), 1)
    assert slot.kv.nbytes <= target.kv_bytes(331 + rows, rows)


@pytest.mark.parametrize(("model_type", "layers"), [("qwen3_next", "recurrent layers"), ("deepseek_v32", "indexers")])
def test_what_does_not_hold_is_refused_by_name(model_type: str, layers: str) -> None:
    """Bit-identical mode and CUDA graphs, before anything else happens."""
    model = tiny_model(model_type)
    with pytest.raises(UnsupportedError, match=f"bitwise=True is not available for this {model_type}.*{layers}"):
        TargetModel(model, bitwise=True)
    with pytest.raises(UnsupportedError, match=f"{model_type} cannot run as CUDA graphs.*{layers}"):
        TargetModel(model, cuda_graphs=graph_settings(arena_tokens=256, capture=False))
