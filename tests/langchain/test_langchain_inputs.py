"""Stop strings, numbers, texts and messages that a model is given: read as they were meant, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from helpers.scripted_kinds import HALF, MODELS, asked, scripted, text_of
from langchain_core.caches import InMemoryCache
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage

from precedent.config import SamplingParams
from precedent.errors import ConfigError, PromptError
from precedent.langchain import ChatPrecedent, PrecedentLLM

# Stop strings


WAYS: dict[str, Callable[[Any], Any]] = {
    "a call": lambda kind: text_of(scripted(kind).invoke("hi", stop="STOP")),
    "bound": lambda kind: text_of(scripted(kind).bind(stop="STOP").invoke("hi")),
    "a stream": lambda kind: "".join(map(text_of, scripted(kind).stream("hi", stop="STOP"))),
    "a batch": lambda kind: text_of(scripted(kind).batch(["hi"], stop="STOP")[0]),
    "the constructor": lambda kind: text_of(scripted(kind, stop="STOP").invoke("hi")),
    "a synonym": lambda kind: text_of(scripted(kind).invoke("hi", stop_sequences="STOP")),
}


@MODELS
@pytest.mark.parametrize("way", WAYS)
def test_one_text_is_one_stop_and_not_its_letters(kind: Any, way: str) -> None:
    assert WAYS[way](kind) == "one "
    assert text_of(scripted(kind, "S T O P").invoke("hi", stop="STOP")) == "one STOP two" or way


@MODELS
def test_letters_of_a_stop_do_not_stop(kind: Any) -> None:
    model = scripted(kind, answer="STO, not all of it")
    assert text_of(model.invoke("hi", stop="STOP")) == "STO, not all of it"
    assert asked(model).sampling.stop == ("STOP",)
    assert model._get_ls_params(stop="STOP")["ls_stop"] in (["STOP"], "STOP")


@MODELS
@pytest.mark.parametrize("stop", [3, [3], [""], "", {"a"}, b"x", ["\ud800"]])
def test_a_stop_that_is_no_text_is_refused_by_its_value(kind: Any, stop: Any) -> None:
    for ask in (lambda: scripted(kind).invoke("hi", stop=stop), lambda: scripted(kind, stop=stop)):
        with pytest.raises(ConfigError, match="stop"):
            ask()


# None is the default


DEFAULTS = SamplingParams()
SAMPLED = (
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"),
    *("logit_bias", "seed", "max_tokens", "stop", "stop_token_ids", "logprobs", "top_logprobs"),
)


@MODELS
@pytest.mark.parametrize("name", SAMPLED)
def test_none_is_the_default_in_the_constructor_and_the_models_own_in_a_call(kind: Any, name: str) -> None:
    model = scripted(kind, **{name: None})
    model.invoke("hi", **{name: None})
    assert asked(model).sampling == DEFAULTS
    assert getattr(kind(model="m", **{name: None}), name) == kind.model_fields[name].default
    own = scripted(kind, temperature=0.5, max_tokens=7, frequency_penalty=0.5, logit_bias={5: 1})
    own.invoke("hi", **{name: None})
    sampling = asked(own).sampling
    assert (sampling.temperature, sampling.max_tokens, sampling.frequency_penalty) == (0.5, 7, 0.5)
    assert sampling.logit_bias == {5: 1.0}


@MODELS
def test_penalties_and_biases_reach_the_engine(kind: Any) -> None:
    model = scripted(kind, frequency_penalty=0.5, logit_bias={"7": -100}, stop_token_ids=[9])
    model.invoke("hi", presence_penalty=-1)
    sampling = asked(model).sampling
    assert (sampling.frequency_penalty, sampling.presence_penalty) == (0.5, -1.0)
    assert (sampling.logit_bias, sampling.stop_token_ids) == ({7: -100.0}, (9,))
    assert scripted(kind, presence_penalty=1)._identifying_params != scripted(kind)._identifying_params


@MODELS
@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("max_tokens", value) for value in (1.5, "x", True, 0, [])],
        *[("seed", value) for value in ("x", 1.5, True)],
        *[("top_k", value) for value in (True, -2, 2.5)],
        *[("temperature", value) for value in (float("nan"), float("inf"), "x", True)],
        *[("presence_penalty", value) for value in (3, "x")],
        ("logit_bias", {"a": 1}),
        ("top_p", 2),
    ],
    ids=str,
)
def test_a_value_of_the_wrong_kind_is_refused_by_its_name(kind: Any, name: str, value: Any) -> None:
    for ask in (lambda: kind(model="m", **{name: value}), lambda: scripted(kind).invoke("hi", **{name: value})):
        with pytest.raises(ConfigError, match=f"^{name}="):
            ask()


# Texts that are none


SURROGATES: dict[str, Callable[[], Any]] = {
    "a text": lambda: scripted().invoke(HALF),
    "a text to continue": lambda: scripted(PrecedentLLM).invoke(HALF),
    "a message": lambda: scripted().invoke([SystemMessage("x"), HumanMessage(HALF)]),
    "a block": lambda: scripted().invoke([HumanMessage([{"type": "text", "text": HALF}])]),
    "a name": lambda: scripted().invoke([HumanMessage("x", name=HALF)]),
    "an argument": lambda: scripted().invoke(
        [HumanMessage("x"), AIMessage("", tool_calls=[{"name": "f", "args": {"a": [HALF]}, "id": "1"}])]
    ),
    "a tool's result": lambda: scripted().invoke([HumanMessage("x"), ToolMessage(HALF, tool_call_id="1")]),
    "an id": lambda: scripted().invoke([HumanMessage("x"), ToolMessage("x", tool_call_id=HALF)]),
    "a thought": lambda: scripted().invoke(
        [HumanMessage("x"), AIMessage("x", additional_kwargs={"reasoning_content": HALF})]
    ),
    "a tool's name": lambda: scripted().bind_tools([{"type": "function", "function": {"name": HALF}}]),
    "a tool's description": lambda: scripted().bind_tools([{"title": "f", "description": HALF, "properties": {}}]),
    "a schema": lambda: scripted().with_structured_output({"title": "f", "properties": {HALF: {}}}),
    "a response format": lambda: scripted().invoke("x", response_format={"name": "f", "schema": {"title": HALF}}),
    "a prediction": lambda: scripted().invoke("x", prediction=HALF),
    "a template": lambda: scripted(templates=[HALF]),
    "a template of a call": lambda: scripted().invoke("x", templates=[HALF]),
    "a tenant": lambda: scripted().invoke("x", tenant=HALF),
    "a workflow step": lambda: scripted().invoke("x", workflow_step=HALF),
    "a model's name": lambda: ChatPrecedent(model=HALF),
    "a template's variable": lambda: scripted().invoke("x", chat_template_kwargs={"a": HALF}),
    "the run's metadata": lambda: scripted().invoke("x", {"metadata": {"workflow_step": HALF}}),
}


@pytest.mark.parametrize("where", SURROGATES)
def test_half_a_surrogate_pair_is_refused_wherever_it_stands(where: str) -> None:
    with pytest.raises((ConfigError, PromptError), match=r"holds '\\ud800', half of a surrogate pair"):
        SURROGATES[where]()


def deep(number: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(number):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return {"title": "Deep", **schema}


@pytest.mark.parametrize(
    "ask",
    [
        lambda schema: scripted().with_structured_output(schema).invoke("hi"),
        lambda schema: scripted().with_structured_output(schema, method="function_calling").invoke("hi"),
        lambda schema: scripted().bind_tools([schema]).invoke("hi"),
        lambda schema: scripted().invoke("hi", response_format={"name": "deep", "schema": schema}),
    ],
    ids=["json_schema", "function_calling", "a tool", "response_format"],
)
def test_a_schema_too_deep_to_walk_is_refused_and_one_that_is_not_works(ask: Any) -> None:
    for number in (60, 900, 5000):
        with pytest.raises((ConfigError, PromptError), match="is nested more than 100 levels deep"):
            ask(deep(number))
    ask(deep(40))


def test_a_message_too_deep_to_walk_is_refused_before_langchain_walks_through_it() -> None:
    """Its caches write every message down for their key."""
    model = scripted(cache=InMemoryCache())
    call = {"name": "f", "args": {"a": deep(900)}, "id": "1"}
    with pytest.raises(PromptError, match="message 2 is nested more than 100 levels deep"):
        model.invoke([HumanMessage("x"), AIMessage("", tool_calls=[call])])


@pytest.mark.parametrize("given", [3, None, [3], [("human",)], [{"role": "x", "content": "y"}], {"a": 1}])
@MODELS
def test_an_input_that_is_no_message_is_a_prompt_error(kind: Any, given: Any) -> None:
    with pytest.raises(PromptError):
        scripted(kind).invoke(given)


@pytest.mark.parametrize(
    "content",
    [
        [{"type": "tool_use", "id": "1", "input": {}}],
        [{"type": "tool_use", "id": "1", "name": "f", "input": [1]}],
    ],
)
def test_a_tool_use_that_is_none_is_a_prompt_error(content: Any) -> None:
    with pytest.raises(
        PromptError, match="message 2 holds a tool call without a name, or with arguments that are not a dict"
    ):
        scripted().invoke([HumanMessage("x"), AIMessage(content)])


@MODELS
def test_tokens_are_counted_of_texts_and_of_messages_in_any_form(kind: Any) -> None:
    model = scripted(kind)
    assert model.get_num_tokens("hi") == len(model.get_token_ids("hi")) > 0
    for given, said in ((3, "3 is no text"), (None, "None is no text"), (HALF, r"the text holds '\\ud800'")):
        with pytest.raises(PromptError, match=said):
            model.get_token_ids(given)
    assert scripted(kind, custom_get_token_ids=lambda text: [7] * 3).get_num_tokens("hi") == 3


def test_messages_are_counted_in_every_form_in_which_they_are_answered() -> None:
    model = scripted()
    model.invoke("hi")
    for given in ("hi", ["hi"], [HumanMessage("hi")], [("user", "hi")], [{"role": "user", "content": "hi"}]):
        assert model.get_num_tokens_from_messages(given) == len(asked(model).prompt_ids)
    for given in ([3], 3, None, [("nobody", "hi")], [HumanMessage(HALF)]):
        with pytest.raises(PromptError):
            model.get_num_tokens_from_messages(given)
