"""Engines on encoder-decoder models: the answers of plain decoding, whatever is drafted or asked beside them."""

from __future__ import annotations

import itertools
from collections import defaultdict
from contextlib import closing

import pytest
import torch
from helpers.enumeration import RngOfAStep
from helpers.hybrids import random_ids
from helpers.pearl import PlannerOfAllCandidates, in_place, run, start
from helpers.two_sided import PROMPT, generated, model_of, two_sided_engine

from precedent.cache import SpeculationCache
from precedent.config import EngineLimits, SamplingParams, SpeculationConfig
from precedent.drafters.base import Drafter
from precedent.engine.engine import Engine
from precedent.errors import CapacityError, ConfigError, ContextOverflowError, UnsupportedError
from precedent.grammar import JsonSchema
from precedent.sampling.rng import Rng
from precedent.target import TargetModel
from precedent_models.encoder_decoder.target import EncoderDecoderTarget
from precedent_research.pearl import PearlDrafter
from precedent_testing.drafters import OracleDrafter
from precedent_testing.embedders import HashEmbedder
from precedent_testing.replay_rng import enumerate_outcomes
from precedent_testing.tiny_models import tiny_causal_lm, tiny_seq2seq_lm

PLAIN = SpeculationConfig(enabled=False, write_back=False)
SLOW = ("t5, gated and untied", "mbart", "pegasus", "marian", "t5gemma")
FAMILIES = ["t5", "bart", *(pytest.param(family, marks=pytest.mark.slow) for family in SLOW)]


@pytest.fixture(scope="module", params=["t5", "bart"])
def engine(request: pytest.FixtureRequest) -> Engine:
    """An engine with a draft model of the other family and a cache."""
    other = {"t5": "bart", "bart": "t5"}[request.param]
    with (
        SpeculationCache.open(None, embedder=HashEmbedder()) as cache,
        closing(two_sided_engine(request.param, draft_model=model_of(other, seed=3), cache=cache)) as running,
    ):
        yield running


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_answers_are_those_of_generate(family: str) -> None:
    """Token for token in float64, through prompt lookup and a right and then wrong prediction."""
    expected = generated(model_of(family), PROMPT, 40)
    guess = (*expected[:11], 7, *expected[12:30], 99, *expected[31:])
    with closing(two_sided_engine(family)) as running:
        result = running.submit(PROMPT, SamplingParams(max_tokens=40), prediction=guess).result()
        plain = running.submit(PROMPT, SamplingParams(max_tokens=40), speculation=PLAIN).result()
    assert result.token_ids == plain.token_ids == expected
    assert result.stats.accepted_by_source["prediction"] > 15
    assert result.stats.num_steps < plain.stats.num_steps


def test_a_decoder_only_draft_model_drafts() -> None:
    """It continues prompt and answer as one text; what it proposes changes no answer."""
    asked, drafted = SpeculationConfig(drafters=("draft-model",)), 0
    with closing(two_sided_engine("t5", draft_model=tiny_causal_lm(seed=5))) as running:
        for sampling in (SamplingParams(max_tokens=24), SamplingParams(max_tokens=24, temperature=0.9, seed=3)):
            plain, result = (running.submit(PROMPT, sampling, speculation=each).result() for each in (PLAIN, asked))
            assert result.token_ids == plain.token_ids
            drafted += result.stats.num_draft_tokens
    assert drafted > 0


def test_the_prompt_drafter_copies_from_what_the_encoder_reads(engine: Engine) -> None:
    """An answer that must hold words of the prompt: the drafter finds them there, for the answer never said them."""
    grammar = JsonSchema('{"enum": ["order 18 on friday"]}')
    asked = SpeculationConfig(drafters=("prompt",))
    prompt = engine.tokenizer.encode("order 17 leaves on monday, order 18 on friday")
    result = engine.submit(prompt, SamplingParams(max_tokens=40), speculation=asked, grammar=grammar).result()
    assert result.text == '"order 18 on friday"'
    assert result.stats.accepted_by_source["prompt"] > 8


def test_ragged_and_seeded_requests_together_equal_single_ones_whatever_was_proposed(engine: Engine) -> None:
    prompts = [random_ids(seed, length) for seed, length in ((1, 3), (2, 90), (3, 17), (4, 1), (5, 40))]
    settings = [SamplingParams(max_tokens=20), SamplingParams(max_tokens=33, temperature=0.8, top_p=0.9, seed=7)]
    asked = list(zip(prompts, itertools.cycle(settings)))
    expected = [engine.submit(prompt, one, speculation=PLAIN).result().token_ids for prompt, one in asked]
    for wrong_every in (1000, 4):
        guesses = [[token if (place + 1) % wrong_every else 65 for place, token in enumerate(ids)] for ids in expected]
        running = [
            engine.submit(prompt, one, query="order", prediction=guess)
            for (prompt, one), guess in zip(asked, guesses, strict=True)
        ]
        assert [each.result().token_ids for each in running] == expected


