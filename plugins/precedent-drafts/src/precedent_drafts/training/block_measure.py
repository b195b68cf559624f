"""Measures a block draft with a target: how much of a block is accepted, what a forward costs, and what both give.

The positions are those of the target's own answers to held-out prompts. Acceptance is `sum(min(target_probs,
draft_probs))`, as for chains (`training.measure`), here for each position of a block given the true tokens before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from precedent.config import SamplingParams
from precedent.drafters.base import Candidates
from precedent.drafters.request import Request
from precedent.sampling.probabilities import probs_of
from precedent.target import Slot, TargetModel
from precedent.tree import EMPTY_TREE, ROOT
from precedent_drafts.block_draft import BlockDraft
from precedent_drafts.block_drafter import BlockDrafter, BlockSession
from precedent_drafts.block_model import BlockModel, Filled
from precedent_drafts.training.measure import TIMED_PREFIX, TIMED_ROUNDS
from precedent_drafts.training.texts import Text

NODES = 16
"""Nodes of the trees that are compared with the target's text."""


@dataclass(frozen=True, slots=True)
class BlockReport:
    """How well a block draft serves a target.

    `acceptance` `[block_size]` is the mean of one minus total variation at `temperature`, by position. A forward takes
    `forward_milliseconds`, candidates included, a step of the target `target_milliseconds`; `cost` is their quotient.
    With a tree of `nodes` in every step, `tokens_per_step` are expected, and decoding is `speed` times as fast as plain
    decoding, assuming that a wider step costs no more than a step of one token.
    """

    draft: str
    positions: int
    prompts: int
    temperature: float
    acceptance: list[float]
    forward_milliseconds: float
    target_milliseconds: float
    cost: float
    nodes: int
    tokens_per_step: float
    speed: float

    def as_dict(self) -> dict[str, Any]:
        """For the JSON results."""
        return asdict(self)


class BlockMeasurement:
    """Measures a block draft on texts of its target."""

    def __init__(
        self, target: PreTrainedModel, draft: BlockDraft, texts: Sequence[Text], temperature: float = 1.0
    ) -> None:
        self._target, self._texts, self._sampling = TargetModel(target), texts, SamplingParams(temperature)
        self._model = BlockModel(draft, self._target)
        self._matched = 0

    def report(self, name: str, progress: Callable[[int, int], None] = lambda *_: None) -> BlockReport:
        """Walk along every text, and time a forward and a step."""
        sums, counts = torch.zeros(2, self._model.settings.block_size, dtype=torch.float64)
        self._matched = 0
        for done, text in enumerate(self._texts):
            progress(done, len(self._texts))
            self._walk(text, sums, counts)
        forward, step = self._timed()
        tokens = 1.0 + self._matched / int(counts[0])
        return BlockReport(
            draft=name,
            positions=int(counts[0]),
            prompts=len(self._texts),
            temperature=self._sampling.temperature,
            acceptance=(sums / counts.clamp(min=1.0)).tolist(),
            forward_milliseconds=forward,
            target_milliseconds=step,
            cost=forward / step,
            nodes=NODES,
            tokens_per_step=tokens,
            speed=tokens / (1.0 + forward / step),
        )

    def _begun(self, prompt: Sequence[int]) -> tuple[Slot, BlockSession]:
        slot = self._target.new_slot()
        self._target.prefill(slot, prompt)
        request = Request("measured", tuple(prompt), self._sampling, mode="traversal", target_slot=lambda: slot)
        return slot, BlockSession(
            BlockDrafter(self._model), request, self._model.place_beside(lambda: slot, len(prompt))
        )

    @torch.inference_mode()
    def _walk(self, text: Text, sums: Tensor, counts: Tensor) -> None:
        """Fill a block before every token of an answer; adds acceptances `[block_size]` to `sums`."""
        prompt, answer = text.token_ids[: text.num_context_tokens], text.token_ids[text.num_context_tokens :]
        (slot, session), rows, blocks = self._begun(prompt), list[Tensor](), list[Filled]()
        for place, token in enumerate(answer):
            block, candidates = session.filled(NODES)
            blocks.append(block)
            self._matched += matched_tokens(candidates, answer[place:])
            rows.append(probs_of(self._target.plain_step(slot)[0], self._sampling)[self._model.token_ids])
            self._target.commit(slot, EMPTY_TREE, (), token)
            session.committed([token])
        for place, block in enumerate(blocks):
            for depth in range(min(len(block.confidence), len(rows) - place)):
                before = text.token_ids[text.num_context_tokens + place + depth - 1]
                logits = block.logits[depth] + self._model.links(before)
                sums[depth] += torch.minimum(probs_of(logits, self._sampling), rows[place + depth]).sum()
                counts[depth] += 1

    def _timed(self) -> tuple[float, float]:
        """Time a block with its candidates and a plain step, in milliseconds; medians of alternating runs."""
        prompt = [*self._texts[0].token_ids, *([self._texts[0].token_ids[-1]] * TIMED_PREFIX)][:TIMED_PREFIX]
        slot, session = self._begun(prompt)
        session.match(NODES)  # reads the prompt
        forwards, steps = [], []
        for _ in range(TIMED_ROUNDS):
            started = perf_counter()
            session.match(NODES)
            between = perf_counter()
            probs_of(self._target.plain_step(slot)[0], self._sampling)
            self._target.discard(slot)
            forwards.append(between - started)
            steps.append(perf_counter() - between)
        return median(forwards) * 1e3, median(steps) * 1e3


def matched_tokens(candidates: Candidates, answer: Sequence[int]) -> int:
    """How many tokens of the answer the candidates hold as a path from the root."""
    below = {pair: node for node, pair in enumerate(zip(candidates.parents, candidates.token_ids, strict=True))}
    node, count = ROOT, 0
    for token in answer:
        if (node, token) not in below:
            break
        node, count = below[node, token], count + 1
    return count
