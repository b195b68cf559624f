"""The decode loop as a whole: its output is the target model's, whatever is proposed."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from precedent.config import SamplingParams
from precedent.decoding.loop import DecodeLoop
from precedent.decoding.sequence import DecodingSequence
from precedent.drafters.base import Drafter, DrawSource
from precedent.drafters.model.drafter import DraftModelDrafter
from precedent.drafters.request import Request
from precedent.planning.costs import CostCurve
from precedent.planning.plan import Limits, Plan
from precedent.planning.planner import Planner
from precedent.sampling.constraints import constraints_for
from precedent.sampling.probabilities import probs_of
from precedent.sampling.rng import Rng, entropy_rng
from precedent.sampling.row_shaper import RowShaper
from precedent.target import TargetModel
from precedent_testing.drafters import NullDrafter, OracleDrafter, RandomDrafter
from precedent_testing.replay_rng import enumerate_outcomes
from precedent_testing.tiny_models import tiny_causal_lm

ENTROPY = entropy_rng(1)
PROMPT = [11, 7, 200, 31, 5, 7]


class EverythingPlanner(Planner):
    """Verifies all candidates and always samples: the loop under the heaviest load, with no clock in its decisions."""

    def __init__(self, num_draws: int = 2) -> None:
        super().__init__(CostCurve())
        self._num_draws = num_draws

    def plan(self, candidates: Sequence, draw_sources: Mapping[str, DrawSource], limits: Limits) -> Plan:
        """All candidates within the limits; as many samples as allowed."""
        plan = super().plan(candidates, {}, limits)
        plan.draws = {source: min(self._num_draws, limits.max_depth) for source in draw_sources}
        return plan


def start(
    target: TargetModel,
    drafters: Sequence[Drafter],
    sampling: SamplingParams,
    *,
    rng_of: Callable[[int], Rng] = ENTROPY,
    prompt: Sequence[int] = PROMPT,
    mode: str = "",
    num_tokens: int | None = None,
    shape: RowShaper | None = None,
    end_token_ids: frozenset[int] = frozenset({0}),
) -> DecodingSequence:
    """A prefilled sequence with its drafters begun."""
    slot = target.new_slot()
    target.prefill(slot, prompt)
    shape = shape or constraints_for(sampling, prompt)
    mode = mode or ("greedy" if sampling.greedy else "traversal")
    request = Request(
        "test", tuple(prompt), sampling, mode=mode, shape=shape, num_tokens=num_tokens, end_token_ids=end_token_ids
    )
    sessions = {drafter.name: drafter.begin(request) for drafter in drafters}
    return DecodingSequence(request, slot, sampling.max_tokens, rng_of, sessions=sessions)


def run(target: TargetModel, sequence: DecodingSequence, planner: Planner | None = None) -> list[int]:
    """Step to the end and return the output."""
    planner = planner or EverythingPlanner()
    while not sequence.finished:
        DecodeLoop(target, planner).step([sequence])
    if sequence.error is not None:
        raise sequence.error
    return sequence.output_ids


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


PENALTIES: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3},
    {"frequency_penalty": 0.4},
    {"presence_penalty": 2},
    {"logit_bias": {7: 6, 11: -100}},
    {"repetition_penalty": 1.1, "frequency_penalty": 0.2, "presence_penalty": 0.3, "logit_bias": {3: 2}},
]
"""Each alone and all together; strong enough to change answers, weak enough to let tokens occur again."""


@pytest.mark.parametrize("penalties", [{}, *PENALTIES], ids=str)
def test_greedy_output_equals_plain_decoding_token_for_token(target: TargetModel, penalties: dict[str, Any]) -> None:
    """Oracle, adversary, draft model and all at once give the very tokens of plain decoding (float64)."""
    sampling = SamplingParams(max_tokens=40, **penalties)
    expected = greedy_by_hand(target, sampling)
    assert (expected == greedy_by_hand(target, SamplingParams(max_tokens=40))) is not bool(penalties)
    draft = DraftModelDrafter(TargetModel(tiny_causal_lm("llama", seed=6, num_hidden_layers=1)))
    same = DraftModelDrafter(TargetModel(tiny_causal_lm("llama", seed=5)))
    oracle, adversary = OracleDrafter(expected), RandomDrafter(target.vocab_size)
    for drafters in ([], [NullDrafter()], [oracle], [adversary], [draft], [same], [oracle, adversary, draft]):
        assert run(target, start(target, drafters, sampling)) == expected


def test_an_oracle_needs_few_steps_and_an_adversary_no_more_than_plain(target: TargetModel) -> None:
    """The ceiling takes max_nodes + 1 tokens per step; nonsense never costs a step."""
    sampling = SamplingParams(max_tokens=40)
    answer = greedy_by_hand(target, sampling)
    oracle = start(target, [OracleDrafter(answer)], sampling)
    run(target, oracle)
    assert oracle.stats.num_steps == -(-len(answer) // 33)
    adversary = start(target, [RandomDrafter(target.vocab_size)], sampling)
    run(target, adversary)
    assert adversary.stats.num_steps <= len(answer)


def test_every_counted_token_is_accounted_for(target: TargetModel) -> None:
    """Output = accepted + one token of the target's own per step (less one when an accepted end token ends it)."""
    sampling = SamplingParams(max_tokens=40, temperature=1.0)
    sequence = start(target, [RandomDrafter(target.vocab_size), NullDrafter()], sampling)
    output = run(target, sequence)
    own = len(output) - sequence.stats.num_accepted_tokens
    assert sequence.stats.num_output_tokens == len(output)
    assert own in (sequence.stats.num_steps, sequence.stats.num_steps - 1)
    assert sum(sequence.stats.accepted_by_source.values()) == sequence.stats.num_accepted_tokens


