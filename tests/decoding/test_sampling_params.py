"""What a request may ask of sampling: the values that are taken, those that are refused by name, and their effect."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator
from contextlib import closing
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from precedent.cache import SpeculationCache
from precedent.config import EngineLimits, SamplingParams, SpeculationConfig
from precedent.engine.engine import Engine
from precedent.engine.options import EngineOptions
from precedent.errors import ConfigError, PromptError
from precedent.planning.costs import CostCurve
from precedent.runtime.plain_values import MOST_DEEP, check_plain
from precedent_testing.embedders import HashEmbedder
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm

PROMPT = list(b"look up order 17, then order 18, then order 19")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"temperature": "warm"}, "temperature='warm' must be 0"),
        ({"temperature": True}, "temperature=True must be 0"),
        ({"temperature": math.nan}, "temperature=nan must be 0"),
        ({"temperature": math.inf}, "temperature=inf must be 0"),
        ({"temperature": 10**400}, "temperature=1000"),
        ({"temperature": torch.tensor(1.0)}, r"temperature=tensor\(1.\) must be 0"),
        ({"top_k": True}, "top_k=True must be 0"),
        ({"top_k": 1.5}, "top_k=1.5 must be 0"),
        ({"top_p": None}, "top_p=None must be a number"),
        ({"max_tokens": 1.5}, "max_tokens=1.5 must be a number of tokens"),
        ({"max_tokens": "x"}, "max_tokens='x' must be a number of tokens"),
        ({"max_tokens": 0}, "max_tokens=0 must be a number of tokens, at least 1"),
        ({"seed": "x"}, "seed='x' must be None or a whole number"),
        ({"logprobs": True}, "logprobs=True must be None or a whole number"),
        ({"frequency_penalty": 2.5}, "frequency_penalty=2.5 must be a number between -2 and 2"),
        ({"presence_penalty": "a"}, "presence_penalty='a' must be a number between -2 and 2"),
        ({"logit_bias": {"a": 1}}, r"logit_bias=\{'a': 1\} must map token ids"),
        ({"logit_bias": {5: 101}}, r"logit_bias=\{5: 101\} must map token ids to numbers between -100 and 100"),
        ({"logit_bias": [5]}, r"logit_bias=\[5\] must map token ids"),
        ({"stop": [3]}, r"stop=\[3\] must be a text or a list of texts"),
        ({"stop": 3}, "stop=3 must be a text or a list of texts"),
        ({"stop": ["a\ud800"]}, r"stop holds '\\ud800', half of a surrogate pair"),
        ({"stop_token_ids": [-1]}, r"stop_token_ids=\[-1\] must be a list of token ids"),
        ({"stop_token_ids": 3}, "stop_token_ids=3 must be a list of token ids"),
    ],
    ids=str,
)
def test_what_cannot_be_sampled_with_is_refused_by_its_value(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        SamplingParams(**wrong)
    assert "\n" not in str(refused.value)
    str(refused.value).encode()


def test_numbers_are_taken_as_pythons_own() -> None:
    """NumPy's too; a single stop is one text, ids of a bias may be written as JSON writes them."""
    params = SamplingParams(
        temperature=np.float32(0.5),
        top_k=np.int64(3),
        seed=2**200,
        stop="STOP",
        stop_token_ids=[7, 7, 2],
        logit_bias={"9": 1, 4: -2.5},
    )
    assert (params.temperature, params.top_k, params.seed) == (0.5, 3, 2**200)
    assert (type(params.temperature), type(params.top_k)) == (float, int)
    assert (params.stop, params.stop_token_ids) == (("STOP",), (2, 7))
    assert params.logit_bias == {4: -2.5, 9: 1.0}
    assert SamplingParams(stop=["a", "b", "a"]).stop == ("a", "b")
    assert hash(params) == hash(SamplingParams.from_dict({**vars_of(params)}))
    json.dumps(vars_of(params))


def vars_of(params: SamplingParams) -> dict[str, Any]:
    return {name: getattr(params, name) for name in params.__slots__}


ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary()
    | st.sampled_from(["\ud800", Decimal(1), object(), int, np.float64(0.5), np.nan, b"x", 1 + 2j]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.integers() | st.text(), inner, max_size=3),
    max_leaves=5,
)


@pytest.mark.parametrize("settings", [SamplingParams, SpeculationConfig, EngineLimits])
@given(st.data())
def test_settings_take_a_value_or_refuse_it_with_our_error(settings: Any, data: st.DataObject) -> None:
    """Anything for any field, and names that there are not."""
    names = st.sampled_from(settings.__slots__) | st.text()
    values = data.draw(st.dictionaries(names, ANYTHING, max_size=3))
    with contextlib.suppress(ConfigError):
        settings.from_dict(values)