def test_the_longest_answer_does_not_depend_on_the_prompt() -> None:
    """BART's table of positions bounds prompt and answer apart; the last position is used, and none beyond it."""
    with closing(two_sided_engine("bart")) as running:
        sampling = SamplingParams(max_tokens=running.target.most_answer_tokens(0))
        long, short = (running.submit(random_ids(1, length), sampling).result() for length in (512, 5))
        with pytest.raises(ContextOverflowError, match="513 tokens"):
            running.submit(random_ids(1, 513), sampling)
    assert [len(each.token_ids) for each in (long, short)] == [511, 511]


def test_the_encoders_part_counts_when_requests_are_admitted() -> None:
    """A long prompt with a short answer does not fit where its keys and values for the decoder would not fit."""
    target = EncoderDecoderTarget(model_of("t5"))
    just = target.request_bytes(400, 8, SpeculationConfig().max_nodes + SpeculationConfig().max_draws + 1)
    sampling = SamplingParams(max_tokens=8)
    with closing(two_sided_engine("t5", limits=EngineLimits(max_kv_bytes=just))) as running:
        assert len(running.submit(random_ids(1, 400), sampling).result().token_ids) == 8
        with pytest.raises(CapacityError, match="401 prompt tokens"):
            running.submit(random_ids(1, 401), sampling)


def test_options_that_do_not_hold_are_refused(tmp_path) -> None:
    with pytest.raises(UnsupportedError, match="keep_prefixes=True does not work with the encoder-decoder model t5"):
        two_sided_engine("t5", cache=tmp_path, keep_prefixes=True)
    with pytest.raises(UnsupportedError, match="bitwise=True does not work with the encoder-decoder model t5"):
        two_sided_engine("t5", bitwise=True)
    with closing(two_sided_engine("t5")) as running, pytest.raises(ConfigError, match="prefix_tokens=3"):
        running.submit(PROMPT, SamplingParams(), prefix_tokens=3)


# The exact distribution, by enumeration of every random number

VOCABULARY = 4
TINY = {"vocab_size": VOCABULARY, "start": 3, "d_model": 16, "dtype": torch.float64}


def small(model_type: str, seed: int) -> TargetModel:
    return EncoderDecoderTarget(tiny_seq2seq_lm(model_type, seed=seed, scale=0.5, **TINY))


def rows_of(target: TargetModel, prompt: tuple[int, ...], length: int) -> dict[tuple[int, ...], float]:
    """The target's distribution of answers, by plain forwards of transformers."""
    found = {}
    for string in itertools.product(range(VOCABULARY), repeat=length):
        found[string] = 1.0
        for place, token in enumerate(string):
            decoded = torch.tensor([[3, *string[:place]]])
            logits = target.model(input_ids=torch.tensor([prompt]), decoder_input_ids=decoded, use_cache=False).logits
            found[string] *= float(logits[0, -1].softmax(-1)[token])
    return found


@pytest.mark.parametrize("mode", ["traversal", "topdown"])
@pytest.mark.parametrize("model_type", ["t5", "bart"])
@pytest.mark.sampled(4)
def test_sampled_answers_have_the_models_distribution_exactly(model_type: str, mode: str) -> None:
    """Whole answers of the shipped loop, over every branch: a draft model draws, and memory is right or wrong."""
    target, prompt, found = small(model_type, 1), (1, 2, 0, 1), defaultdict(float)
    draft = small("bart", 2)

    def answer(rng: Rng) -> tuple[int, ...]:
        drafters: list[Drafter] = [OracleDrafter((2, 1)), PearlDrafter(draft)]
        sampling = SamplingParams(temperature=1.0, max_tokens=2)
        sequence = start(
            target, drafters, sampling, prompt=prompt, mode=mode, rng_of=lambda number: RngOfAStep(rng, number),
            ends=frozenset(),
        )  # fmt: skip
        return run(target, sequence, in_place(target, PlannerOfAllCandidates(2)))

    with torch.inference_mode():
        for probability, output in enumerate_outcomes(answer):
            found[output] += probability
        expected = rows_of(target, prompt, 2)
    assert sum(found.values()) == pytest.approx(1.0, abs=1e-9)
    assert 0.5 * sum(abs(found[string] - mass) for string, mass in expected.items()) < 1e-9
