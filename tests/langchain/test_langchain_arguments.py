"""Settings of model, call and run reach the engine; what cannot be is refused before anything runs.

The recorded refusals (`tests/golden`) hold the texts of most errors, and `test_langchain_fuzz` their kind.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.command_line import precedent
from helpers.scripted_models import HALF, MODELS, TOKENIZER, asked, look_up, scripted, text_of
from langchain_core import exceptions as theirs
from langchain_core.caches import InMemoryCache
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.tools import tool
from pydantic import BaseModel
from transformers import GenerationConfig

from precedent import Engine
from precedent.cache import SpeculationCache
from precedent.config import SamplingParams, SpeculationConfig
from precedent.errors import (
    ConfigError,
    ContextOverflowError,
    GenerationError,
    ModelLoadError,
    PromptError,
    UnsupportedError,
)
from precedent.langchain import ChatPrecedent, PrecedentLLM
from precedent.langchain.arguments import FOR_CHAT, OF_THE_CALL
from precedent.langchain.fields import OF_THE_ENGINE
from precedent.langchain.synonyms import HARMLESS, HINTS, IDLE, OF_LOADING, SAME
from precedent.text.templates import Template, Templates
from precedent_testing.scripted_engine import ScriptedEngine, chatml_tokenizer
from precedent_testing.tiny_gguf import write_gguf
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm

TEMPLATED = chatml_tokenizer(
    chat_template="{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think></think>' }}{% endif %}{% endif %}"
)
"""Of a model that thinks, as Qwen 3."""


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


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"top_logprobs": 3}, "top_logprobs=3 needs logprobs=True"),
        ({"logprobs": 5}, "logprobs=5 must be True or False"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs=21 must be a number of tokens, at most 20"),
        ({"learning": 1}, "learning=1 must be PendingCompletions"),
        ({"model": 3}, "model=3 must be the name of a loaded model"),
        ({"ls_structured_output_format": 3}, "ls_structured_output_format=3 is LangChain's own: leave it out"),
    ],
    ids=str,
)
def test_a_value_of_another_kind_is_refused_by_its_name(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        calling(**given)()


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


def test_an_answer_cache_does_not_mix_up_two_engines_of_one_name() -> None:
    cache = InMemoryCache()
    models = [ChatPrecedent.from_engine(ScriptedEngine(TOKENIZER, [text]), cache=cache) for text in ("one", "two")]
    assert [model.invoke("hi").content for model in (*models, models[0])] == ["one", "two", "one"]


# The chat template


@pytest.mark.parametrize("told", [{"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning": False}], ids=str)
def test_what_a_template_is_told_counts_in_prompts_token_counts_and_keys(told: dict[str, Any]) -> None:
    model, plain = (scripted(tokenizer=TEMPLATED, **fields) for fields in (told, {}))
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


# The tables of what users of other chat models write: every entry works, or says exactly what to write

FIELDS = set(ChatPrecedent.model_fields)
SAMPLES: dict[str, Any] = {
    "model": "scripted",
    "draft_model": "first-layers:2",
    "dtype": "float32",
    "max_tokens": 7,
    "stop": ["STOP"],
    "reasoning": False,
    "response_format": {"type": "json_object"},
}


def refused(said: str, error: type[Exception] = ConfigError, /, **arguments: Any) -> None:
    """In the constructor and in a call."""
    for ask in (lambda: ChatPrecedent(**{"model": "m", **arguments}), lambda: scripted().invoke("hi", **arguments)):
        with pytest.raises(error, match=said):
            ask()


@pytest.mark.parametrize("name", SAME)
def test_a_synonym_does_what_our_name_does_or_belongs_elsewhere(name: str) -> None:
    ours, value = SAME[name], SAMPLES[SAME[name]]
    if ours in FIELDS:
        assert (
            getattr(ChatPrecedent(**{"model": "m", name: value} if ours != "model" else {name: value}), ours) == value
        )
        with pytest.raises(ConfigError, match=f"{ours}= and {name}= mean the same: give one of the two"):
            ChatPrecedent(**{"model": "m", ours: value, name: value})
    else:
        with pytest.raises(ConfigError, match=rf"takes no '{name}': it belongs in a call: write bind\({name}=…\)"):
            ChatPrecedent(**{"model": "m", name: value})
    if ours in OF_THE_ENGINE:
        with pytest.raises(ConfigError, match=rf"takes no '{name}': it belongs in the constructor: .*{name}=…"):
            scripted().invoke("hi", **{name: value})
        return
    results = []
    for written in (ours, name):
        model = scripted(tokenizer=TEMPLATED)
        model.invoke("hi", **{written: "json" if written == "format" else value})
        results.append((asked(model).sampling, asked(model).prompt, asked(model).grammar))
    assert results[0] == results[1]


def test_values_are_taken_in_the_forms_of_other_chat_models() -> None:
    model = scripted()
    model.invoke("hi", format={"type": "object", "properties": {"a": {"type": "integer"}}})
    assert "integer" in str(asked(model).grammar)
    model.invoke("hi", format="")
    assert asked(model).grammar is None
    assert ChatPrecedent(model="m", reasoning={"effort": "low"}).reasoning == "low"
    made = ChatPrecedent(model=Path("folder"), device=torch.device("cuda", 1), torch_dtype=torch.bfloat16)
    assert (made.model, made.device, made.dtype) == ("folder", "cuda:1", "bfloat16")
    assert [ChatPrecedent(model="m", device=number).device for number in (0, -1)] == ["cuda:0", "cpu"]
    assert [ChatPrecedent(model="m", dtype=name).dtype for name in ("half", "float")] == ["float16", "float32"]


NUMBERS: list[tuple[str, Any, str, Any]] = [
    ("temperature", " 7e-1 ", "temperature", 0.7),
    *((name, "0.9", name, 0.9) for name in ("top_p", "min_p", "repetition_penalty")),
    *((name, "-1", name, -1.0) for name in ("frequency_penalty", "presence_penalty")),
    ("top_k", "40", "top_k", 40),
    ("top_k", 40.0, "top_k", 40),
    ("top_k", "-1", "top_k", 0),
    ("seed", "12345678901234567890", "seed", 12345678901234567890),
    ("seed", -1, "seed", None),
    ("seed", "-1", "seed", None),
    ("num_predict", "7", "max_tokens", 7),
    ("max_new_tokens", 7.0, "max_tokens", 7),
]


@pytest.mark.parametrize(("name", "given", "ours", "meant"), NUMBERS, ids=str)
def test_numbers_mean_what_they_mean_elsewhere(name: str, given: Any, ours: str, meant: Any) -> None:
    for fields, call in (({name: given}, {}), ({"seed": 3}, {name: given})):
        model = scripted(**fields)
        model.invoke("hi", **call)
        assert getattr(asked(model).sampling, ours) == meant


def test_values_that_are_none_and_answers_without_a_limit_are_refused_by_name() -> None:
    for name in (*(name for name, ours in SAME.items() if ours == "max_tokens"), "max_tokens"):
        for value in (-1, -2, "-1"):
            refused("without a limit: write max_tokens=", **{name: value})
    for name in ("temperature", "top_p", "top_k", "seed", "num_predict"):
        for value in ("warm", "", "nan", "0.5.1", "inf", [1], True):
            refused(f"^{SAME.get(name, name)}=", **{name: value})


# Where names belong


def of_the_constructor(kind: Any = ChatPrecedent, /, **arguments: Any) -> str:
    """What the constructor says of arguments that it refuses."""
    with pytest.raises(ConfigError) as refusal:
        kind(model="m", **arguments)
    return str(refusal.value)


def of_a_call(error: type[Exception] = ConfigError, kind: Any = ChatPrecedent, /, **arguments: Any) -> str:
    engine: Any = ScriptedEngine(chatml_tokenizer(), ["x"])
    with pytest.raises(error) as refusal:
        kind.from_engine(engine).invoke("hi", **arguments)
    return str(refusal.value)


def test_arguments_of_from_pretrained_go_into_model_kwargs() -> None:
    for name in OF_LOADING:
        assert PrecedentLLM(model="m", model_kwargs={"a": 1}, **{name: "x"}).model_kwargs == {"a": 1, name: "x"}
        assert ChatPrecedent(model="m", **{name: None}).model_kwargs is None
        said = of_the_constructor(model_kwargs={name: 1}, **{name: "x"})
        assert said == f"{name}= is also in model_kwargs=: give it once"
        with pytest.raises(ConfigError, match="model_kwargs cannot be set for a model object"):
            ChatPrecedent.from_model(object(), object(), **{name: "x"})
    for name in ("temperature", "stop", "tools"):
        said = of_the_constructor(model_kwargs={name: 1})
        assert f"model_kwargs says how weights are loaded: write {name}=" in said


def test_a_name_is_refused_where_it_does_not_belong_with_the_place_where_it_does() -> None:
    for name in (*OF_THE_ENGINE, *OF_LOADING, "streaming"):
        assert f"a call takes no '{name}': it belongs in the constructor" in of_a_call(**{name: "x"})
    for name in sorted(set(OF_THE_CALL) - FIELDS):
        said = of_the_constructor(**{name: "x"})
        assert re.search(rf"ChatPrecedent takes no '{name}': (it belongs in a call|write bind_tools)", said)
    for name in FOR_CHAT:
        said = of_the_constructor(PrecedentLLM, **{name: True})
        assert re.search(f"PrecedentLLM takes no '{name}': .* use ChatPrecedent", said)
        if name in OF_THE_CALL:
            said = of_a_call(UnsupportedError, PrecedentLLM, **{name: True})
            assert f"{name} cannot be given to a text completion" in said
    for name in IDLE:  # LangChain gives them to every chat model
        ChatPrecedent(model="m", **{name: "x"})
        assert f"a call takes no '{name}': it means nothing" in of_a_call(**{name: "x"})


@pytest.mark.parametrize("name", HARMLESS)
def test_what_asks_for_nothing_is_taken_and_everything_else_of_it_refused(name: str) -> None:
    for value in (None, *HARMLESS[name]):
        ChatPrecedent(model="m", **{name: value})
        model = scripted()
        model.invoke("hi", **{name: value})
        assert asked(model).sampling == SamplingParams()
    refused(re.escape(f"{name}=7 is not supported: {HINTS[name]}"), UnsupportedError, **{name: 7})


def test_a_hint_says_what_to_write_and_names_only_what_there_is() -> None:
    assert HINTS.keys() >= {"n_batch", "use_mmap", "lora_path", "grammar", "system", "headers"}
    known = {*FIELDS, *OF_THE_CALL, *OF_LOADING, "base_url", "config"}
    for name, hint in HINTS.items():
        if name not in HARMLESS:
            assert f"a call takes no {name!r}: {hint}" in of_a_call(**{name: "x"})
            if name not in FIELDS:  # some belong to LangChain's constructor, and in a call to the run
                assert f"ChatPrecedent takes no {name!r}: {hint}" in of_the_constructor(**{name: "x"})
        assert set(re.findall(r"(\w+)=", hint)) <= known, hint
        called = set(re.findall(r"(\w+)\(", hint)) - {"BitsAndBytesConfig", "ChatPrecedentServer"}
        assert all(hasattr(ChatPrecedent, method) for method in called), hint


def test_every_name_has_one_meaning() -> None:
    ours = FIELDS | set(OF_THE_CALL)
    for names in (SAME.keys() - {"model_name"}, OF_LOADING, IDLE):
        assert not set(names) & ours
        assert not set(names) & HINTS.keys()
    assert set(SAME.values()) <= ours
    assert set(HARMLESS) <= HINTS.keys()


def test_an_answer_cache_is_not_a_cache_to_draft_from(tmp_path: Path) -> None:
    with SpeculationCache.open() as cache:
        for wrong in ("orders.db", tmp_path / "orders.db", cache):
            with pytest.raises(ConfigError, match="for a cache to draft from write speculation_cache="):
                ChatPrecedent(model="m", cache=wrong)
    assert ChatPrecedent(model="m", cache=False).cache is False
    with pytest.raises(ConfigError, match="cache=3 must be an instance of BaseCache"):
        ChatPrecedent(model="m", cache=3)


def test_a_drafter_that_there_is_not_is_refused_in_the_constructor() -> None:
    for fields in ({"drafters": ["recal"]}, {"speculation": {"drafters": ["recal"]}}):
        for make in (lambda fields: ChatPrecedent(model="m", **fields), lambda fields: scripted(**fields)):
            with pytest.raises(ConfigError, match="no drafter is called 'recal'"):
                make(fields)
    engine: Any = ScriptedEngine(chatml_tokenizer(), ["x"])
    engine.drafters = ("mine",)
    assert ChatPrecedent.from_engine(engine, drafters=["mine", "recall"]).drafters == ("mine", "recall")


# Sampling settings that a checkpoint recommends: listed, and used when asked for

RECOMMENDED = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return saved(tmp_path / "model", do_sample=True, **RECOMMENDED)


def saved(folder: Path, **settings: Any) -> Path:
    model = tiny_causal_lm(dtype=torch.float32)
    model.generation_config = GenerationConfig(**settings)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@MODELS
def test_answers_are_greedy_unless_the_recommended_settings_are_asked_for_and_the_caller_goes_first(kind: Any) -> None:
    for fields, call, expected in (
        ({}, {}, {}),
        ({"sampling": "model"}, {}, RECOMMENDED),
        (
            {"sampling": "model", "temperature": 0.0, "top_k": 5},
            {"top_p": 0.5},
            {"top_k": 5, "top_p": 0.5, "repetition_penalty": 1.05},
        ),
    ):
        model = scripted(kind, **fields)
        model.engine.sampling_defaults = RECOMMENDED
        model.invoke("hello", **call)
        assert asked(model).sampling == SamplingParams(**expected)
    with pytest.raises(ConfigError, match="sampling='modle' must be 'model'"):
        kind(model="m", sampling="modle")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {}),
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"top_p": 0.9}, {"temperature": 1.0, "top_p": 0.9}),
        ({"do_sample": False, "temperature": 0.6}, {"temperature": 0.0}),
        ({"repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),
    ],
)
def test_a_config_is_read_as_transformers_would(settings: Any, expected: Any, tmp_path: Path) -> None:
    tiny = tiny_causal_lm(dtype=torch.float32)
    tiny.generation_config = GenerationConfig(**settings)
    engine = Engine(tiny, byte_tokenizer(), name="tiny")
    try:
        assert engine.sampling_defaults == expected
    finally:
        engine.close()


def test_the_commands_list_and_use_them(folder: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    assert precedent("doctor", folder, "--json", report) == 0
    said = {one["check"]: one["finding"] for one in json.loads(report.read_text())["findings"]}["sampling"]
    assert "temperature 0.6, top_k 20, top_p 0.95, repetition_penalty 1.05" in said
    assert "greedy unless you ask otherwise" in said
    own = ("--temperature", 0, "--top-k", 0, "--top-p", 1, "--repetition-penalty", 1)
    written = ("--temperature", 0.6, "--top-k", 20, "--top-p", 0.95, "--repetition-penalty", 1.05)
    texts = []
    for options in ((), ("--sampling", "model", *own), ("--sampling", "model"), written):
        seeded = ("--seed", 3, "--max-tokens", 12, "--json", report)
        assert precedent("run", "hi", "--target", folder, *options, *seeded) == 0
        texts.append(json.loads(report.read_text())["text"])
    assert texts[0] == texts[1] != texts[2] == texts[3], "what is given goes first"


def test_a_gguf_file_recommends_in_its_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    model, tokenizer = tiny_causal_lm(dtype=torch.float32, vocab_size=260), byte_tokenizer((("t", "h"),))
    file = write_gguf(tmp_path / "model.gguf", model, tokenizer, general__sampling__top_k=40)
    engine = Engine.load(file, device="cpu")
    try:
        assert engine.sampling_defaults == {"top_k": 40, "temperature": 1.0}
    finally:
        engine.close()


def deep(number: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(number):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return {"title": "Deep", **schema}


@pytest.mark.parametrize(
    "ask",
    [
        lambda schema: scripted().with_structured_output(schema).invoke("hi"),
        lambda schema: scripted().bind_tools([schema]).invoke("hi"),
        lambda schema: scripted().invoke("hi", response_format={"name": "deep", "schema": schema}),
    ],
    ids=["json_schema", "a tool", "response_format"],
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
