"""Computes every w, a and B of several trees in few operations, on any device: each operation costs a GPU a launch.

Tests are scheduled by their dependencies. Until one of a node's tests rejects, its residual B is the target's own
distribution, whatever happened above it. So a chain of samples, lazy or not, is one *stage*: its w and a are scalars,
computed level by level, and the residuals of all its rows are computed in one batch. Each further test of a node adds a
stage. All trees share the stages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter

import numpy as np
import torch
from torch import Tensor

from precedent.runtime.placing import placed
from precedent.tree import NULL, SMALLEST_MASS, Sampled
from precedent.verify.walk import Weights


@dataclass(frozen=True, slots=True)
class Scheduled:
    """Test number `ordinal` below `node`, in the first stage and level at which all its inputs are known.

    `row` and `slot` index the node among all rows and among all acceptance weights; `child_slot` is the slot of a child
    tested lazily, else None; `distribution` is None for a fixed candidate. A candidate that is not `is_live` was
    dropped, or had been sampled before.
    """

    stage: int
    level: int
    node: int
    ordinal: int
    row: int
    slot: int
    token: int
    is_live: bool
    child_slot: int | None
    distribution: Sampled | None


def schedule(weights: Weights, first_row: int, first_slot: int) -> Iterator[Scheduled]:
    """The tests of a tree whose root has its row at `first_row` and its acceptance weight at `first_slot`."""
    known: dict[int, tuple[int, int]] = {}
    for node, candidates in sorted(weights.all_tests.items()):
        stage, level = known.get(node, (0, 0))  # an eager node depends on no node above it
        for ordinal, candidate in enumerate(candidates):
            when = (stage + ordinal, 0 if ordinal else level)
            is_live = candidate.child != NULL and weights.first_test(candidate.child) == ordinal
            is_deferred = is_live and weights.lazy
            if is_deferred:
                known[candidate.child] = (when[0], when[1] + 1)
            token = weights.tree.token_ids[candidate.child] if candidate.child != NULL else 0
            child_slot = first_slot + candidate.child + 1 if is_deferred else None
            sampled = candidate.distribution if isinstance(candidate.distribution, Sampled) else None
            places = first_row + node + 1, first_slot + node + 1
            yield Scheduled(*when, node, ordinal, *places, token, is_live, child_slot, sampled)


def weigh(tests: Sequence[Scheduled], left: Tensor, num_slots: int) -> tuple[Tensor, Tensor]:
    """The w of each test, `[num_tests]`, and the a of each slot after all its node's tests reject, `[num_slots]`.

    `tests` are in the order of `in_stages`. `left` `[rows, vocab_size]` holds the target's probabilities and is
    overwritten with the residuals. Nothing is read back from the device.
    """
    acceptance, weights = left.new_zeros(len(tests)), left.new_ones(num_slots + 1)  # and a slot for no node
    if not tests:
        return acceptance, weights[:-1]
    sampled = list({id(each.distribution): each.distribution for each in tests if each.distribution}.values())
    probs = _probs(sampled, left, with_fixed=any(each.distribution is None for each in tests))
    prob_row = {id(distribution): row for row, distribution in enumerate([*sampled, None])}
    by_kind = sorted(tests, key=lambda test: (test.stage, test.distribution is None))
    numbers = [[_numbers(test, prob_row, no_slot=num_slots) for test in order] for order in (tests, by_kind)]
    table, kinds = _placed(numbers, left).transpose(1, 2)
    start = 0
    for _, group in groupby(tests, attrgetter("stage")):
        stage = list(group)
        at = slice(start, start + len(stage))
        _test(stage, table[:, at], probs, left, weights, acceptance[at])
        _reject(sum(test.distribution is not None for test in stage), kinds[:, at], probs, left, weights)
        start = at.stop
    return acceptance, weights[:-1]


def in_stages(tests: Sequence[Scheduled]) -> list[Scheduled]:
    """Sort the tests into an order in which they can be computed."""
    return sorted(tests, key=attrgetter("stage", "level"))


def _numbers(test: Scheduled, prob_row: dict[int, int], *, no_slot: int) -> tuple[int, ...]:
    child_slot = no_slot if test.child_slot is None else test.child_slot
    return test.row, test.slot, test.token, prob_row[id(test.distribution)], test.is_live, child_slot


def _test(
    stage: Sequence[Scheduled], table: Tensor, probs: Tensor, left: Tensor, weights: Tensor, acceptance: Tensor
) -> None:
    """Compute the w of all tests of a stage and the weights that their children start with, level by level."""
    rows, slots, tokens, prob_rows, live, child_slots = table
    draft_prob = probs[prob_rows, tokens]
    ratio = torch.where(draft_prob > 0.0, left[rows, tokens] / draft_prob, 0.0)
    ratio = ratio.clamp_(max=torch.finfo(ratio.dtype).max) * live
    start = 0
    for _, group in groupby(stage, attrgetter("level")):
        level = list(group)
        at = slice(start, start + len(level))
        torch.clamp(weights[slots[at]] * ratio[at], max=1.0, out=acceptance[at])
        if any(test.child_slot is not None for test in level):
            weights[child_slots[at]] = acceptance[at]
        start = at.stop


def _reject(num_sampled: int, kinds: Tensor, probs: Tensor, left: Tensor, weights: Tensor) -> None:
    """Update a and B of a stage's nodes as if its tests had rejected; tests of sampled candidates come first."""
    rows, slots, tokens, prob_rows, _, _ = kinds
    weight, before = weights[slots, None], left[rows]
    rest = weight * before
    if num_sampled:
        rest[:num_sampled].sub_(probs[prob_rows[:num_sampled]]).clamp_(min=0.0)
    if num_sampled < len(rows):
        rest[num_sampled:].scatter_(1, tokens[num_sampled:, None], 0.0)
    mass = rest.sum(1, keepdim=True)
    # At a = 1 only rounding can leave no mass: such a sample is never rejected, so B stays unchanged.
    weights[slots] = (mass / (mass + (1.0 - weight))).nan_to_num_(nan=1.0)[:, 0]
    is_some = mass > torch.finfo(mass.dtype).tiny
    left[rows] = torch.where(is_some, rest.div_(mass), before, out=rest)


def _probs(distributions: Sequence[Sampled], like: Tensor, *, with_fixed: bool) -> Tensor:
    """`Sampled.probs` of each, `[num_distributions, vocab_size]`; with fixed candidates a last row of ones."""
    rows = [*(each.row.to(like) for each in distributions), *([torch.ones_like(like[0])] if with_fixed else [])]
    probs, size = torch.stack(rows), like.shape[1]
    if any(not 0 <= token < size for each in distributions for token in each.excluded):
        raise IndexError(f"a sample's distribution excludes a token that is not among the {size} there are")
    places = [row * size + token for row, each in enumerate(distributions) for token in each.excluded]
    if places:
        probs.view(-1).index_fill_(0, _placed(places, like), 0.0)
        shortened = _placed([row for row, each in enumerate(distributions) if each.excluded], like)
        probs[shortened] /= probs[shortened].sum(1, keepdim=True).clamp_(min=SMALLEST_MASS)
    for row, each in enumerate(distributions):
        if each.keep_mask is not None:
            probs[row].mul_(each.keep_mask.to(like.device))
    return probs


def _placed(numbers: Sequence[object], beside: Tensor) -> Tensor:
    return placed(np.array(numbers, dtype=np.int64), beside.device)