@pytest.mark.parametrize("penalties", [{}, *PENALTIES], ids=str)
def test_a_seed_fixes_the_text_whatever_is_proposed(target: TargetModel, penalties: dict[str, Any]) -> None:
    """Coupled mode: the same answer without drafts, with nonsense, with an oracle and with a draft model (float64)."""
    draft = DraftModelDrafter(TargetModel(tiny_causal_lm("llama", seed=5)))

    def answer(seed: int, *drafters: Drafter) -> list[int]:
        sampling = SamplingParams(max_tokens=30, temperature=1.5, seed=seed, **penalties)
        return run(target, start(target, drafters, sampling, mode="coupled", rng_of=entropy_rng(len(drafters))))

    plain = answer(17)
    for drafters in ([RandomDrafter(259)], [OracleDrafter(plain)], [draft], [RandomDrafter(259), draft]):
        assert answer(17, *drafters) == plain
    assert answer(18) != plain


@pytest.mark.parametrize("mode", ["coupled", "greedy"])
@pytest.mark.parametrize("penalties", [{}, *PENALTIES], ids=str)
def test_a_twin_draft_model_is_always_right(target: TargetModel, penalties: dict[str, Any], mode: str) -> None:
    """With the same weights, penalties and noise the draft model chooses what the target chooses."""
    chosen: dict[str, Any] = {"temperature": 1.5, "seed": 3} if mode == "coupled" else {}
    sampling = SamplingParams(max_tokens=30, **chosen, **penalties)
    twin = DraftModelDrafter(TargetModel(tiny_causal_lm("llama", seed=5)))
    sequence = start(target, [twin], sampling, mode=mode)
    run(target, sequence)
    assert sequence.stats.num_accepted_tokens == sequence.stats.num_draft_tokens > 0


@pytest.mark.parametrize("mode", ["coupled", "traversal", "topdown"])
@pytest.mark.parametrize("top_p", [0.5, 0.9])
def test_a_twin_draft_model_keeps_the_same_of_equally_likely_tokens(mode: str, top_p: float) -> None:
    """All logits are equal, so `top_p` cuts through a tie at every token, in the target as in the draft model."""

    def undecided() -> TargetModel:
        model = tiny_causal_lm("llama", seed=5)
        model.get_output_embeddings().weight.data.zero_()
        return TargetModel(model)

    target = undecided()
    sampling = SamplingParams(max_tokens=30, temperature=1.0, top_p=top_p, seed=3 if mode == "coupled" else None)
    sequence = start(target, [DraftModelDrafter(undecided())], sampling, mode=mode)
    output = run(target, sequence)
    assert sequence.stats.num_accepted_tokens == sequence.stats.num_draft_tokens > 0
    assert min(output) >= math.floor(target.vocab_size * (1 - top_p))


