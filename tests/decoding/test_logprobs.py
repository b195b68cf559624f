"""Log-probabilities are the target's own, whoever proposed the tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

from precedent import Engine, SamplingParams, SpeculationConfig
from precedent.engine.generation import GenerationResult
from precedent.errors import ConfigError
from precedent_testing.scripted_model import fixed_cost
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm

PROMPT = tuple(b"the order was sent, the order was")


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    running = Engine(tiny_causal_lm(scale=0.5), byte_tokenizer(), name="tiny", cost=fixed_cost())
    yield running
    running.close()


def ask(engine: Engine, sampling: SamplingParams, **settings: object) -> GenerationResult:
    return engine.submit(PROMPT, sampling, **settings).result()  # type: ignore[arg-type]


def distribution(engine: Engine, token_ids: tuple[int, ...]) -> torch.Tensor:
    """Log-probabilities by one plain forward over prompt and answer, `[answer, vocab_size]`."""
    ids = torch.tensor([[*PROMPT, *token_ids]])
    with torch.inference_mode():
        rows = engine.target.model(input_ids=ids).logits[0, len(PROMPT) - 1 : -1]
    return rows[:, : len(engine.tokenizer)].log_softmax(-1)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("drafted", [False, True])
def test_they_are_those_of_a_plain_forward_over_the_answer(engine: Engine, temperature: float, drafted: bool) -> None:
    sampling = SamplingParams(temperature=temperature, seed=5, max_tokens=24, logprobs=3)
    plain = ask(engine, sampling, speculation=SpeculationConfig(enabled=False))
    result = ask(engine, sampling, prediction=plain.token_ids if drafted else None)
    assert result.token_ids == plain.token_ids
    assert result.stats.num_steps < 24 or not drafted, "several tokens of one step each have their own row"
    expected = distribution(engine, result.token_ids)
    for row, one, token in zip(expected, result.logprobs, result.token_ids, strict=True):
        assert one.token_id == token
        assert one.logprob == pytest.approx(float(row[token]), abs=1e-9)
        best = row.topk(3)
        assert [token for token, _ in one.top] == best.indices.tolist()
        assert [value for _, value in one.top] == pytest.approx(best.values.tolist(), abs=1e-9)


def test_emissions_carry_the_logprobs_of_their_tokens(engine: Engine) -> None:
    generation = engine.submit(PROMPT, SamplingParams(max_tokens=8, logprobs=0))
    emissions = list(generation)
    assert all(len(one.logprobs) == len(one.token_ids) for one in emissions)
    assert tuple(entry for one in emissions for entry in one.logprobs) == generation.result().logprobs
    assert all(entry.top == () for one in emissions for entry in one.logprobs)


def test_a_stop_string_cuts_them_with_their_tokens(engine: Engine) -> None:
    whole = ask(engine, SamplingParams(max_tokens=8, logprobs=0))
    stop = engine.tokenizer.decode([whole.token_ids[3]])
    cut = ask(engine, SamplingParams(max_tokens=8, logprobs=0, stop=(stop,)), prediction=whole.token_ids)
    assert len(cut.logprobs) == len(cut.token_ids) <= 4


def test_what_is_masked_is_no_alternative(engine: Engine) -> None:
    result = ask(engine, SamplingParams(max_tokens=4, logprobs=20, repetition_penalty=1.3))
    assert all(value > -math.inf for one in result.logprobs for _, value in one.top)


def test_nothing_is_computed_unless_asked_for(engine: Engine) -> None:
    assert ask(engine, SamplingParams(max_tokens=4)).logprobs == ()


@pytest.mark.parametrize("number", [-1, 21])
def test_a_number_out_of_range_is_refused(number: int) -> None:
    with pytest.raises(ConfigError, match=f"logprobs={number} must be None or a whole number between 0 and 20"):
        SamplingParams(logprobs=number)
