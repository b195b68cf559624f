"""The decode loop as a whole: its output is the target model's, whatever is proposed."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from helpers.enumeration import RngOfAStep
from helpers.stepping import PROMPT, AllCandidates, run, start

from precedent.config import SamplingParams
from precedent.decoding.loop import DecodeLoop
from precedent.decoding.sequence import DecodingSequence
from precedent.drafters.base import Drafter
from precedent.drafters.model.drafter import DraftModelDrafter
from precedent.sampling.constraints import constraints_for
from precedent.sampling.probabilities import probs_of
from precedent.sampling.rng import Rng, entropy_rng
from precedent.target import TargetModel
from precedent_testing.drafters import NullDrafter, OracleDrafter, RandomDrafter
from precedent_testing.replay_rng import enumerate_outcomes
from precedent_testing.tiny_models import tiny_causal_lm


def begun(target: TargetModel, drafters: Sequence[Drafter], sampling: SamplingParams, **how: Any) -> DecodingSequence:
    """A prefilled sequence with its drafters begun and its penalties applied."""
    shape = constraints_for(sampling, how.get("prompt", PROMPT))
    return start(target, drafters, sampling, **{"shape": shape, **how})


def answer(target: TargetModel, sequence: DecodingSequence) -> list[int]:
    return list(run(target, sequence, DecodeLoop(target, AllCandidates(2))))


def greedy_by_hand(target: TargetModel, sampling: SamplingParams) -> list[int]:
    """Plain greedy decoding by whole forwards, with the request's constraints."""
    output: list[int] = []
    shape = constraints_for(sampling, PROMPT)
    while len(output) < sampling.max_tokens and (not output or output[-1] != 0):
        with torch.inference_mode():
            row = target.model(input_ids=torch.tensor([[*PROMPT, *output]])).logits[0, -1]
        output.append(int((row if shape is None else shape(output, row)).argmax()))
    return output


@pytest.fixture(scope="module")
def target() -> TargetModel:
    """A tiny float64 Llama."""
    return TargetModel(tiny_causal_lm("llama", seed=5))


@pytest.fixture(scope="module")
def twin() -> DraftModelDrafter:
    """A draft model with the target's weights."""
    return DraftModelDrafter(TargetModel(tiny_causal_lm("llama", seed=5)))


PENALTIES: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3},
    {"frequency_penalty": 0.4},
    {"presence_penalty": 2},
    {"logit_bias": {7: 6, 11: -100}},
    {"repetition_penalty": 1.1, "frequency_penalty": 0.2, "presence_penalty": 0.3, "logit_bias": {3: 2}},
]
"""Each alone and all together; strong enough to change answers, weak enough to let tokens occur again."""


@pytest.mark.parametrize("penalties", [{}, *PENALTIES], ids=str)
@pytest.mark.sampled(2)
def test_greedy_output_equals_plain_decoding_token_for_token(
    target: TargetModel, twin: DraftModelDrafter, penalties: dict[str, Any]
) -> None:
    """Oracle, adversary, draft model and all at once give the very tokens of plain decoding (float64)."""
    sampling = SamplingParams(max_tokens=24, **penalties)
    expected = greedy_by_hand(target, sampling)
    assert (expected == greedy_by_hand(target, SamplingParams(max_tokens=24))) is not bool(penalties)
    draft = DraftModelDrafter(TargetModel(tiny_causal_lm("llama", seed=6, num_hidden_layers=1)))
    oracle, adversary = OracleDrafter(expected), RandomDrafter(target.vocab_size)
    for drafters in ([], [NullDrafter()], [oracle], [adversary], [draft], [twin], [oracle, adversary, draft]):
        assert answer(target, begun(target, drafters, sampling)) == expected


