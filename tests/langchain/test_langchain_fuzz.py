"""Whatever is given to a constructor or a call is taken, or refused with an error of ours that says what was wrong.

The model is a real one, tiny, that follows a script; `helpers.argument_strategies` says what is given.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from helpers.argument_strategies import (
    ANYTHING,
    CALL,
    FIELDS,
    KINDS,
    MESSAGES,
    SCHEMAS,
    TOOLS,
    WITH_TOOLS,
    mostly,
    values_of,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from langchain_core.caches import InMemoryCache
from langchain_core.globals import set_llm_cache

from precedent.cache import SpeculationCache
from precedent.engine.engine import Engine
from precedent.errors import PrecedentError
from precedent.langchain import ChatPrecedent
from precedent.langchain.exceptions import _BOTH
from precedent.runtime.background import AtOnce
from precedent_testing.embedders import HashEmbedder
from precedent_testing.scripted_model import ScriptedTarget, fixed_cost, scripted_tokenizer
from precedent_testing.tiny_models import tiny_causal_lm

MOST_TOKENS = 4
"""Of an answer, unless the example says otherwise."""


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """A model, a cache, and an answer cache of LangChain's, whose keys are made of every argument."""
    tokenizer = scripted_tokenizer()
    weights = tiny_causal_lm(vocab_size=len(tokenizer), num_hidden_layers=1, max_position_embeddings=512)
    target = ScriptedTarget(weights, tokenizer, lambda prompt: f"You said {prompt[-40:]}")
    set_llm_cache(InMemoryCache())
    with SpeculationCache.open(None, embedder=HashEmbedder()) as cache:
        running = Engine(target, tokenizer, name="fuzzed", cache=cache, cost=fixed_cost(), executor=AtOnce())
        with contextlib.closing(running), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # LangChain's own about profiles
            yield running
    set_llm_cache(None)


Way = Callable[[Any, dict[str, Any]], object]

WAYS: dict[str, Way] = {
    "invoke": lambda model, call: model.invoke("hi", **call),
    "stream": lambda model, call: list(model.stream("hi", **call)),
    "batch": lambda model, call: model.batch(["hi", "you"], **call),
    "bind": lambda model, call: model.bind(**call).invoke("hi"),
}


NOT_OURS = ("\n", "pydantic.dev", "Input should be", "validation error", "input_value")


def taken_or_refused(ask: Callable[[], object], *, in_a_call: bool = False) -> bool:
    """Whether it was taken. What is raised is an error of ours, in one line that can be printed.

    In a call it is LangChain's as well, where LangChain has one.
    """
    refused = None
    try:
        ask()
    except PrecedentError as error:
        refused = error
    if refused is not None:
        said = str(refused)
        said.encode()
        assert not [words for words in NOT_OURS if words in said], said
        assert not in_a_call or type(refused) not in _BOTH, said
    return refused is None


def a_constructor(engine: Engine, data: st.DataObject) -> bool:
    """On a running engine, then asked; and by a name, where nothing is loaded."""
    kind = data.draw(KINDS)
    fields = data.draw(FIELDS[kind])
    taken_or_refused(lambda: kind(**{"model": "nobody/nothing", **fields}))
    return taken_or_refused(lambda: kind.from_engine(engine, **{"max_tokens": MOST_TOKENS, **fields}).invoke("hi"))


def a_call(engine: Engine, data: st.DataObject) -> bool:
    model = data.draw(KINDS).from_engine(engine, max_tokens=MOST_TOKENS)
    way, call = data.draw(st.sampled_from(sorted(WAYS))), data.draw(CALL)
    return taken_or_refused(lambda: WAYS[way](model, call), in_a_call=True)


def tools(engine: Engine, data: st.DataObject) -> bool:
    model = ChatPrecedent.from_engine(engine, max_tokens=MOST_TOKENS)
    bound, call = data.draw(mostly(TOOLS, ANYTHING)), data.draw(st.just({}) | WITH_TOOLS)
    return taken_or_refused(lambda: model.bind_tools(bound, **call).invoke("hi"))


def structured_output(engine: Engine, data: st.DataObject) -> bool:
    model = ChatPrecedent.from_engine(engine, max_tokens=60)
    methods = st.sampled_from(["json_schema", "function_calling", "json_mode"])
    optional = {
        "method": mostly(methods, ANYTHING),
        "include_raw": values_of("include_raw", bool),
        "strict": values_of("strict", Any),
    }
    asked = data.draw(st.fixed_dictionaries({"schema": SCHEMAS}, optional=optional))
    call = data.draw(st.just({}) | WITH_TOOLS)
    return taken_or_refused(lambda: model.with_structured_output(**{**call, **asked}).invoke("hi"))


def messages(engine: Engine, data: st.DataObject) -> bool:
    model = ChatPrecedent.from_engine(engine, max_tokens=MOST_TOKENS)
    said = data.draw(MESSAGES | ANYTHING)
    return taken_or_refused(lambda: model.invoke(said), in_a_call=True)


def without_an_answer(engine: Engine, data: st.DataObject) -> bool:
    """What a chat model does beside answering: it counts tokens, and learns answers that were given before."""
    model, said, other = ChatPrecedent.from_engine(engine), data.draw(MESSAGES | ANYTHING), data.draw(ANYTHING)
    talks = data.draw(st.sampled_from([[said], said]))
    whose = data.draw(st.dictionaries(st.sampled_from(["tenant", "workflow_step"]), st.just("x") | ANYTHING))
    asks: list[Callable[[], object]] = [
        lambda: model.get_num_tokens_from_messages(said),
        lambda: model.warm(talks, **whose),
        lambda: data.draw(KINDS).from_engine(engine).get_num_tokens(other),
    ]
    return taken_or_refused(data.draw(st.sampled_from(asks)))


SITES = (a_constructor, a_call, tools, structured_output, messages, without_an_answer)


@pytest.mark.parametrize("site", SITES, ids=lambda site: site.__name__)
@pytest.mark.parametrize("number", [30, pytest.param(2000, marks=pytest.mark.stress)])
def test_arguments_are_taken_or_refused_with_our_error(engine: Engine, number: int, site: Any) -> None:
    counts = [0, 0]

    @settings(max_examples=number, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def examples(data: st.DataObject) -> None:
        counts[not site(engine, data)] += 1

    examples()
    assert min(counts) > 0 or number < 100, "some of both"
