"""What a model is given, at its constructor and at a call: read as it was meant, or refused with the value's name."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from langchain_core import exceptions as theirs
from langchain_core.caches import InMemoryCache
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool

from precedent import errors
from precedent.cache import NewCompletion
from precedent.cache.store.fingerprint import prompt_fingerprint
from precedent.config import SamplingParams
from precedent.engine.engine import Engine
from precedent.errors import ConfigError, ContextOverflowError, PromptError, UnsupportedError
from precedent.langchain import ChatPrecedent, PrecedentLLM
from precedent.langchain import exceptions as of_both
from precedent.testing.scripted_engine import ScriptedEngine, ScriptedRequest, chatml_tokenizer
from precedent.testing.scripted_model import scripted_model_engine
from precedent.testing.tiny_models import tiny_causal_lm
from precedent.text.prompt import hermes_template

TOKENIZER = chatml_tokenizer(chat_template=hermes_template())
CALL = '<tool_call>\n{"name": "look_up", "arguments": {"number": "10 €"}}\n</tool_call>'
BROKEN = '<tool_call>\n{"name": "look_up", "arguments": {"number": "10'
MODELS = pytest.mark.parametrize("kind", [ChatPrecedent, PrecedentLLM])


@tool
def look_up(number: str) -> str:
    """Look up an order."""
    return f"order {number}: sent"


def scripted(kind: Any = ChatPrecedent, answer: str = "one STOP two", **fields: Any) -> Any:
    engine: Any = ScriptedEngine(fields.pop("tokenizer", TOKENIZER), lambda prompt: answer, may_stray=True)
    return kind.from_engine(engine, **fields)


def asked(model: Any) -> ScriptedRequest:
    return model.engine.requests[-1]


def text_of(answer: Any) -> str:
    return answer if isinstance(answer, str) else str(answer.text)


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
        *[("top_k", value) for value in (True, -1, 2.5)],
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

HALF = "a\ud800"
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
        [{"type": "tool_use", "id": "1", "name": "f", "input": "x"}],
    ],
)
def test_a_tool_use_that_is_none_is_a_prompt_error(content: Any) -> None:
    with pytest.raises(PromptError, match="message 2 holds a call without a name, or whose arguments are no dict"):
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
    for given in ([3], 3, None, [("nobody", "hi")], [HumanMessage(HALF)], []):
        with pytest.raises(PromptError):
            model.get_num_tokens_from_messages(given)


# What belongs to the run


@MODELS
@pytest.mark.parametrize("name", ["metadata", "tags", "callbacks", "run_name", "run_id"])
async def test_what_belongs_to_the_run_is_refused_in_a_call_with_where_it_goes(kind: Any, name: str) -> None:
    said = rf"a call takes no '{name}': it belongs to the run: write config=\{{\"{name}\": …\}}"
    model = scripted(kind)
    for ask in (
        lambda: model.invoke("hi", **{name: None}),
        lambda: model.invoke("hi", **{name: {"a": "b"}}),
        lambda: list(model.stream("hi", **{name: {"a": "b"}})),
        lambda: model.batch(["hi"], **{name: {"a": "b"}}),
        lambda: model.bind(**{name: {"a": "b"}}).invoke("hi"),
    ):
        with pytest.raises(ConfigError, match=said):
            ask()
    with pytest.raises(ConfigError, match=said):
        await model.ainvoke("hi", **{name: {"a": "b"}})
    with pytest.raises(ConfigError, match=said):
        await model.abatch(["hi"], **{name: {"a": "b"}})
    with pytest.raises(ConfigError, match=said):
        _ = [one async for one in model.astream("hi", **{name: {"a": "b"}})]
    assert model.engine.requests == []


# LangChain's own errors


@MODELS
def test_errors_of_a_call_are_langchains_as_well(kind: Any) -> None:
    with pytest.raises(theirs.ContextOverflowError) as overflow:
        kind.from_engine(ScriptedEngine(TOKENIZER, ["x"], context_length=5)).invoke("a long question")
    assert isinstance(overflow.value, ContextOverflowError)
    for call in ({"temperature": "warm"}, {"stop": [3]}, {"config": {"metadata": {"workflow_step": 3}}}):
        for ask in (scripted(kind).invoke, lambda *said, **call: list(scripted(kind).stream(*said, **call))):
            with pytest.raises(theirs.ModelInvalidRequestError) as wrong:
                ask("hi", **call)
            assert isinstance(wrong.value, ConfigError)
    with pytest.raises(theirs.ModelInvalidRequestError) as unsupported:
        scripted(kind).invoke("hi", n=2)
    assert isinstance(unsupported.value, UnsupportedError)
    with pytest.raises(theirs.ModelInvalidRequestError) as prompt:
        scripted(kind).invoke(HALF)
    assert isinstance(prompt.value, PromptError)


async def test_so_are_those_of_streams_and_awaited_calls() -> None:
    model = ChatPrecedent.from_engine(ScriptedEngine(TOKENIZER, ["x"], context_length=5))
    with pytest.raises(theirs.ContextOverflowError):
        list(model.stream("a long question"))
    with pytest.raises(theirs.ContextOverflowError):
        await model.ainvoke("a long question")
    with pytest.raises(theirs.ContextOverflowError):
        _ = [one async for one in model.astream("a long question")]


def test_a_model_that_cannot_be_loaded_was_not_found(tmp_path: Any) -> None:
    with pytest.raises(theirs.ModelNotFoundError) as missing:
        ChatPrecedent(model=str(tmp_path / "nothing")).invoke("hi")
    assert isinstance(missing.value, errors.ModelLoadError)


def test_every_error_of_both_kinds_says_what_ours_says() -> None:
    for ours, both in of_both._BOTH.items():
        assert issubclass(both, ours)
        assert issubclass(both, theirs.LangChainException)
        with pytest.raises(both, match=r"^what was wrong$") as raised, of_both.of_both_kinds():
            raise ours("what was wrong")
        assert raised.value.__cause__ is None
    with pytest.raises(errors.GenerationError), of_both.of_both_kinds():
        raise errors.GenerationError("of ours alone")


# What the chat template is told

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
    assert model._identifying_params != plain._identifying_params


def test_a_call_says_it_louder_than_the_model() -> None:
    model = thinking(reasoning=False)
    model.invoke("hi", reasoning=True)
    assert asked(model).prompt.endswith("assistant\n")
    thinking(chat_template_kwargs={"enable_thinking": True}).invoke("hi", reasoning=False)


def test_answers_that_were_given_before_are_told_behind_the_same_prompt() -> None:
    model, stored = thinking(reasoning=False), list[NewCompletion]()
    model.engine.tokenizer_fingerprint = "any"
    model.engine.cache = SimpleNamespace(insert=lambda completion: stored.append(completion) or 1)
    model.invoke("hi")
    assert model.warm([[("user", "hi"), ("ai", "one")]]) == 1
    assert [one.prompt_fingerprint for one in stored] == [prompt_fingerprint(asked(model).prompt_ids)]
    assert stored[0].text == "one"


@pytest.mark.parametrize("wrong", [{"messages": []}, {"tools": []}, {"enable_thinkng": True}, 3, {1: 2}], ids=str)
def test_a_template_is_not_told_what_it_cannot_be(wrong: Any) -> None:
    with pytest.raises(ConfigError):
        thinking().invoke("hi", chat_template_kwargs=wrong)


# One message, whichever way it came

REASONING = chatml_tokenizer(chat_template=hermes_template())
REASONING.add_tokens(["<think>", "</think>"])


def merged(chunks: list[AIMessageChunk]) -> AIMessageChunk:
    total = chunks[0]
    for chunk in chunks[1:]:
        total = total + chunk  # type: ignore[assignment]
    return total


@pytest.mark.parametrize("output_version", ["v0", "v1"])
@pytest.mark.parametrize(
    "answer",
    [
        "",
        "Hello, ørder!",
        CALL,
        f"I look.\n{CALL}\n{CALL}\nDone.",
        f"{CALL}\n{BROKEN}",
        f"<think>hm</think>So.\n{CALL}",
    ],
    ids=lambda answer: answer[:14].replace("\n", " "),
)
async def test_a_merged_stream_is_what_invoke_gives_in_every_output_version(answer: str, output_version: str) -> None:
    model = scripted(answer=answer, tokenizer=REASONING, output_version=output_version).bind_tools([look_up])
    messages = [
        model.invoke("hi"),
        merged(list(model.stream("hi"))),
        await model.ainvoke("hi"),
        merged([chunk async for chunk in model.astream("hi")]),
    ]
    for name in ("content", "content_blocks", "tool_calls", "invalid_tool_calls", "additional_kwargs"):
        first, *others = [getattr(message, name) for message in messages]
        assert others == [first] * 3, name
    if output_version == "v1":
        assert isinstance(messages[0].content, list)
        assert {one["type"] for one in messages[0].content} == {one["type"] for one in messages[0].content_blocks}


def test_blocks_of_v1_stand_in_the_order_of_the_answer() -> None:
    model = scripted(answer=f"I look.\n{CALL}\n{CALL}\nDone.", output_version="v1").bind_tools([look_up])
    blocks = model.invoke("hi").content
    assert [block["type"] for block in blocks] == ["text", "tool_call", "tool_call", "text"]
    assert [block.get("text") for block in blocks] == ["I look.", None, None, "\nDone."]
    engine: Any = model.bound.engine
    model.invoke([HumanMessage("hi"), model.invoke("hi"), HumanMessage("and?")])
    whole = engine.requests[-1].prompt
    model.invoke([HumanMessage("hi"), AIMessage(blocks), HumanMessage("and?")])
    assert engine.requests[-1].prompt == whole, "and can be said again by themselves"
    assert whole.count("10 €") == 2


def test_an_output_version_that_there_is_not_is_refused() -> None:
    with pytest.raises(ConfigError, match="output_version='v9' must be 'v0' or 'v1'"):
        scripted(output_version="v9")


def test_the_provider_is_named() -> None:
    for message in (scripted().invoke("hi"), merged(list(scripted().stream("hi")))):
        assert message.response_metadata["model_provider"] == "precedent"


# Letting go of weights


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[Any]]:
    """Every model that was loaded: a tiny one, for whatever name."""
    loaded: list[weakref.ref[Any]] = []

    def load(target: Any, *_: Any, **__: Any) -> Engine:
        engine = scripted_model_engine(lambda prompt: f"from {target}")
        loaded.append(weakref.ref(engine.target.model))
        return engine

    monkeypatch.setattr(Engine, "load", load)
    return loaded


def test_unload_frees_the_weights_for_everyone_and_the_next_call_loads_them_again(
    loads: list[weakref.ref[Any]],
) -> None:
    model, twin, other = ChatPrecedent(model="a"), ChatPrecedent(model="a", seed=1), PrecedentLLM(model="b")
    assert model.invoke("hi").text == twin.invoke("hi").text == "from a"
    other.invoke("hi")
    assert len(loads) == 2, "the twins share theirs"
    twin.unload()
    gc.collect()
    assert [one() is None for one in loads] == [True, False]
    assert model.invoke("hi").text == "from a"
    assert twin.invoke("hi").text == "from a"
    assert len(loads) == 3, "loaded once again"
    for one in (model, other):
        one.unload()
        one.unload()  # nothing is there any more, which harms nobody
    assert [one() is None for one in loads] == [True] * 3


def test_what_was_handed_over_is_not_unloaded() -> None:
    with pytest.raises(UnsupportedError, match=r"close that one with engine.close\(\)"):
        scripted().unload()
    weights = tiny_causal_lm("llama", vocab_size=len(TOKENIZER))
    with pytest.raises(UnsupportedError, match="these weights are yours"):
        ChatPrecedent.from_model(weights, TOKENIZER).unload()


def test_an_engine_that_was_closed_is_not_shared_any_more(loads: list[weakref.ref[Any]]) -> None:
    first = ChatPrecedent(model="a")
    engine = first.engine
    engine.close()
    assert ChatPrecedent(model="a").invoke("hi").text == "from a"
    assert len(loads) == 2
