"""Seeded random problems, small enough to enumerate: a toy target, draft models, fixed and sampled candidates."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from helpers.enumeration import DraftProcess, ToyModel
from precedent.sampling.rng import Rng
from precedent.tree import NULL, ROOT, CandidateTree, Sampled, TreeBuilder

TARGET_V4 = torch.tensor([0.10, 0.20, 0.30, 0.40], dtype=torch.float64)
DRAFT_V4 = torch.tensor([0.45, 0.30, 0.15, 0.10], dtype=torch.float64)

SHAPES = (
    (1,),
    (2,),
    (3,),
    (1, 1),
    (2, 1),
    (1, 2),
    (3, 1),
    (2, 2),
    (1, 1, 1),
    (1, 2, 1),
    (1, 1, 2),
    (1, 1, 1, 1),
    (2, 1, 1),
)
"""Samples per node, level by level below an anchor; at most six in all."""


def random_distribution(source: random.Random, vocab_size: int, *, plain: bool = False) -> Tensor:
    """A random row `[vocab_size]` in float64: diffuse, peaked, with zeros, or (unless `plain`) deterministic."""
    weights = [source.gammavariate(source.choice([0.3, 1.0, 5.0]), 1.0) + 1e-3 for _ in range(vocab_size)]
    if not plain and source.random() < 0.25:
        weights[source.randrange(vocab_size)] = 0.0
    if not plain and source.random() < 0.1:
        weights = [0.0] * vocab_size
        weights[source.randrange(vocab_size)] = 1.0
    row = torch.tensor(weights, dtype=torch.float64)
    return row / row.sum()


def toy_model(seed: object, vocab_size: int, *, plain: bool = False) -> ToyModel:
    """A model whose every row is random and depends on the whole path; the same seed gives the same model."""
    rows: dict[tuple[int, ...], Tensor] = {}

    def distribution(path: tuple[int, ...]) -> Tensor:
        if path not in rows:
            rows[path] = random_distribution(random.Random(f"{seed} {path}"), vocab_size, plain=plain)
        return rows[path]

    return distribution


def near(target: ToyModel, other: ToyModel, share: float) -> ToyModel:
    """A draft model between two models: `share` of the target, the rest of the other; one row object for each path."""
    rows: dict[tuple[int, ...], Tensor] = {}

    def distribution(path: tuple[int, ...]) -> Tensor:
        if path not in rows:
            rows[path] = share * target(path) + (1.0 - share) * other(path)
        return rows[path]

    return distribution


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """How tokens are sampled below an anchor; it depends on the path alone, so it stands before anything is sampled.

    `without_replacement` excludes earlier samples at the node, `exclude_fixed` its fixed children, `threshold` drops
    samples of tokens with a smaller draft probability (a keep_mask).
    """

    shape: tuple[int, ...]
    without_replacement: bool
    exclude_fixed: bool
    threshold: float | None


@dataclass(frozen=True)
class Problem:
    """A speculation problem: `draft(rng)` gives a tree; `target` is the model whose distribution must come out."""

    seed: int
    vocab_size: int
    target: ToyModel
    draft_models: tuple[ToyModel, ...]
    fixed: tuple[tuple[int, ...], ...]
    anchors: tuple[tuple[int, ...], ...]
    plan: SamplingPlan

    def draft(self, rng: Rng) -> CandidateTree:
        """Fixed candidates first, then the planned samples below every anchor, breadth first."""
        return _Growing(self, rng).tree()


class _Growing:
    """One tree in the making: `node_of` maps paths of fixed candidates to nodes, `sampled` a node to its samples."""

    def __init__(self, problem: Problem, rng: Rng) -> None:
        self.problem, self.rng, self.builder = problem, rng, TreeBuilder()
        self.node_of: dict[tuple[int, ...], int] = {(): ROOT}
        self.cached: dict[int, tuple[int, ...]] = {}
        self.sampled: dict[int, list[int]] = {}

    def tree(self) -> CandidateTree:
        for path in self.problem.fixed:
            for depth in range(1, len(path) + 1):
                above = self.node_of[path[: depth - 1]]
                self.node_of[path[:depth]] = self.builder.add_fixed(above, path[depth - 1], "fixed")
        self.cached = {node: self.builder.children(node) for node in self.node_of.values()}
        level = [(path, self.node_of[path]) for path in self.problem.anchors]
        for width in self.problem.plan.shape:
            level = [below for path, node in level for below in self.samples_below(path, node, width)]
        return self.builder.build()

    def samples_below(self, path: tuple[int, ...], node: int, width: int) -> list[tuple[tuple[int, ...], int]]:
        """Sample up to `width` times below `node`; returns the distinct children with their paths."""
        below: dict[int, tuple[int, ...]] = {}
        sampled = self.sampled.setdefault(node, [])
        for _ in range(width):
            distribution = self.distribution(path, node, sampled)
            if distribution is None:
                break  # all that this model could sample is excluded; known before it samples
            ordinal = len(sampled)
            unmasked = Sampled(distribution.row, distribution.excluded).probs()
            token = self.rng.categorical(unmasked, node, f"sample {ordinal}")
            sampled.append(token)
            child = self.builder.add_sampled(node, token, distribution, f"model-{ordinal}")
            if child != NULL:
                below[child] = (*path, token)
        return [(tokens, child) for child, tokens in below.items()]

    def distribution(self, path: tuple[int, ...], node: int, sampled: list[int]) -> Sampled | None:
        """The distribution of the next sample below `node`, None where it would have no mass."""
        problem, plan = self.problem, self.problem.plan
        excluded = {*(self.cached.get(node, ()) if plan.exclude_fixed else ())}
        excluded |= {*(sampled if plan.without_replacement else ())}
        row = problem.draft_models[len(sampled) % len(problem.draft_models)](path)
        if not any(float(row[token]) > 0.0 for token in range(problem.vocab_size) if token not in excluded):
            return None
        return Sampled(row, tuple(sorted(excluded)), None if plan.threshold is None else row >= plan.threshold)


def random_problem(seed: int, *, max_trees: int = 100) -> Problem:
    """A random problem with a vocabulary of 2 to 5, depth up to 4, at most six samples and about `max_trees` trees."""
    source = random.Random(seed)
    vocab_size = source.randint(2, 5)
    shapes = [shape for shape in SHAPES if vocab_size ** num_samples(shape) <= max_trees]
    shape = source.choice([*shapes, ()])
    target = toy_model((seed, "target"), vocab_size)
    share = source.choice([0.0, 0.5, 0.9, 1.0])
    drafts = tuple(near(target, toy_model((seed, i), vocab_size), share) for i in range(source.randint(1, 3)))
    fixed = _random_fixed(source, vocab_size)
    anchors: tuple[tuple[int, ...], ...] = ((),)
    if fixed and source.random() < 0.4:
        path = source.choice(fixed)
        anchors = (path[: source.randint(1, max(1, min(len(path), 4 - len(shape))))],)
        if vocab_size ** (2 * num_samples(shape)) <= max_trees and source.random() < 0.7:
            anchors = ((), *anchors)
    threshold = source.choice([None, None, 0.1, 0.3])
    plan = SamplingPlan(shape, source.random() < 0.5, source.random() < 0.5, threshold)
    return Problem(seed, vocab_size, target, drafts, fixed, anchors, plan)


def _random_fixed(source: random.Random, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    number, length = source.choice([0, 1, 2, 4]), source.randint(1, 4)
    return tuple(tuple(source.randrange(vocab_size) for _ in range(source.randint(1, length))) for _ in range(number))


def num_samples(shape: tuple[int, ...]) -> int:
    """The most samples that a shape takes below one anchor."""
    return sum(math.prod(shape[: level + 1]) for level in range(len(shape)))


def independent_paths(draft: ToyModel, num_paths: int, length: int) -> DraftProcess:
    """Several whole sequences sampled independently and merged into one tree (SpecInfer's merged speculation)."""

    def process(rng: Rng) -> CandidateTree:
        builder = TreeBuilder()
        for number in range(num_paths):
            node: int = ROOT
            path: tuple[int, ...] = ()
            for _ in range(length):
                token = rng.categorical(draft(path), node, f"path {number}")
                node, path = builder.add_sampled(node, token, Sampled(draft(path)), "paths"), (*path, token)
        return builder.build()

    return process


def sibling_samples(
    rows: Sequence[Tensor], *, fixed: tuple[int, ...] = (), replacement: bool, exclude_fixed: bool = False
) -> DraftProcess:
    """One sample below the root for each row, in that order, beside fixed children."""

    def process(rng: Rng) -> CandidateTree:
        builder = TreeBuilder()
        for token in fixed:
            builder.add_fixed(ROOT, token, "fixed")
        excluded = set(fixed) if exclude_fixed else set()
        for ordinal, row in enumerate(rows):
            distribution = Sampled(row, tuple(sorted(excluded)))
            token = rng.categorical(distribution.probs(), ROOT, f"sample {ordinal}")
            builder.add_sampled(ROOT, token, distribution, "samples")
            if not replacement:
                excluded.add(token)
        return builder.build()

    return process


def always(row: Tensor) -> ToyModel:
    """A model that answers every path with the same row."""
    return lambda path: row
