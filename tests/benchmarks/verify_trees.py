"""Candidate trees on real logits for bench_verify.py: the texts, the draft models, and how candidates come about."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor

from precedent.config import SamplingParams
from precedent.sampling.coupling import coupled_noise
from precedent.sampling.probabilities import probs_of
from precedent.sampling.rng import CounterRng
from precedent.target import Slot, TargetModel
from precedent.tree import EMPTY_TREE, ROOT, CandidateTree, Sampled, TreeBuilder

TEXTS = (
    "The river rose in the night, and by morning the bridge to the village was gone. People stood on the bank and",
    "To reset the thermostat, hold the left button for five seconds. When the display blinks,",
    "Dear customer, thank you for your message about order 48213. We are sorry to hear that",
    "def mean(values):\n    total = 0.0\n    for value in values:\n        total += value\n    return",
    "The three most common causes of a slow database query are a missing index,",
    "In 1905 Albert Einstein published four papers. The first of them explained",
    "Flight 312 to Lisbon is delayed by two hours. Passengers who miss their connection",
    "Water boils at a lower temperature on a mountain, because",
    'The tool returned {"status": "ok", "seats": [{"row": 12, "price": 89.5}]}. That means',
    "Once upon a time there was a clockmaker who",
    "Our refund policy has three parts. First,",
    "SELECT name, total FROM orders WHERE",
)
SPACING = 4
"""Tokens between two places in a text."""

COPIES = 6
"""Independent trees of each kind at each place, scored together."""

Made = list[tuple[SamplingParams, CandidateTree, Tensor]]
"""Parameters, tree and the target's logits `[num_nodes + 1, vocab_size]` of every copy."""


class DraftModel(Protocol):
    """Whatever has logits for a tree behind a text."""

    def read(self, context: list[int], slot: Slot) -> None:
        """Take in the text up to a place, whose target slot is `slot`."""

    def logits(self, tree: CandidateTree) -> Tensor:
        """Logits `[num_nodes + 1, vocab_size]`, row 0 behind the text."""


class SmallModel:
    """A causal LM of its own."""

    def __init__(self, model: TargetModel) -> None:
        self._model, self._slot = model, model.new_slot()

    def read(self, context: list[int], slot: Slot) -> None:
        """Start anew with this text."""
        self._slot = self._model.new_slot()
        self._model.prefill(self._slot, context)

    def logits(self, tree: CandidateTree) -> Tensor:
        """What the model says."""
        logits = self._model.score([(self._slot, tree)])[0]
        self._model.discard(self._slot)
        return logits


class NoisyTarget:
    """The target's own logits with Gaussian noise of a given standard deviation: no real draft model, a known one."""

    def __init__(self, target: TargetModel, deviation: float) -> None:
        self._target, self._deviation = target, deviation
        self._slot, self._context = target.new_slot(), list[int]()

    def read(self, context: list[int], slot: Slot) -> None:
        """The target has read the text already."""
        self._slot, self._context = slot, context

    def logits(self, tree: CandidateTree) -> Tensor:
        """A fixed function of the text and the path, as a model's logits are."""
        logits = self._target.score([(self._slot, tree)])[0].float()
        self._target.discard(self._slot)
        return torch.stack([row + self._noise(tree.tokens_to(node - 1), row) for node, row in enumerate(logits)])

    def _noise(self, path: tuple[int, ...], row: Tensor) -> Tensor:
        key = hashlib.blake2b(repr((self._context, path)).encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(key, "little") >> 1)
        return torch.randn(row.shape, generator=generator) * self._deviation


