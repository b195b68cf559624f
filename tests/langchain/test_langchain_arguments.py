"""Settings of model, call and run reach the engine; what cannot be is refused before anything runs.

The recorded refusals (`tests/golden`) hold the texts of most errors, and `test_langchain_fuzz` their kind.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from helpers.order_chat import TOKENIZER, look_up
from helpers.scripted_kinds import HALF, MODELS, asked, scripted, text_of
from langchain_core import exceptions as theirs
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.tools import tool
from pydantic import BaseModel, create_model

from precedent.config import SamplingParams, SpeculationConfig
from precedent.errors import ConfigError, ContextOverflowError, GenerationError, ModelLoadError, PromptError
from precedent.langchain import PrecedentLLM
from precedent.text.templates import Template, Templates
from precedent_testing.scripted_engine import ScriptedEngine, chatml_tokenizer

# Settings


def test_settings_of_the_model_the_call_and_the_run_reach_the_engine() -> None:
    model = scripted(temperature=0.5, top_k=9, seed=1, tenant="north", max_tokens=7, stop=["three", "x"])
    model.invoke("hi")
    call = {"temperature": 0.25, "seed": 2, "max_tokens": 5, "tenant": "south", "workflow_step": "refund"}
    model.invoke("hi", {"metadata": {"workflow_step": "north"}}, **call, speculation=False, stop=["two", "x"])
    model.invoke("hi", speculation={"max_nodes": 4}, drafters=["recall"], temperature=None)
    model.invoke("hi", {"metadata": {"lc_agent_name": "desk", "langgraph_node": "model"}}, drafters=[])
    first, second, third, fourth = model.engine.requests
    assert (first.sampling.temperature, first.sampling.top_k, first.sampling.seed) == (0.5, 9, 1)
    assert (first.tenant, first.workflow_step, first.speculation, first.sampling.max_tokens) == ("north", "", None, 7)
    assert (second.sampling.temperature, second.sampling.seed, second.sampling.max_tokens) == (0.25, 2, 5)
    assert (second.tenant, second.workflow_step, second.sampling.stop) == ("south", "refund", ("three", "x", "two"))
    assert second.speculation == SpeculationConfig(enabled=False)
    assert third.speculation == SpeculationConfig(max_nodes=4, drafters=("recall",))
    assert third.sampling.temperature == 0.5
    assert (fourth.speculation.drafters, fourth.workflow_step) == ((), "desk/model")
    own = scripted(metadata={"workflow_step": "west"})
    list(own.stream("hi"))
    assert asked(own).workflow_step == "west"


SAMPLED = (
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"),
    *("logit_bias", "seed", "max_tokens", "stop", "stop_token_ids", "logprobs", "top_logprobs"),
)


@MODELS
def test_none_is_the_default_in_the_constructor_and_the_models_own_in_a_call(kind: Any) -> None:
    own = {"temperature": 0.5, "max_tokens": 7, "frequency_penalty": 0.5, "logit_bias": {"5": 1}, "stop_token_ids": [9]}
    for name in SAMPLED:
        for fields in ({name: None}, own):
            model = scripted(kind, **fields)
            model.invoke("hi", **{name: None})
            assert asked(model).sampling == SamplingParams(**(own if fields is own else {}))
        assert getattr(kind(model="m", **{name: None}), name) == kind.model_fields[name].default


@MODELS
def test_one_text_is_one_stop_and_not_its_letters(kind: Any) -> None:
    model, own = scripted(kind, "STO one STOP two"), scripted(kind, "STO one STOP two", stop="STOP")
    for said in (
        text_of(model.invoke("hi", stop="STOP")),
        "".join(map(text_of, model.stream("hi", stop="STOP"))),
        text_of(model.batch(["hi"], stop="STOP")[0]),
        text_of(own.invoke("hi")),
    ):
        assert said == "STO one "
    assert asked(model).sampling.stop == asked(own).sampling.stop == ("STOP",)


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


# Known answers


@tool
def open_document(document_id: str) -> str:
    """Open a document."""
    return document_id


def test_a_prediction_reaches_the_engine_in_every_form() -> None:
    parts = [{"type": "text", "text": "Do"}, {"type": "text", "text": "ne."}]
    for prediction in ("Done.", {"content": "Done."}, {"type": "content", "content": parts}):
        model = scripted()
        model.invoke("Hello", prediction=prediction)
        list(model.bind_tools([open_document], prediction=prediction).stream("Hello"))
        model.invoke("Hello", prediction=None)
        assert [request.prediction for request in model.engine.requests] == ["Done.", "Done.", None]


def test_bound_tools_and_premade_responses_become_templates() -> None:
    premade = "Document {document_id} is open."
    model = scripted(templates=[premade])
    model.invoke("Hello")
    model.bind_tools([open_document]).invoke("Hello")
    model.bind_tools([open_document], templates=[]).invoke("Hello")
    model.bind_tools([open_document], tool_choice="none").invoke("Hello", templates=Templates(["Bye."]))
    texts = [[template.text for template in request.templates] for request in model.engine.requests]
    call = Template(("<tool_call>\n" + '{"name": "open_document", "arguments": {"document_id": "',)).text
    assert (texts[0], texts[1][0], texts[3]) == ([premade], premade, ["Bye."])
    assert texts[1][1].startswith(call)
    assert texts[2] == texts[1][1:]
    with pytest.raises(ConfigError, match="nothing between the holes"):
        scripted(templates=["Hello {a}{b}"])


# Refusals


@MODELS
async def test_a_bad_call_is_refused_on_every_way_as_langchains_error_too(kind: Any) -> None:
    model, call = scripted(kind), {"metadata": {"a": "b"}}
    said = r"a call takes no 'metadata': it belongs to the run: write config=\{"
    for ask in (
        lambda: model.invoke("hi", **call),
        lambda: list(model.stream("hi", **call)),
        lambda: model.batch(["hi"], **call),
        lambda: model.bind(**call).invoke("hi"),
    ):
        with pytest.raises(theirs.ModelInvalidRequestError, match=said) as refused:
            ask()
        assert isinstance(refused.value, ConfigError)
    for coroutine in (model.ainvoke("hi", **call), model.abatch(["hi"], **call)):
        with pytest.raises(theirs.ModelInvalidRequestError, match=said):
            await coroutine
    with pytest.raises(theirs.ModelInvalidRequestError, match=said):
        _ = [one async for one in model.astream("hi", **call)]
    assert model.engine.requests == []


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


# Texts that are none, and what is too deep


def telling(*messages: Any) -> Callable[[], Any]:
    return lambda: scripted().invoke([HumanMessage("x"), *messages])


def calling(**call: Any) -> Callable[[], Any]:
    return lambda: scripted().invoke("x", **call)


SURROGATES: dict[str, Callable[[], Any]] = {
    "a text": lambda: scripted().invoke(HALF),
    "a block": telling(HumanMessage([{"type": "text", "text": HALF}])),
    "an argument": telling(AIMessage("", tool_calls=[{"name": "f", "args": {"a": [HALF]}, "id": "1"}])),
    "a tool's description": lambda: scripted().bind_tools([{"title": "f", "description": HALF, "properties": {}}]),
    "a schema": lambda: scripted().with_structured_output({"title": "f", "properties": {HALF: {}}}),
    "a template": lambda: scripted(templates=[HALF]),
    "the run's metadata": calling(config={"metadata": {"workflow_step": HALF}}),
}


@pytest.mark.parametrize("where", SURROGATES)
def test_half_a_surrogate_pair_is_refused_wherever_it_stands(where: str) -> None:
    with pytest.raises((ConfigError, PromptError), match=r"holds '\\ud800', half of a surrogate pair"):
        SURROGATES[where]()


# LangChain's answer caches


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


# The chat template

QWEN = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think></think>' }}{% endif %}{% endif %}"
)


@pytest.mark.parametrize("told", [{"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning": False}], ids=str)
def test_what_a_template_is_told_counts_in_prompts_token_counts_and_keys(told: dict[str, Any]) -> None:
    model, plain = (scripted(tokenizer=chatml_tokenizer(chat_template=QWEN), **fields) for fields in (told, {}))
    model.invoke("hi")
    plain.invoke("hi", **told)
    assert asked(model).prompt == asked(plain).prompt
    assert asked(model).prompt.endswith("<think></think>")
    assert model.get_num_tokens_from_messages([HumanMessage("hi")]) == len(asked(model).prompt_ids)
    assert model._get_llm_string() != plain._get_llm_string() != plain._get_llm_string(**told)
    model.invoke("hi", reasoning=True)
    assert asked(model).prompt.endswith("assistant\n"), "the call has the last word"
    for wrong in ({"messages": []}, {"tools": []}, {"enable_thinkng": True}, 3, {1: 2}):
        with pytest.raises((ConfigError, PromptError)):
            plain.invoke("hi", chat_template_kwargs=wrong)