@pytest.mark.parametrize("mode", ["greedy", "coupled"])
@pytest.mark.parametrize("end_at", [0, 3, 11], ids=lambda at: f"token {at} ends")
def test_nothing_follows_an_end_token(target: TargetModel, mode: str, end_at: int) -> None:
    """Whoever proposes the end token, and whatever is proposed or would be chosen behind it."""
    chosen: dict[str, Any] = {"temperature": 1.5, "seed": 17} if mode == "coupled" else {}
    sampling = SamplingParams(max_tokens=30, **chosen)
    whole = run(target, start(target, [], sampling, mode=mode))
    ends = frozenset({whole[end_at]})
    expected = whole[: whole.index(whole[end_at]) + 1]
    assert len(expected) < len(whole)
    twin = DraftModelDrafter(TargetModel(tiny_causal_lm("llama", seed=5)))
    for drafters in ([], [OracleDrafter(whole)], [RandomDrafter(259)], [twin], [OracleDrafter(whole), twin]):
        sequence, stepped, sources = start(target, drafters, sampling, mode=mode, end_token_ids=ends), [], []
        while not sequence.finished:
            (result,) = DecodeLoop(target, EverythingPlanner()).step([sequence])
            stepped.extend(result.token_ids)
            sources.extend(result.sources)
        assert sequence.output_ids == stepped == expected
        assert len(sources) == len(expected)
        assert sequence.stats.num_output_tokens == len(expected)
        assert sequence.finish_reason == "stop"


class StepRng:
    """One step's view of random numbers that replay a whole request: its nodes are other nodes than those before."""

    def __init__(self, rng: Rng, step_number: int) -> None:
        self._rng, self._offset = rng, 1000 * step_number

    def bernoulli(self, probability: float, node: int, purpose: str) -> bool:
        """Pass on, with the node moved into this step's range."""
        return self._rng.bernoulli(probability, node + self._offset, purpose)

    def categorical(self, weights: Tensor, node: int, purpose: str) -> int:
        """Pass on, with the node moved into this step's range."""
        return self._rng.categorical(weights, node + self._offset, purpose)


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
def test_the_distribution_of_whole_answers_through_the_loop_is_exact(
    mode: str, sampling: SamplingParams, vocab_size: int
) -> None:
    """Every branch of the real loop (tiny transformers, fixed and sampled candidates, KV cache), to 1e-9."""
    tiny = {"vocab_size": vocab_size, "num_hidden_layers": 1, "hidden_size": 16, "scale": 0.3}
    target = TargetModel(tiny_causal_lm("llama", seed=8, **tiny))
    draft = TargetModel(tiny_causal_lm("llama", seed=9, **tiny))

    def answer(rng: Rng) -> tuple[int, ...]:
        drafters = [OracleDrafter([2, 1, 1]), DraftModelDrafter(draft)]
        sequence = start(
            target, drafters, sampling, rng_of=partial(StepRng, rng), prompt=[1, 2], mode=mode, num_tokens=3
        )
        return tuple(run(target, sequence, EverythingPlanner(num_draws=2)))

    found: dict[tuple[int, ...], float] = defaultdict(float)
    for probability, output in enumerate_outcomes(answer):
        found[output] += probability
    expected = {string: p for string, p in distribution_of_strings(target, sampling, 3).items() if p > 0}
    assert found == pytest.approx(expected, abs=1e-9)


def test_sequences_stepped_together_equal_sequences_stepped_alone(target: TargetModel) -> None:
    """Rows of a batch are independent, whatever each of them accepts."""
    sampling = SamplingParams(max_tokens=25)
    prompts = [PROMPT, [3, 1, 4, 1, 5, 9, 2, 6], [40] * 20]
    alone = [
        run(target, start(target, [RandomDrafter(259, seed=i)], sampling, prompt=p)) for i, p in enumerate(prompts)
    ]
    together = [start(target, [RandomDrafter(259, seed=i)], sampling, prompt=p) for i, p in enumerate(prompts)]
    while running := [sequence for sequence in together if not sequence.finished]:
        DecodeLoop(target, EverythingPlanner()).step(running)
    assert [sequence.output_ids for sequence in together] == alone


def test_a_failing_row_fails_its_own_sequence_only(target: TargetModel) -> None:
    """A constraint that masks everything is an error of that request; its neighbour goes on."""
    sampling = SamplingParams(max_tokens=5)
    broken = start(target, [], sampling, shape=lambda output_ids, row: torch.full_like(row, -torch.inf))
    fine = start(target, [], sampling)
    while not fine.finished:
        DecodeLoop(target, EverythingPlanner()).step([s for s in (broken, fine) if not s.finished])
    assert "every token is masked at output position 0" in str(broken.error)
    assert fine.error is None
    assert fine.output_ids == greedy_by_hand(target, sampling)