class Draft:
    """One tree in the making; `shared` maps its nodes to those of the tree in which all copies are scored together."""

    def __init__(self, params: SamplingParams, seed: int) -> None:
        self.params, self.seed, self.rng = params, seed, CounterRng(seed, 1)
        self.builder, self.level, self.shared = TreeBuilder(), [ROOT], {ROOT: ROOT}

    def grow(self, kind: str, width: int, logits: Tensor, scoring: TreeBuilder) -> None:
        """Candidates below every node of the last level; `logits` are those of the scoring tree."""
        below: Callable[[int, Tensor, int], list[int]] = getattr(self, f"_{kind}")
        parents, self.level = self.level, []
        for node in parents:
            self.level += below(node, logits[self.shared[node] + 1], width)
        for node in range(len(self.shared) - 1, len(self.builder)):
            parent, token = self.builder.parents[node], self.builder.token_ids[node]
            self.shared[node] = scoring.add_fixed(self.shared[parent], token, "scoring")

    def scored(self, logits: Tensor) -> tuple[SamplingParams, CandidateTree, Tensor]:
        """The finished tree and its own rows of the scoring tree's logits."""
        tree = self.builder.build()
        return self.params, tree, logits[[self.shared[node] + 1 for node in range(ROOT, len(tree))]]

    def _samples(self, node: int, logits: Tensor, width: int, first: int = 0) -> list[int]:
        row, excluded, children = probs_of(logits, self.params), list(self.builder.children(node)), list[int]()
        for ordinal in range(first, width):
            distribution = Sampled(row, tuple(excluded))
            probs = distribution.probs()
            if not float(probs.sum()) > 0.5:
                break  # everything that could be sampled is there already
            token = self.rng.categorical(probs, node, f"sample {ordinal}")
            children.append(self.builder.add_sampled(node, token, distribution, "draft"))
            excluded.append(token)
        return children

    def _replaced(self, node: int, logits: Tensor, width: int) -> list[int]:
        distribution = Sampled(probs_of(logits, self.params))
        tokens = [self.rng.categorical(distribution.row, node, f"sample {ordinal}") for ordinal in range(width)]
        nodes = (self.builder.add_sampled(node, token, distribution, "draft") for token in tokens)
        return list(dict.fromkeys(nodes))

    def _fixed(self, node: int, logits: Tensor, width: int) -> list[int]:
        return [self.builder.add_fixed(node, token, "draft") for token in logits.topk(width).indices.tolist()]

    def _greedy(self, node: int, logits: Tensor, width: int) -> list[int]:
        fixed = self._fixed(node, logits, width - 1) if width > 1 else []
        return fixed + self._samples(node, logits, width, width - 1)

    def _coupled(self, node: int, logits: Tensor, width: int) -> list[int]:
        position = len(self.builder.build().path_to(node))
        scores = probs_of(logits, self.params).double() / coupled_noise(self.seed, position, logits.numel())
        return [self.builder.add_fixed(node, token, "draft") for token in scores.topk(width).indices.tolist()]


class Place:
    """One place in a text, before which both models have read everything."""

    def __init__(self, target: TargetModel, slot: Slot, draft: DraftModel, context: list[int], number: int) -> None:
        self._target, self._slot, self._draft, self._number = target, slot, draft, number
        draft.read(context, slot)

    def trees(self, shape: tuple[int, ...], kind: str, temperature: float) -> Made:
        """`COPIES` independent trees with the target's logits; level by level, one draft forward for all of them."""
        copies = 1 if kind == "fixed" else COPIES  # the top tokens are the same in every copy
        seeds = range(self._number * COPIES, self._number * COPIES + copies)
        drafts = [Draft(SamplingParams(temperature=temperature, seed=seed), seed) for seed in seeds]
        scoring = TreeBuilder()
        for width in shape:
            logits = self._draft.logits(scoring.build())
            for draft in drafts:
                draft.grow(kind, width, logits, scoring)
        logits = self.score(scoring.build())
        return [draft.scored(logits) for draft in drafts]

    def score(self, tree: CandidateTree) -> Tensor:
        """The target's logits for a tree, `[num_nodes + 1, vocab_size]`."""
        logits = self._target.score([(self._slot, tree)])[0]
        self._target.discard(self._slot)
        return logits

    def agreement(self, temperature: float) -> float:
        """The chance that a single sample is accepted here: 1 - total variation between the two distributions."""
        params = SamplingParams(temperature=temperature)
        both = (probs_of(model(EMPTY_TREE)[0], params) for model in (self.score, self._draft.logits))
        return float(torch.minimum(*both).sum())


def places(
    target: TargetModel, encode: Callable[[str], list[int]], num_texts: int, per_text: int
) -> Iterator[tuple[int, Slot, list[int]]]:
    """Places in sampled texts: the text's number, the target's slot, prefilled, and the token ids up to there."""
    params = SamplingParams(temperature=0.7)
    for number, text in enumerate(TEXTS[:num_texts]):
        slot, context = target.new_slot(), encode(text)
        target.prefill(slot, context)
        for step in range((per_text - 1) * SPACING + 1):
            if step % SPACING == 0:
                yield number, slot, list(context)
            row = probs_of(target.plain_step(slot)[0], params)
            context.append(CounterRng(number, step).categorical(row, ROOT, "text"))
            target.commit(slot, EMPTY_TREE, (), context[-1])
