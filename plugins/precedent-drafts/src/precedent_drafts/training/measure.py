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
from precedent.tree import TreeBuilder, chain
from precedent_drafts.conditioned import reads_hidden_states
from precedent_drafts.head import HeadDrafter, HeadModel, reading_hidden_states
from precedent_drafts.training.measure_by_draw import compared_by_draw
from precedent_drafts.training.texts import Text

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
    both models have the same likeliest token; `acceptance_by_draw` is that of the first sample of a step, of the second
    behind the true token, and so on, for a draft that reads its own hidden states there; for others it is one number,
    since all samples have the same. A sample takes `draw_milliseconds` (forward pass, distribution and
    choice), a step of the target `target_milliseconds`; `cost` is their quotient. With `best_draws` samples per step,
    `tokens_per_step` are expected, and decoding is `speed` times as fast as plain decoding, assuming that a wider step
    costs no more than a step of one token.
    """

    draft: str
    positions: int
    prompts: int
    temperature: float
    acceptance: float
    acceptance_by_draw: list[float]
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
        target, model = self._beside(draft)
        acceptances, agreements = [], []
        for done, text in enumerate(self._texts):
            progress(done, len(self._texts))
            accepted, agreed = self._compared(target, model, text)
            acceptances.append(accepted)
            agreements.append(agreed)
        draw, step = self._timed(target, model)
        expected = expected_tokens(acceptances, MOST_DRAWS)
        speeds = [tokens / (1 + number * draw / step) for number, tokens in enumerate(expected)]
        best, by_draw = int(np.argmax(speeds)), np.atleast_1d(np.nanmean(np.concatenate(acceptances), axis=0)).tolist()
        return DraftReport(
            draft=name,
            positions=sum(map(len, acceptances)),
            prompts=len(self._texts),
            temperature=self._sampling.temperature,
            acceptance=by_draw[0],
            acceptance_by_draw=by_draw,
            agreement=float(np.concatenate(agreements).mean()),
            draw_milliseconds=draw,
            target_milliseconds=step,
            cost=draw / step,
            best_draws=best,
            tokens_per_step=expected[best],
            speed=speeds[best],
        )

    def _beside(self, draft: PreTrainedModel) -> tuple[TargetModel, TargetModel]:
        """The target, and a draft ready to run beside it."""
        if not reads_hidden_states(draft):
            return self._target, TargetModel(draft)
        target = TargetModel(self._target.model)  # another one: it keeps hidden states from now on
        return target, reading_hidden_states(draft, target, feeds_back_normed=True)

    @torch.inference_mode()
    def _compared(
        self, target: TargetModel, draft: TargetModel, text: Text
    ) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """Acceptance and agreement at every position of an answer, `[num_answer_tokens]` each."""
        if isinstance(draft, HeadModel):
            return compared_by_draw(target, draft, text, self._sampling, MOST_DRAWS)
        rows = zip(_answer_logits(target, text), _answer_logits(draft, text), strict=True)
        accepted, agreed = [], []
        for target_logits, draft_logits in rows:
            distributions = probs_of(target_logits, self._sampling), probs_of(draft_logits, self._sampling)
            accepted.append(torch.minimum(*distributions).sum(-1).double().cpu())
            agreed.append((target_logits.argmax(-1) == draft_logits.argmax(-1)).cpu())
        return torch.cat(accepted).numpy(), torch.cat(agreed).numpy()

    def _timed(self, target: TargetModel, draft: TargetModel) -> tuple[float, float]:
        """Time a sample and a plain step of the target, in milliseconds; medians of alternating runs."""
        prompt = [*self._texts[0].token_ids, *([self._texts[0].token_ids[-1]] * TIMED_PREFIX)][:TIMED_PREFIX]
        slot = target.new_slot()
        target.prefill(slot, prompt)
        request = Request("timing", tuple(prompt), self._sampling, mode="traversal", target_slot=lambda: slot)
        if isinstance(draft, HeadModel):
            drafter: DraftModelDrafter = HeadDrafter("draft-model", draft)
        else:
            drafter = DraftModelDrafter(draft, early_exit=exits_early(draft, target))
        session = drafter.begin(request)
        session.draw(TreeBuilder(), 1, CounterRng(0, 0))  # prefills the prompt
        draws, steps = [], []
        for number in range(TIMED_ROUNDS):
            started = perf_counter()
            session.draw(TreeBuilder(), MOST_DRAWS, CounterRng(0, number))
            between = perf_counter()
            self._plain_step(target, slot)
            draws.append((between - started) / MOST_DRAWS)
            steps.append(perf_counter() - between)
        return median(draws) * 1e3, median(steps) * 1e3

    def _plain_step(self, target: TargetModel, slot: Slot) -> None:
        probs_of(target.plain_step(slot)[0], self._sampling)
        target.discard(slot)


def expected_tokens(acceptances: Sequence[NDArray[np.float64]], most_draws: int) -> list[float]:
    """Expected tokens of a step with 0, 1, … samples: the target's own token and the accepted prefix of the samples.

    `acceptances` holds those at successive positions of each text, `[positions]`, or, where they depend on the samples
    before, those of all samples behind each position, `[positions, most_draws]`, NaN beyond the text's end. The mean is
    over all positions at which a chain of `most_draws` samples could begin (only the first one in shorter texts).
    """
    expected = [1.0]
    for number in range(1, most_draws + 1):
        chains = [_chains(each, number, most_draws).prod(-1) for each in acceptances if len(each) >= number]
        expected.append(expected[-1] + float(np.concatenate(chains).mean() if chains else 0.0))
    return expected


def _chains(values: NDArray[np.float64], length: int, longest: int) -> NDArray[np.float64]:
    """The acceptances of the first `length` samples of each chain, `[chains, length]`."""
    starts = max(1, len(values) - longest + 1)
    if values.ndim == 1:
        return np.lib.stride_tricks.sliding_window_view(values, length)[:starts]
    return values[:starts, :length]


def _answer_logits(model: TargetModel, text: Text) -> Iterator[Tensor]:
    """Logits before each token of an answer, `[rows, vocab_size]`, some rows at a time."""
    slot, rest = model.new_slot(), text.token_ids[text.num_context_tokens :]
    model.prefill(slot, text.token_ids[: text.num_context_tokens])
    while rest:
        piece, rest = rest[:ROWS_AT_ONCE], rest[ROWS_AT_ONCE:]
        tree = chain(piece[:-1])
        yield model.score([(slot, tree)])[0]
        model.commit(slot, tree, range(len(tree)), piece[-1])