def test_an_oracle_needs_few_steps_and_an_adversary_no_more_than_plain(target: TargetModel) -> None:
    """The ceiling takes max_nodes + 1 tokens per step; nonsense never costs a step; every token is accounted for."""
    sampling = SamplingParams(max_tokens=40)
    expected = greedy_by_hand(target, sampling)
    oracle = begun(target, [OracleDrafter(expected)], sampling)
    answer(target, oracle)
    assert oracle.stats.num_steps == -(-len(expected) // 33)
    for sampled in (sampling, SamplingParams(max_tokens=40, temperature=1.0)):
        adversary = begun(target, [RandomDrafter(target.vocab_size), NullDrafter()], sampled)
        output, stats = answer(target, adversary), adversary.stats
        assert stats.num_steps <= stats.num_output_tokens == len(output)
        own = len(output) - stats.num_accepted_tokens
        assert own in (stats.num_steps, stats.num_steps - 1), "less one when an accepted end token ends it"
        assert sum(stats.accepted_by_source.values()) == stats.num_accepted_tokens


@pytest.mark.parametrize("penalties", [{}, *PENALTIES], ids=str)
@pytest.mark.sampled(3)
def test_a_seed_fixes_the_text_whatever_is_proposed(
    target: TargetModel, twin: DraftModelDrafter, penalties: dict[str, Any]
) -> None:
    """Coupled mode: the same answer without drafts, with nonsense, with an oracle and with a draft model (float64)."""

    def seeded(seed: int, *drafters: Drafter) -> list[int]:
        sampling = SamplingParams(max_tokens=30, temperature=1.5, seed=seed, **penalties)
        return answer(target, begun(target, drafters, sampling, rng_of=entropy_rng(len(drafters))))

    plain = seeded(17)
    for drafters in ([RandomDrafter(259)], [OracleDrafter(plain)], [twin], [RandomDrafter(259), twin]):
        assert seeded(17, *drafters) == plain
    assert seeded(18) != plain


@pytest.mark.parametrize("sampled", [{"temperature": 1.5, "seed": 17}, {}], ids=["coupled", "greedy"])
@pytest.mark.parametrize("end_at", [0, 3, 11], ids=lambda at: f"token {at} ends")
def test_nothing_follows_an_end_token(
    target: TargetModel, twin: DraftModelDrafter, sampled: dict[str, Any], end_at: int
) -> None:
    """Whoever proposes the end token, and whatever is proposed or would be chosen behind it."""
    sampling = SamplingParams(max_tokens=30, **sampled)
    whole = answer(target, begun(target, [], sampling))
    ends = frozenset({whole[end_at]})
    expected = whole[: whole.index(whole[end_at]) + 1]
    assert len(expected) < len(whole)
    for drafters in ([], [OracleDrafter(whole)], [RandomDrafter(259)], [twin], [OracleDrafter(whole), twin]):
        sequence, stepped, sources = begun(target, drafters, sampling, ends=ends), [], []
        while not sequence.finished:
            (result,) = DecodeLoop(target, AllCandidates(2)).step([sequence])
            stepped.extend(result.token_ids)
            sources.extend(result.sources)
        assert sequence.output_ids == stepped == expected
        assert sequence.stats.num_output_tokens == len(sources) == len(expected)
        assert sequence.finish_reason == "stop"


def distribution_of_strings(
    target: TargetModel, sampling: SamplingParams, num_tokens: int
) -> dict[tuple[int, ...], float]:
    """The exact distribution of plain sampling: all strings up to an end token or the length limit."""
    distribution: dict[tuple[int, ...], float] = {}
    for string in itertools.product(range(num_tokens), repeat=sampling.max_tokens):
        cut = string[: string.index(0) + 1] if 0 in string else string
        if cut in distribution:
            continue
        probability = 1.0
        for i, token in enumerate(cut):
            with torch.inference_mode():
                row = target.model(input_ids=torch.tensor([[1, 2, *cut[:i]]])).logits[0, -1, :num_tokens]
            shape = constraints_for(sampling, [1, 2])
            row = row if shape is None else shape(cut[:i], row)
            probability *= float(probs_of(row, sampling)[token])
        distribution[cut] = probability
    return distribution


@pytest.mark.parametrize("mode", ["traversal", "topdown"])
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(max_tokens=3, temperature=1.0),
        SamplingParams(max_tokens=3, temperature=0.6, top_k=2, repetition_penalty=1.5),
        SamplingParams(max_tokens=3, temperature=0.8, frequency_penalty=0.9, presence_penalty=-0.4),
        SamplingParams(max_tokens=3, temperature=1.2, logit_bias={1: 0.7, 2: -0.6}),
    ],
    ids=["temperature 1", "temperature, top-k and penalty", "frequency and presence", "bias"],
)
@pytest.mark.parametrize("vocab_size", [3, 5], ids=["", "a head wider than the tokenizer"])
@pytest.mark.sampled(3)
def test_the_distribution_of_whole_answers_through_the_loop_is_exact(
    mode: str, sampling: SamplingParams, vocab_size: int
) -> None:
    """Every branch of the real loop (tiny transformers, fixed and sampled candidates, KV cache), to 1e-9."""
    tiny = {"vocab_size": vocab_size, "num_hidden_layers": 1, "hidden_size": 16, "scale": 0.3}
    target = TargetModel(tiny_causal_lm("llama", seed=8, **tiny))
    draft = TargetModel(tiny_causal_lm("llama", seed=9, **tiny))

    def replayed(rng: Rng) -> tuple[int, ...]:
        drafters, rng_of = [OracleDrafter([2, 1, 1]), DraftModelDrafter(draft)], partial(RngOfAStep, rng)
        sequence = begun(target, drafters, sampling, rng_of=rng_of, prompt=(1, 2), mode=mode, num_tokens=3)
        return tuple(answer(target, sequence))

    found: dict[tuple[int, ...], float] = defaultdict(float)
    for probability, output in enumerate_outcomes(replayed):
        found[output] += probability
    expected = {string: p for string, p in distribution_of_strings(target, sampling, 3).items() if p > 0}
    assert found == pytest.approx(expected, abs=1e-9)


def test_a_failing_row_fails_its_own_sequence_only(target: TargetModel) -> None:
    """A constraint that masks everything is an error of that request; its neighbour goes on as if it were alone."""
    sampling = SamplingParams(max_tokens=25)
    broken = begun(target, [], sampling, shape=lambda output_ids, row: torch.full_like(row, -torch.inf))
    fine = begun(target, [RandomDrafter(259)], sampling)
    while not fine.finished:
        DecodeLoop(target, AllCandidates(2)).step([s for s in (broken, fine) if not s.finished])
    assert "every token is masked at output position 0" in str(broken.error)
    assert fine.error is None
    assert fine.output_ids == greedy_by_hand(target, sampling)
