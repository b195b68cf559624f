"""Settings of model, call and run reach the engine; what cannot be is refused before anything runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from helpers.order_chat import TOKENIZER, look_up
from helpers.scripted_kinds import HALF, MODELS, asked, scripted, text_of
from langchain_core import exceptions as theirs
from langchain_core.caches import InMemoryCache
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.runnables import RunnableLambda
from pydantic import BaseModel, create_model

from precedent.config import SamplingParams, SpeculationConfig
from precedent.errors import (
    ConfigError,
    ContextOverflowError,
    GenerationError,
    ModelLoadError,
    PrecedentError,
    PromptError,
    UnsupportedError,
)
from precedent.langchain import ChatPrecedent, PrecedentLLM
from precedent_testing.scripted_engine import ScriptedEngine, chatml_tokenizer

# Settings of the model and of the call


def test_settings_of_the_model_and_of_the_call_reach_the_engine() -> None:
    model = scripted(temperature=0.5, top_k=9, seed=1, tenant="north", max_tokens=7, stop=["three", "x"])
    model.invoke("hi")
    call = {"temperature": 0.25, "seed": 2, "max_tokens": 5, "tenant": "south", "workflow_step": "refund"}
    model.invoke("hi", **call, speculation=False, stop=["two", "x"])
    model.invoke("hi", speculation={"max_nodes": 4}, drafters=["recall"], temperature=None)
    model.invoke("hi", drafters=[])
    first, second, third, fourth = model.engine.requests
    assert (first.sampling.temperature, first.sampling.top_k, first.sampling.seed) == (0.5, 9, 1)
    assert (first.tenant, first.workflow_step, first.speculation, first.sampling.max_tokens) == ("north", "", None, 7)
    assert (second.sampling.temperature, second.sampling.seed, second.sampling.max_tokens) == (0.25, 2, 5)
    assert (second.tenant, second.workflow_step, second.sampling.stop) == ("south", "refund", ("three", "x", "two"))
    assert second.speculation == SpeculationConfig(enabled=False)
    assert third.speculation == SpeculationConfig(max_nodes=4, drafters=("recall",))
    assert third.sampling.temperature == 0.5
    assert fourth.speculation.drafters == ()


SAMPLED = (
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"),
    *("logit_bias", "seed", "max_tokens", "stop", "stop_token_ids", "logprobs", "top_logprobs"),
)


@MODELS
@pytest.mark.parametrize("name", SAMPLED)
def test_none_is_the_default_in_the_constructor_and_the_models_own_in_a_call(kind: Any, name: str) -> None:
    model = scripted(kind, **{name: None})
    model.invoke("hi", **{name: None})
    assert asked(model).sampling == SamplingParams()
    assert getattr(kind(model="m", **{name: None}), name) == kind.model_fields[name].default
    own = {"temperature": 0.5, "max_tokens": 7, "frequency_penalty": 0.5, "logit_bias": {5: 1.0}}
    model = scripted(kind, **own)
    model.invoke("hi", **{name: None})
    assert asked(model).sampling == SamplingParams(**own)


@MODELS
def test_penalties_and_biases_reach_the_engine(kind: Any) -> None:
    model = scripted(kind, frequency_penalty=0.5, logit_bias={"7": -100}, stop_token_ids=[9])
    model.invoke("hi", presence_penalty=-1)
    sampling = asked(model).sampling
    assert (sampling.frequency_penalty, sampling.presence_penalty) == (0.5, -1.0)
    assert (sampling.logit_bias, sampling.stop_token_ids) == ({7: -100.0}, (9,))


@MODELS
@pytest.mark.parametrize("way", ["invoke", "stream", "batch", "constructor", "synonym"])
def test_one_text_is_one_stop_and_not_its_letters(kind: Any, way: str) -> None:
    model = scripted(kind, "STO one STOP two", **({"stop": "STOP"} if way == "constructor" else {}))
    said = {
        "invoke": lambda: text_of(model.invoke("hi", stop="STOP")),
        "stream": lambda: "".join(map(text_of, model.stream("hi", stop="STOP"))),
        "batch": lambda: text_of(model.batch(["hi"], stop="STOP")[0]),
        "constructor": lambda: text_of(model.invoke("hi")),
        "synonym": lambda: text_of(model.invoke("hi", stop_sequences="STOP")),
    }[way]()
    assert said == "STO one "
    assert asked(model).sampling.stop == ("STOP",)


@MODELS
@pytest.mark.parametrize("stop", [[3], [""], "", {"a"}, b"x", ["\ud800"]])
def test_a_stop_that_is_no_text_is_refused_by_its_value(kind: Any, stop: Any) -> None:
    for ask in (lambda: scripted(kind).invoke("hi", stop=stop), lambda: scripted(kind, stop=stop)):
        with pytest.raises(ConfigError, match="stop"):
            ask()


def test_query_and_tools_reach_the_engine_in_every_form_of_tool() -> None:
    class change_address(BaseModel):
        """Change the address of an order."""

        number: str

    def refund(number: str) -> str:
        """Refund an order."""
        return number

    anthropic = {"name": "cancel", "description": "Cancel.", "input_schema": {"type": "object", "properties": {}}}
    openai = {"type": "function", "function": {"name": "close", "parameters": {}}}
    schema = {"title": "reopen", "description": "Reopen.", "type": "object", "properties": {}}
    model = scripted()
    bound = model.bind_tools(
        [look_up, change_address, refund, anthropic, openai, schema, change_address.model_json_schema()]
    )
    bound.invoke([SystemMessage("policy"), HumanMessage("where is order 1042?")])
    with_tools = asked(model)
    assert (with_tools.query, len(with_tools.tools)) == ("user: where is order ?", 32)
    names = ("look_up", "change_address", "refund", "cancel", "close", "reopen")
    shown = [f'{{"type": "function", "function": {{"name": "{name}"' for name in names]
    assert [with_tools.prompt.count(one) for one in shown] == [1] * len(names)
    assert sorted(shown, key=with_tools.prompt.index) == shown, "in the order in which they were bound"
    model.invoke("hi")
    assert asked(model).tools == ""
    other = create_model("change_address", __doc__="Another.", number=(int, ...))
    with pytest.raises(PromptError, match="tool 'change_address' is bound twice"):
        model.bind_tools([change_address, other])


# Settings of the run


@pytest.mark.parametrize(
    "way", ["invoke", "stream", "ainvoke", "astream", "batch", "events", "v3", "stream=True", "nested"]
)
async def test_the_runs_metadata_names_the_step_on_every_way(way: str) -> None:
    model = scripted()
    config: Any = {"metadata": {"lc_agent_name": "desk", "langgraph_node": "model"}}
    if way == "invoke":
        model.invoke("hi", config)
    elif way == "stream":
        list(model.stream("hi", config))
    elif way == "ainvoke":
        await model.ainvoke("hi", config)
    elif way == "astream":
        _ = [chunk async for chunk in model.astream("hi", config)]
    elif way == "batch":
        model.batch(["hi"], config)
    elif way == "events":
        _ = [event async for event in model.astream_events("hi", config, version="v2")]
    elif way == "v3":
        assert model.stream_events("hi", config, version="v3").output.content
    elif way == "stream=True":
        model.invoke("hi", config, stream=True)
    else:
        RunnableLambda(model.invoke).invoke("hi", config)
    (request,) = model.engine.requests
    assert request.workflow_step == "desk/model"


def test_the_models_own_metadata_counts_and_the_call_wins() -> None:
    model = scripted(metadata={"workflow_step": "west"})
    list(model.stream("hi"))
    model.invoke("hi")
    model.invoke("hi", {"metadata": {"workflow_step": "north"}}, workflow_step="south")
    assert [request.workflow_step for request in model.engine.requests] == ["west", "west", "south"]


# Refusals


async def every_way(model: Any, error: type[Exception], said: str, /, **call: Any) -> None:
    """Each way of a call raises, and nothing runs."""
    for ask in (
        lambda: model.invoke("hi", **call),
        lambda: list(model.stream("hi", **call)),
        lambda: model.batch(["hi"], **call),
        lambda: model.bind(**call).invoke("hi"),
    ):
        with pytest.raises(error, match=said):
            ask()
    for coroutine in (model.ainvoke("hi", **call), model.abatch(["hi"], **call)):
        with pytest.raises(error, match=said):
            await coroutine
    with pytest.raises(error, match=said):
        _ = [one async for one in model.astream("hi", **call)]
    assert model.engine.requests == []


@MODELS
@pytest.mark.parametrize("name", ["metadata", "tags", "callbacks", "run_name", "run_id"])
async def test_what_belongs_to_the_run_is_refused_in_a_call_with_where_it_goes(kind: Any, name: str) -> None:
    said = rf"a call takes no '{name}': it belongs to the run: write config=\{{\"{name}\": …\}}"
    await every_way(scripted(kind), ConfigError, said, **{name: {"a": "b"}})
    with pytest.raises(ConfigError, match=said):
        scripted(kind).invoke("hi", **{name: None})


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"temperature": "warm"}, ConfigError, "temperature='warm' must be 0"),
    ({"stop": [3]}, ConfigError, r"stop=\[3\]"),
    ({"n": 2}, UnsupportedError, "n=2 is not supported"),
    ({"model": "other"}, UnsupportedError, "model='other' is not loaded, and a call loads nothing"),
]


@MODELS
@pytest.mark.parametrize(("call", "error", "said"), REFUSED, ids=str)
async def test_a_bad_call_is_refused_as_langchains_error_too(kind: Any, call: Any, error: Any, said: str) -> None:
    await every_way(scripted(kind), error, said, **call)
    await every_way(scripted(kind), theirs.ModelInvalidRequestError, said, **call)


@MODELS
async def test_errors_of_prompts_runs_and_engines_are_langchains_as_well(kind: Any, tmp_path: Any) -> None:
    short = kind.from_engine(ScriptedEngine(TOKENIZER, ["x"], context_length=5))
    with pytest.raises(theirs.ContextOverflowError) as overflow:
        list(short.stream("a long question"))
    assert isinstance(overflow.value, ContextOverflowError)
    with pytest.raises(theirs.ContextOverflowError):
        await short.ainvoke("a long question")
    for ask, ours in (
        (lambda: scripted(kind).invoke("hi", {"metadata": {"workflow_step": 3}}), ConfigError),
        (lambda: scripted(kind).invoke(HALF), PromptError),
    ):
        with pytest.raises(theirs.ModelInvalidRequestError) as refused:
            ask()
        assert isinstance(refused.value, ours)
    with pytest.raises(theirs.ModelNotFoundError) as missing:
        kind(model=str(tmp_path / "nothing")).invoke("hi")
    assert isinstance(missing.value, ModelLoadError)
    failing = kind.from_engine(ScriptedEngine(TOKENIZER, []))
    with pytest.raises(GenerationError, match="0 answers"):
        failing.invoke("hi")
    with pytest.raises(GenerationError, match="0 answers"):
        await failing.ainvoke("hi")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, "model is missing: give a Hugging Face id or a folder as model=…"),
        ({"model": "m", "max_tokens": 1.5}, "max_tokens=1.5"),
        ({"model": "m", "logit_bias": {"a": 1}}, "logit_bias="),
        ({"model": "m", "bitwise": "yes"}, "bitwise='yes' must be True or False"),
        ({"model": "m", "chat_template_kwargs": 3}, "chat_template_kwargs=3 must be a dict"),
        ({"model": "m", "tenant": "x" * 201}, "give at most 200"),
    ],
)
def test_a_wrong_field_is_one_line_before_anything_is_loaded(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        ChatPrecedent(**fields)
    assert "\n" not in str(refused.value)


# Texts that are none, and what is too deep


def telling(*messages: Any) -> Callable[[], Any]:
    return lambda: scripted().invoke([HumanMessage("x"), *messages])


def calling(**call: Any) -> Callable[[], Any]:
    return lambda: scripted().invoke("x", **call)


SURROGATES: dict[str, Callable[[], Any]] = {
    "a text": lambda: scripted().invoke(HALF),
    "a text to continue": lambda: scripted(PrecedentLLM).invoke(HALF),
    "a block": telling(HumanMessage([{"type": "text", "text": HALF}])),
    "an argument": telling(AIMessage("", tool_calls=[{"name": "f", "args": {"a": [HALF]}, "id": "1"}])),
    "an id": telling(ToolMessage("x", tool_call_id=HALF)),
    "a tool's description": lambda: scripted().bind_tools([{"title": "f", "description": HALF, "properties": {}}]),
    "a schema": lambda: scripted().with_structured_output({"title": "f", "properties": {HALF: {}}}),
    "a prediction": calling(prediction=HALF),
    "a template": lambda: scripted(templates=[HALF]),
    "a template's variable": calling(chat_template_kwargs={"a": HALF}),
    "the run's metadata": calling(config={"metadata": {"workflow_step": HALF}}),
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
    for number in (60, 5000):
        with pytest.raises((ConfigError, PromptError), match="is nested more than 100 levels deep"):
            ask(deep(number))
    ask(deep(40))


def test_a_message_too_deep_to_walk_is_refused_before_langchain_walks_through_it() -> None:
    """Its caches write every message down for their key."""
    call = {"name": "f", "args": {"a": deep(900)}, "id": "1"}
    with pytest.raises(PromptError, match="message 2 is nested more than 100 levels deep"):
        scripted(cache=InMemoryCache()).invoke([HumanMessage("x"), AIMessage("", tool_calls=[call])])


@pytest.mark.parametrize("given", [3, None, [3], [("human",)], [{"role": "x", "content": "y"}], {"a": 1}])
@MODELS
def test_an_input_that_is_no_message_is_a_prompt_error(kind: Any, given: Any) -> None:
    with pytest.raises(PromptError):
        scripted(kind).invoke(given)


# What LangChain asks about the model


def test_parameters_for_traces() -> None:
    model = ChatPrecedent(model="m", temperature=0.5, max_tokens=9, stop=["a"])
    params = model._get_ls_params(stop=["b"])
    assert (params["ls_provider"], params["ls_model_name"], params["ls_stop"]) == ("precedent", "m", ["a", "b"])
    assert (params["ls_temperature"], params["ls_max_tokens"]) == (0.5, 9)
    assert ChatPrecedent(model_name="m").model == model.model_name == "m"


@MODELS
@pytest.mark.parametrize(
    "other",
    [
        *({"model": "n"}, {"seed": 1}, {"dtype": "float32"}, {"temperature": 1.0}, {"stop": ["x"]}, {"tenant": "t"}),
        *({"model_kwargs": {"revision": "v2"}}, {"logprobs": True}, {"presence_penalty": 1}, {"cuda_graphs": True}),
        *({"templates": ["Bye {x}."]}, {"strict_tools": False}, {"reasoning": False}, {"media": "placeholder"}),
    ],
    ids=str,
)
def test_an_answer_cache_keeps_different_models_apart(kind: Any, other: dict[str, Any]) -> None:
    if kind is PrecedentLLM and other.keys() & {"strict_tools", "reasoning", "media"}:
        return
    one, same, two = (kind(**{"model": "m", **changes})._identifying_params for changes in ({}, {}, other))
    assert one == same != two


def test_an_answer_cache_does_not_mix_up_two_engines_of_one_name() -> None:
    cache = InMemoryCache()
    models = [ChatPrecedent.from_engine(ScriptedEngine(TOKENIZER, [text]), cache=cache) for text in ("one", "two")]
    assert [model.invoke("hi").content for model in models] == ["one", "two"]
    assert models[0].invoke("hi").content == "one", "this one comes from the cache: the script is used up"


# The chat template

QWEN = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think></think>' }}{% endif %}{% endif %}"
)


def thinking(**fields: Any) -> Any:
    return scripted(tokenizer=chatml_tokenizer(chat_template=QWEN), **fields)


@pytest.mark.parametrize("told", [{"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning": False}], ids=str)
def test_what_a_template_is_told_counts_in_prompts_token_counts_and_keys(told: dict[str, Any]) -> None:
    model, plain = thinking(**told), thinking()
    model.invoke("hi")
    plain.invoke("hi", **told)
    assert asked(model).prompt == asked(plain).prompt
    assert asked(model).prompt.endswith("<think></think>")
    assert model.get_num_tokens_from_messages([HumanMessage("hi")]) == len(asked(model).prompt_ids)
    assert model._get_llm_string() != plain._get_llm_string() != plain._get_llm_string(**told)
    model.invoke("hi", reasoning=True)
    assert asked(model).prompt.endswith("assistant\n"), "the call has the last word"


@pytest.mark.parametrize("wrong", [{"messages": []}, {"tools": []}, {"enable_thinkng": True}, 3, {1: 2}], ids=str)
def test_a_template_is_not_told_what_it_cannot_be(wrong: Any) -> None:
    with pytest.raises(PrecedentError):
        thinking().invoke("hi", chat_template_kwargs=wrong)
