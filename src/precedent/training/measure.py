"""Measures a draft model with a target: how much is accepted, what a sample costs, and the resulting speed.

Acceptance at a position is `sum(min(target_probs, draft_probs))`, one minus the total variation between the two
distributions: the probability that a sample there is accepted. The positions are those of the target's own answers to
held-out prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from precedent.config import SamplingParams, SpeculationConfig
from precedent.drafters.model.drafter import DraftModelDrafter
from precedent.drafters.request import Request
from precedent.sampling.probabilities import probs_of
from precedent.sampling.rng import CounterRng
from precedent.target import Slot, TargetModel
from precedent.target.load.first_layers import exits_early
from precedent.training.texts import Text
from precedent.tree import EMPTY_TREE, TreeBuilder, chain

ROWS_AT_ONCE = 128
"""Number of full-vocabulary rows compared at a time."""

MOST_DRAWS = SpeculationConfig().max_draws
"""Largest number of samples per step considered in the search for the best one."""

TIMED_PREFIX, TIMED_ROUNDS = 256, 12
"""Length of the prefix for timed steps, in tokens, and number of alternating timings."""


@dataclass(frozen=True, slots=True)
class DraftReport:
    """How well a draft model serves a target.

    `acceptance` is the mean of one minus total variation at `temperature`, `agreement` the share of positions where
    both models have the same likeliest token. A sample takes `draw_milliseconds` (forward pass, distribution and
    choice), a step of the target `target_milliseconds`; `cost` is their quotient. With `best_draws` samples per step,
    `tokens_per_step` are expected, and decoding is `speed` times as fast as plain decoding, assuming that a wider step
    costs no more than a step of one token.
    """

    draft: str
    positions: int
    prompts: int
    temperature: float
    acceptance: float
    agreement: float
    draw_milliseconds: float
    target_milliseconds: float
    cost: float
    best_draws: int
    tokens_per_step: float
    speed: float

    def as_dict(self) -> dict[str, Any]:
        """For the JSON results."""
        return asdict(self)


class Measurement:
    """Measures drafts, one after the other, on the same texts of a target."""

    def __init__(self, target: PreTrainedModel, texts: Sequence[Text], temperature: float = 1.0) -> None:
        self._target, self._texts, self._sampling = TargetModel(target), texts, SamplingParams(temperature)

    def report(
        self, name: str, draft: PreTrainedModel, progress: Callable[[int, int], None] = lambda *_: None
    ) -> DraftReport:
        """Compare a draft with the target on every text, and time both."""
        model = TargetModel(draft)
        acceptances, agreements = [], []
        for done, text in enumerate(self._texts):
            progress(done, len(self._texts))
            accepted, agreed = self._compared(model, text)
            acceptances.append(accepted)
            agreements.append(agreed)
        draw, step = self._timed(model)
        expected = expected_tokens(acceptances, MOST_DRAWS)
        speeds = [tokens / (1 + number * draw / step) for number, tokens in enumerate(expected)]
        best = int(np.argmax(speeds))
        return DraftReport(
            draft=name,
            positions=sum(map(len, acceptances)),
            prompts=len(self._texts),
            temperature=self._sampling.temperature,
            acceptance=float(np.concatenate(acceptances).mean()),
            agreement=float(np.concatenate(agreements).mean()),
            draw_milliseconds=draw,
            target_milliseconds=step,
            cost=draw / step,
            best_draws=best,
            tokens_per_step=expected[best],
            speed=speeds[best],
        )

    @torch.inference_mode()
    def _compared(self, draft: TargetModel, text: Text) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """Compute acceptance and agreement at every position of an answer, `[num_answer_tokens]` each."""
        rows = zip(_answer_logits(self._target, text), _answer_logits(draft, text), strict=True)
        accepted, agreed = [], []
        for target_logits, draft_logits in rows:
            distributions = probs_of(target_logits, self._sampling), probs_of(draft_logits, self._sampling)
            accepted.append(torch.minimum(*distributions).sum(-1).double().cpu())
            agreed.append((target_logits.argmax(-1) == draft_logits.argmax(-1)).cpu())
        return torch.cat(accepted).numpy(), torch.cat(agreed).numpy()

    def _timed(self, draft: TargetModel) -> tuple[float, float]:
        """Time a sample and a plain step of the target, in milliseconds; medians of alternating runs."""
        prompt = [*self._texts[0].token_ids, *([self._texts[0].token_ids[-1]] * TIMED_PREFIX)][:TIMED_PREFIX]
        slot = self._target.new_slot()
        self._target.prefill(slot, prompt)
        request = Request("timing", tuple(prompt), self._sampling, mode="traversal", target_slot=lambda: slot)
        session = DraftModelDrafter(draft, early_exit=exits_early(draft, self._target)).begin(request)
        session.draw(TreeBuilder(), 1, CounterRng(0, 0))  # prefills the prompt
        draws, steps = [], []
        for number in range(TIMED_ROUNDS):
            started = perf_counter()
            session.draw(TreeBuilder(), MOST_DRAWS, CounterRng(0, number))
            between = perf_counter()
            self._plain_step(slot)
            draws.append((between - started) / MOST_DRAWS)
            steps.append(perf_counter() - between)
        return median(draws) * 1e3, median(steps) * 1e3

    def _plain_step(self, slot: Slot) -> None:
        logits = self._target.score([(slot, EMPTY_TREE)])[0]
        probs_of(logits[0], self._sampling)
        self._target.discard(slot)


def expected_tokens(acceptances: Sequence[NDArray[np.float64]], most_draws: int) -> list[float]:
    """Expected tokens of a step with 0, 1, … samples: the target's own token and the accepted prefix of the samples.

    `acceptances` holds the acceptance at successive positions of each text. The mean is over all positions at which a
    chain of `most_draws` samples could begin (only the first one in shorter texts).
    """
    expected = [1.0]
    for number in range(1, most_draws + 1):
        chains = [_windows(each, number, most_draws).prod(-1) for each in acceptances if each.size >= number]
        expected.append(expected[-1] + float(np.concatenate(chains).mean() if chains else 0.0))
    return expected


def _windows(values: NDArray[np.float64], length: int, longest: int) -> NDArray[np.float64]:
    starts = max(1, values.size - longest + 1)
    return np.lib.stride_tricks.sliding_window_view(values, length)[:starts]


def _answer_logits(model: TargetModel, text: Text) -> Iterator[Tensor]:
    """Logits before each token of an answer, `[rows, vocab_size]`, some rows at a time."""
    slot, rest = model.new_slot(), text.token_ids[text.num_context_tokens :]
    model.prefill(slot, text.token_ids[: text.num_context_tokens])
    while rest:
        piece, rest = rest[:ROWS_AT_ONCE], rest[ROWS_AT_ONCE:]
        tree = chain(piece[:-1])
        yield model.score([(slot, tree)])[0]
        model.commit(slot, tree, range(len(tree)), piece[-1])
