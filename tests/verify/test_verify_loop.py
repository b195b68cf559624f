"""Whole answers through the real decode loop with the random numbers it ships with, against plain sampling.

That the loop's distribution is exact under ideal random numbers is shown by enumeration elsewhere; this adds the
counter-based ones. A distribution that is off by total variation d has a chi-square divergence of at least (2 d)^2 from
the true one, so the noncentrality of the G statistic is at least N (2 d)^2, and N follows from false-alarm rate and
power.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from functools import cache

import pytest
import torch
from helpers.stepping import AllCandidates, run, start
from helpers.tabled_model import TabledModel
from scipy.optimize import brentq
from scipy.stats import chi2, ncx2

from precedent.config import SamplingParams
from precedent.decoding.loop import DecodeLoop
from precedent.drafters.model.drafter import DraftModelDrafter
from precedent.sampling.rng import entropy_rng
from precedent_testing.drafters import OracleDrafter
from precedent_testing.tiny_models import tiny_causal_lm

VOCABULARY, LENGTH, PROMPT = 4, 3, (0, 1)  # with two tokens, a residual leaves one: nothing would be drawn from it
FALSE_ALARM, POWER = 1e-5, 0.99
SAMPLING = SamplingParams(temperature=1.0, max_tokens=LENGTH)
STRINGS = list(itertools.product(range(VOCABULARY), repeat=LENGTH))
CRITICAL = float(chi2.isf(FALSE_ALARM, len(STRINGS) - 1))


def answers_needed(total_variation: float) -> int:
    """Answers after which any bias of this total variation is seen with `POWER`."""
    needed = brentq(lambda noncentrality: ncx2.sf(CRITICAL, len(STRINGS) - 1, noncentrality) - POWER, 1.0, 1000.0)
    return math.ceil(needed / (2 * total_variation) ** 2)


def tabled(seed: int) -> TabledModel:
    """A tiny transformer, asked once for each context."""
    model = tiny_causal_lm("llama", seed=seed, vocab_size=VOCABULARY, num_hidden_layers=1, hidden_size=16, scale=0.1)

    def logits_of(token_ids: tuple[int, ...]) -> torch.Tensor:
        with torch.inference_mode():
            return model(input_ids=torch.tensor([token_ids])).logits[0, -1]

    return TabledModel(logits_of)


def answer(target: TabledModel, draft: TabledModel, entropy: int, mode: str, loop: DecodeLoop) -> tuple[int, ...]:
    """One answer through the loop, with a cached proposal and a draft model."""
    drafters = [OracleDrafter([1, 3, 2]), DraftModelDrafter(draft)]  # type: ignore[arg-type]  # shaped like a TargetModel
    sequence = start(
        target, drafters, SAMPLING, prompt=PROMPT, mode=mode, rng_of=entropy_rng(entropy), ends=frozenset()
    )
    return run(target, sequence, loop)


@cache
def observed(mode: str, count: int) -> Counter[tuple[int, ...]]:
    """How often each answer came."""
    target, draft = tabled(8), tabled(9)
    loop = DecodeLoop(target, AllCandidates(2))
    with torch.inference_mode():
        return Counter(answer(target, draft, entropy, mode, loop) for entropy in range(count))


def g_statistic(mode: str, count: int, bend: float = 0.0) -> float:
    """2 sum observed log(observed / expected) over all answers; `bend` is how far what is expected is moved."""
    target = tabled(8)
    distribution = {string: _probability(target, string) for string in STRINGS}
    for half, moved in ((STRINGS[::2], -bend), (STRINGS[1::2], bend)):  # for its total variation the hardest to see
        share = moved / sum(distribution[string] for string in half)
        for string in half:
            distribution[string] *= 1.0 + share
    return 2 * sum(
        seen * math.log(seen / (count * distribution[string])) for string, seen in observed(mode, count).items()
    )


def _probability(target: TabledModel, string: tuple[int, ...]) -> float:
    probability = 1.0
    for position in range(LENGTH):
        row = target._row((*PROMPT, *string[:position])).softmax(0)
        probability *= float(row[string[position]])
    return probability


@pytest.mark.parametrize("mode", ["traversal", "topdown"])
def test_answers_have_the_targets_distribution_by_a_small_g_test(mode: str) -> None:
    """Sees a total variation of 15 %."""
    assert g_statistic(mode, answers_needed(0.15)) < CRITICAL


def test_a_distribution_that_is_off_by_fifteen_per_cent_is_seen() -> None:
    """The same answers against a distribution moved by what the test claims to see."""
    assert g_statistic("traversal", answers_needed(0.15), bend=0.15) > CRITICAL


@pytest.mark.exhaustive
@pytest.mark.parametrize("mode", ["traversal", "topdown"])
def test_answers_have_the_targets_distribution_by_a_large_g_test(mode: str) -> None:
    """Sees a total variation of 0.5 %, wherever it hides, with a power of 99 % (half an hour)."""
    assert g_statistic(mode, answers_needed(0.005)) < CRITICAL
