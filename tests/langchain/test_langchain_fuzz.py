"""Whatever is given to a constructor or a call is taken, or refused with an error of ours that says what was wrong.

The model is a real one, tiny, that follows a script. The names come from the signatures, and the values fit, or are any
others, as users of other chat models write them.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.request_bodies import ONLY_IN_CALLS, SETTINGS, look_up
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from langchain_core.caches import InMemoryCache
from langchain_core.globals import set_llm_cache
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from pydantic import BaseModel
from typing_extensions import TypedDict

from precedent.cache import SpeculationCache
from precedent.config import SpeculationConfig
from precedent.engine.engine import Engine
from precedent.errors import PrecedentError
from precedent.langchain import ChatPrecedent, PrecedentLLM
from precedent.langchain.arguments import FROM_LANGCHAIN, OF_THE_CALL
from precedent.langchain.exceptions import _BOTH
from precedent.langchain.synonyms import HARMLESS, HINTS, IDLE, OF_LOADING, SAME
from precedent.runtime.background import AtOnce
from precedent.text.templates import Templates
from precedent_testing.embedders import HashEmbedder
from precedent_testing.scripted_model import ScriptedTarget, fixed_cost, scripted_tokenizer
from precedent_testing.tiny_models import tiny_causal_lm

# Values


class Plan(BaseModel):
    """A plan."""

    steps: list[str]


class Step(TypedDict):
    """A step."""

    name: str


def nested(depth: int) -> Any:
    """A schema with so many schemas in it."""
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return {"title": "Nested", **schema}


ODD = st.sampled_from(
    [
        *("\ud800", "a\udfff", "", " ", "\x00", "{", "{a}", "json", "auto", "any", "none", "cpu", "greedy", "recal"),
        *(math.nan, math.inf, -1, 0, 1, 1.5, 2**70, -(2**70), 10**400, True, False, b"x", 1 + 2j, Decimal(1)),
        *(np.float32(0.5), np.int64(3), np.array([1, 2]), torch.tensor(1), torch.bfloat16, Path("x")),
        *(object(), int, print, Plan, Step, look_up, Plan(steps=[]), SpeculationConfig(), Templates(["a {b}"])),
        *([], {}, (), [[]], [None], {"type": "text"}, {"a": {1: "\ud800"}}, nested(40), nested(900)),
    ]
)
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | ODD,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=3) | st.integers() | st.none(), inner, max_size=3)
        | st.tuples(inner)
    ),
    max_leaves=6,
)


def mostly(usual: st.SearchStrategy[Any], other: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """One in eight is another (`one_of` would count the branches of both)."""
    return st.integers(0, 7).flatmap(lambda number: other if number == 7 else usual)


ALPHABET = st.characters(codec="utf-8")
FITTING_SCHEMAS = st.sampled_from([Plan, Step, Plan.model_json_schema(), {"type": "object"}, nested(3)])
SCHEMAS = mostly(FITTING_SCHEMAS, st.just(nested(900)) | ANYTHING)
FITTING_TOOLS = st.sampled_from(
    [
        *(look_up, Plan, Step),
        {"type": "function", "function": {"name": "f"}},
        {"name": "g", "schema": {"type": "object"}},
    ]
)
ODD_TOOLS = st.sampled_from(
    [{"type": "function", "function": {"name": "f", "description": "\ud800"}}, {"type": "web_search"}, len, nested(900)]
)
TOOLS = st.lists(mostly(FITTING_TOOLS, ODD_TOOLS | ANYTHING), max_size=2)
WHAT_FITS: dict[str, st.SearchStrategy[Any]] = {
    **{
        name: st.sampled_from([given[name] for given, _ in (*SETTINGS, *ONLY_IN_CALLS) if name in given])
        for name in {name for given, _ in (*SETTINGS, *ONLY_IN_CALLS) for name in given}
    },
    **dict.fromkeys(("tenant", "workflow_step", "device", "draft_model", "dtype"), st.text(ALPHABET, max_size=5)),
    "tools": TOOLS,
    "response_format": st.builds(lambda schema: {"type": "json_schema", "json_schema": {"schema": schema}}, SCHEMAS),
    "format": SCHEMAS,
    "model": st.just("fuzzed"),
    "stream": st.booleans(),
    **dict.fromkeys(("ls_structured_output_format", "structured_output_format", "learning"), st.none()),
    **dict.fromkeys(("cache", "bitwise", "cuda_graphs", "disable_streaming"), st.booleans()),
    "callbacks": st.just([]),
    "metadata": st.dictionaries(st.sampled_from(["workflow_step", "x"]), st.text(ALPHABET), max_size=2),
    "custom_get_token_ids": st.just(len),
    "output_version": st.sampled_from([None, "v0", "v1"]),
}
"""Values that are meant to be taken: of every setting those that a server's requests are tested with."""


def one_of(names: Iterable[str]) -> st.SearchStrategy[tuple[str, Any]]:
    """A name with a value that fits, where that is known, and now and then any other."""
    return st.one_of([st.tuples(st.just(name), mostly(WHAT_FITS.get(name, ANYTHING), ANYTHING)) for name in names])


OF_OTHERS = one_of((*SAME, *OF_LOADING, *HARMLESS, *HINTS, *IDLE))


def arguments(names: Iterable[str], most: int = 3) -> st.SearchStrategy[dict[str, Any]]:
    """Some of the named arguments, now and then one of another chat model, with values."""
    return st.lists(mostly(one_of(names), OF_OTHERS), min_size=1, max_size=most).map(dict)


FIELDS = {kind: arguments(kind.model_fields) for kind in (ChatPrecedent, PrecedentLLM)}
CALL = arguments((*OF_THE_CALL, *FROM_LANGCHAIN))
WITH_TOOLS = arguments([name for name in OF_THE_CALL if name != "tools"], 2)
KINDS = st.sampled_from([ChatPrecedent, PrecedentLLM])
TEXTS = st.text(st.characters(codec=None) | st.sampled_from("\ud800\udfff"), max_size=6)
MESSAGES = st.lists(
    st.builds(HumanMessage, TEXTS)
    | st.builds(SystemMessage, st.lists(st.builds(lambda text: {"type": "text", "text": text}, TEXTS), max_size=2))
    | st.builds(
        lambda text, args: AIMessage(text, tool_calls=[{"name": "look_up", "args": args, "id": "1"}]),
        TEXTS,
        st.dictionaries(TEXTS, ANYTHING, max_size=2),
    )
    | st.builds(lambda text, call: ToolMessage(text, tool_call_id=call), TEXTS, TEXTS)
    | st.builds(HumanMessage, st.lists(st.dictionaries(st.sampled_from(["type", "text", "x"]), TEXTS), max_size=2)),
    max_size=3,
)


# Examples

MOST_TOKENS = 4
"""Of an answer, unless the example says otherwise."""


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """A model, a cache, and an answer cache of LangChain's, whose keys are made of every argument."""
    tokenizer = scripted_tokenizer()
    weights = tiny_causal_lm(vocab_size=len(tokenizer), num_hidden_layers=1, max_position_embeddings=512)
    target = ScriptedTarget(weights).follow(tokenizer, lambda prompt: f"You said {prompt[-40:]}")
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
    optional = {"method": mostly(methods, ANYTHING), "strict": mostly(WHAT_FITS["strict"], ANYTHING)}
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