def test_texts_and_nesting_are_looked_at_everywhere() -> None:
    """In keys too; neither depth nor length is a matter of Python's stack."""
    deep: Any = "\udfff"
    for _ in range(MOST_DEEP):
        deep = [deep]
    with pytest.raises(PromptError, match=r"x holds '\\udfff'"):
        check_plain("x", deep, PromptError)
    with pytest.raises(ConfigError, match="x is nested more than 100 levels deep"):
        check_plain("x", {"a": deep})
    with pytest.raises(ConfigError, match="half of a surrogate pair"):
        check_plain("x", {"a": [{"\ud800": 1}]})
    check_plain("x", {"a": ["😀", 3, None, {"b": ("ok",)}]})


# Through the engine


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """A cache in memory and a draft model, in float64; width is free, so that a busy machine drafts as well."""
    with SpeculationCache.open(None, embedder=HashEmbedder()) as cache:
        target, draft = tiny_causal_lm("llama", seed=21), tiny_causal_lm("llama", seed=22, num_hidden_layers=1)
        options = EngineOptions(draft_model=draft, cache=cache)
        free = CostCurve.through({1: 10.0, 32: 10.0})
        with closing(Engine(target, byte_tokenizer(), options, name="tiny", cost=free)) as running:
            yield running


PENALTIES: list[dict[str, Any]] = [
    {"frequency_penalty": 0.5},
    {"presence_penalty": 2},
    {"logit_bias": {65: 8}},
    {"repetition_penalty": 1.1, "frequency_penalty": 0.2, "presence_penalty": 0.3, "logit_bias": {66: 4}},
]


@pytest.mark.parametrize("sampled", [{}, {"temperature": 1.0, "seed": 4}], ids=["greedy", "seeded"])
@pytest.mark.parametrize("penalties", PENALTIES, ids=str)
def test_penalties_change_plain_answers_and_speculation_changes_none(
    engine: Engine, penalties: dict[str, Any], sampled: dict[str, Any]
) -> None:
    """With prompt, draft model and a memory that holds the answer, and the one without penalties."""
    params = SamplingParams(max_tokens=40, **sampled, **penalties)
    plain = SpeculationConfig(enabled=False, write_back=False)
    expected = engine.submit(PROMPT, params, speculation=plain).result().token_ids
    engine.submit(PROMPT, SamplingParams(max_tokens=40, **sampled), query="order").result()
    found = [engine.submit(PROMPT, params, query="order").result() for _ in range(3)]
    assert [one.token_ids for one in found] == [expected] * 3
    assert found[-1].stats.num_accepted_tokens > 0
    assert expected != engine.submit(PROMPT, SamplingParams(max_tokens=40, **sampled)).result().token_ids


def test_a_biased_token_is_chosen_or_never(engine: Engine) -> None:
    always = engine.submit(PROMPT, SamplingParams(max_tokens=5, logit_bias={65: 100})).result()
    assert always.token_ids == (65,) * 5
    first = engine.submit(PROMPT, SamplingParams(max_tokens=5)).result().token_ids[0]
    never = engine.submit(PROMPT, SamplingParams(max_tokens=30, logit_bias={first: -100})).result()
    assert first not in never.token_ids


def test_an_answer_ends_with_a_stop_token(engine: Engine) -> None:
    """Whoever proposed it: nothing behind it is kept, and a repeated request is answered alike."""
    whole = engine.submit(PROMPT, SamplingParams(max_tokens=20, temperature=1.0, seed=1)).result().token_ids
    stop = next(token for token in whole[3:] if whole.count(token) == 1)
    for _ in range(3):
        params = SamplingParams(max_tokens=20, temperature=1.0, seed=1, stop_token_ids=[stop])
        found = engine.submit(PROMPT, params, query="order").result()
        assert found.token_ids == whole[: whole.index(stop) + 1]
        assert found.finish_reason == "stop"


@pytest.mark.parametrize("name", ["logit_bias", "stop_token_ids"])
def test_ids_that_the_tokenizer_does_not_know_are_refused(engine: Engine, name: str) -> None:
    size = len(engine.tokenizer)
    value: Any = {size: 1} if name == "logit_bias" else [size]
    with pytest.raises(ConfigError, match=f"{name} names token id {size}, the tokenizer knows 0 to {size - 1}"):
        engine.submit(PROMPT, SamplingParams(**{name: value}))
