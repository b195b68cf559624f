"""ChatPrecedent on a scripted engine: invoke, stream and their async forms agree; settings, errors, cancellation."""

from __future__ import annotations

import asyncio
import copy
import json
import threading
import time
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, HumanMessage, SystemMessage
from langchain_core.runnables import ConfigurableField, RunnableLambda
from langchain_core.tools import tool
from pydantic import BaseModel, create_model

from precedent.config import SpeculationConfig
from precedent.engine.engine import Engine
from precedent.engine.options import EngineOptions
from precedent.errors import ConfigError, ContextOverflowError, GenerationError, PromptError, UnsupportedError
from precedent.langchain import ChatPrecedent
from precedent.testing.scripted_engine import ScriptedEngine, chatml_tokenizer
from precedent.text.prompt import hermes_template

TOKENIZER = chatml_tokenizer(chat_template=hermes_template())
CALL = '<tool_call>\n{"name": "look_up", "arguments": {"number": "10 €"}}\n</tool_call>'
BROKEN = '<tool_call>\n{"name": "look_up", "arguments": {"number": "10'


@tool
def look_up(number: str) -> str:
    """Look up an order by its number."""
    return f"order {number}: sent"


def scripted(*answers: str, **engine: Any) -> ChatPrecedent:
    return ChatPrecedent.from_engine(ScriptedEngine(TOKENIZER, answers, **engine))


def engine_of(model: ChatPrecedent) -> ScriptedEngine:
    assert isinstance(model.engine, ScriptedEngine)
    return model.engine


def comparable(message: BaseMessage) -> dict[str, Any]:
    """A message without what differs by run: ids, and the classes of chunks."""
    assert isinstance(message, AIMessage)
    metadata = dict(message.response_metadata)
    fields = ("content", "tool_calls", "invalid_tool_calls", "usage_metadata", "additional_kwargs")
    return {name: getattr(message, name) for name in fields} | {"metadata": metadata}


def merged(chunks: list[AIMessageChunk]) -> AIMessageChunk:
    total = chunks[0]
    for chunk in chunks[1:]:
        total = total + chunk  # type: ignore[assignment]
    return total


async def all_four(answer: str, seed: int, max_burst: int, **kwargs: Any) -> list[dict[str, Any]]:
    """One answer by invoke, stream, ainvoke and astream, under the same bursts."""

    def runnable() -> Any:
        model = scripted(answer, seed=seed, max_burst=max_burst)
        return model.bind_tools([look_up]) if kwargs.get("tools", True) else model

    streamed = merged([chunk async for chunk in runnable().astream("hi")])
    return [
        comparable(runnable().invoke("hi")),
        comparable(merged(list(runnable().stream("hi")))),
        comparable(await runnable().ainvoke("hi")),
        comparable(streamed),
    ]


ANSWERS = [
    "",
    "Hello, ørder!",
    CALL,
    f"I look.\n{CALL}\n{CALL}\nDone.",
    f"{CALL}\n{BROKEN}",
    "<tool_call>nonsense</tool_call>",
]


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("max_burst", [1, 7, 1000])
async def test_invoke_and_stream_sync_and_async_give_one_message(answer: str, max_burst: int) -> None:
    first, *others = await all_four(answer, seed=1, max_burst=max_burst)
    assert others == [first] * 3


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.sampled_from([CALL, BROKEN, "text", "\n", "é", "<tool_call>"]), max_size=5), st.integers(0, 2**32))
def test_no_burst_pattern_changes_text_or_calls(parts: list[str], seed: int) -> None:
    answer = "".join(parts)
    texts = []
    for max_burst in (1, 9):
        message = merged(list(scripted(answer, seed=seed, max_burst=max_burst).bind_tools([look_up]).stream("hi")))
        texts.append((message.content, message.tool_calls, message.invalid_tool_calls, message.usage_metadata))
    assert texts[0][:3] == texts[1][:3]
    assert texts[0][3]["output_tokens"] == texts[1][3]["output_tokens"] == len(TOKENIZER.encode(answer)) + 1


def test_text_and_calls_of_an_answer() -> None:
    message = scripted(f"I look.\n{CALL}").bind_tools([look_up]).invoke("where is it?")
    assert message.content == "I look."
    (call,) = message.tool_calls
    assert (call["name"], call["args"], call["type"]) == ("look_up", {"number": "10 €"}, "tool_call")
    assert call["id"].startswith("call_")
    assert message.invalid_tool_calls == []


def test_two_equal_calls_have_ids_of_their_own_and_a_repeated_request_has_the_same() -> None:
    model = scripted(f"{CALL}\n{CALL}", f"{CALL}\n{CALL}", f"{CALL}\n{CALL}").bind_tools([look_up])
    once, again, other = (
        [call["id"] for call in model.invoke(text).tool_calls] for text in ("hi", "hi", "another request")
    )
    assert len(set(once)) == 2
    assert once == again
    assert not set(once) & set(other)


def test_a_call_that_was_cut_off_is_never_repaired_into_a_valid_one() -> None:
    message = merged(list(scripted(BROKEN).bind_tools([look_up]).stream("hi")))
    assert message.tool_calls == []
    (invalid,) = message.invalid_tool_calls
    assert (invalid["name"], invalid["args"]) == ("look_up", '{"number": "10"]<invalid>')
    assert "no tool call" in message.response_metadata["tool_call_errors"][0]


def test_without_tools_a_call_is_text() -> None:
    assert scripted(CALL).invoke("hi").content == CALL
    assert scripted(CALL).bind_tools([look_up], tool_choice="none").invoke("hi").content == CALL


def test_a_call_is_streamed_while_it_is_written_and_the_figures_come_last() -> None:
    chunks = list(scripted(f"I look.\n{CALL}", max_burst=1).bind_tools([look_up]).stream("hi"))
    first, *pieces = [piece for chunk in chunks for piece in chunk.tool_call_chunks]
    assert (first["name"], first["args"], first["index"]) == ("look_up", "", 0)
    assert str(first["id"]).startswith("call_")
    assert {(piece["name"], piece["id"], piece["index"]) for piece in pieces} == {(None, None, 0)}
    assert "".join(piece["args"] or "" for piece in pieces) == '{"number": "10 €"}'
    assert len(pieces) > 10, "one for each token, or nearly"
    assert [chunk.chunk_position for chunk in chunks] == [None] * (len(chunks) - 1) + ["last"]
    assert all(not chunk.response_metadata and chunk.usage_metadata is None for chunk in chunks[:-1])
    assert chunks[-1].content == ""


def test_usage_and_response_metadata() -> None:
    message = scripted("Hello", max_burst=2, seed=3).invoke("hi")
    usage, metadata = message.usage_metadata, message.response_metadata
    assert usage is not None
    assert usage["output_tokens"] == 6, "five bytes and the end token"
    assert usage["input_tokens"] + usage["output_tokens"] == usage["total_tokens"]
    assert usage["input_token_details"] == {"cache_read": 3}
    assert (metadata["model_name"], metadata["finish_reason"]) == ("scripted", "stop")
    figures = metadata["speculation"]
    assert figures["lossless"] is True
    assert figures["mode"] == "greedy"
    assert figures["num_steps"] + figures["num_accepted_tokens"] == 6
    assert figures["tokens_per_step"] == round(6 / figures["num_steps"], 3)
    assert usage["output_token_details"] == {"accepted_prediction": figures["num_accepted_tokens"]}
    assert figures["accepted_by_source"] == {"recall": figures["num_accepted_tokens"]}
    json.dumps(metadata)


def test_max_tokens_ends_with_length() -> None:
    message = scripted("Hello").invoke("hi", max_tokens=2)
    assert (message.content, message.response_metadata["finish_reason"]) == ("He", "length")


@pytest.mark.parametrize("output_version", ["v0", "v1"])
def test_content_blocks_of_stream_and_invoke_agree(output_version: str) -> None:
    def blocks(stream: bool) -> Any:
        model = scripted(f"I look.\n{CALL}\n{CALL}").model_copy(update={"output_version": output_version})
        bound = model.bind_tools([look_up])
        return (merged(list(bound.stream("hi"))) if stream else bound.invoke("hi")).content_blocks

    call = ("tool_call", None, {"number": "10 €"})
    kinds = [
        [(block["type"], block.get("text"), block.get("args")) for block in blocks(stream)] for stream in (True, False)
    ]
    assert kinds[0] == kinds[1] == [("text", "I look.", None), call, call]


def test_event_streams_keep_parallel_calls_apart() -> None:
    stream = scripted(f"I look.\n{CALL}\n{CALL}", max_burst=1).bind_tools([look_up]).stream_events("hi", version="v3")
    assert [(call["name"], call["args"]) for call in stream.output.tool_calls] == [("look_up", {"number": "10 €"})] * 2
    assert stream.output.text == "I look."


# Settings


def test_stop_strings_of_model_and_call_are_merged() -> None:
    model = ChatPrecedent.from_engine(ScriptedEngine(TOKENIZER, ["one two three"] * 2), stop=["three", "x"])
    assert model.invoke("hi", stop=["two", "x"]).content == "one "
    assert model.invoke("hi").content == "one two "
    assert engine_of(model).requests[0].sampling.stop == ("three", "x", "two")


def test_settings_of_the_model_and_of_the_call_reach_the_engine() -> None:
    engine = ScriptedEngine(TOKENIZER, ["a"] * 3)
    model = ChatPrecedent.from_engine(engine, temperature=0.5, top_k=9, seed=1, tenant="north", max_tokens=7)
    model.invoke("hi")
    model.invoke(
        "hi", temperature=0.25, seed=2, max_tokens=5, tenant="south", workflow_step="refund", speculation=False
    )
    model.invoke("hi", speculation={"max_nodes": 4}, drafters=["recall"], temperature=None)
    first, second, third = engine.requests
    assert (first.sampling.temperature, first.sampling.top_k, first.sampling.seed) == (0.5, 9, 1)
    assert (first.tenant, first.workflow_step, first.speculation, first.sampling.max_tokens) == ("north", "", None, 7)
    assert (second.sampling.temperature, second.sampling.seed, second.sampling.max_tokens) == (0.25, 2, 5)
    assert (second.tenant, second.workflow_step) == ("south", "refund")
    assert second.speculation == SpeculationConfig(enabled=False)
    assert third.speculation == SpeculationConfig(max_nodes=4, drafters=("recall",))
    assert third.sampling.temperature == 0.5


class Streaming(BaseCallbackHandler):
    """Makes LangChain answer `invoke` through `_stream`, as LangGraph's stream modes do."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def on_llm_new_token(self, token: str, **kwargs: Any) -> None:
        self.texts.append(token)


@pytest.mark.parametrize(
    "way", ["invoke", "stream", "ainvoke", "astream", "batch", "events", "v3", "stream=True", "nested"]
)
async def test_the_runs_metadata_names_the_step_on_every_way(way: str) -> None:
    model = scripted("a")
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
    (request,) = engine_of(model).requests
    assert request.workflow_step == "desk/model"


def test_the_models_own_metadata_counts_and_the_call_wins() -> None:
    model = ChatPrecedent.from_engine(ScriptedEngine(TOKENIZER, ["a"] * 3), metadata={"workflow_step": "west"})
    list(model.stream("hi"))
    model.invoke("hi")
    model.invoke("hi", {"metadata": {"workflow_step": "north"}}, workflow_step="south")
    assert [request.workflow_step for request in engine_of(model).requests] == ["west", "west", "south"]


@pytest.mark.parametrize(
    ("tenant", "said"),
    [("", "must be a text"), (7, "must be a text"), ("x" * 201, "give at most 200"), ("a\nb", "not printable")],
)
def test_a_tenant_that_cannot_be_one_is_refused(tenant: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=rf"tenant=.*{said}"):
        scripted("a").invoke("hi", tenant=tenant)
    with pytest.raises(ConfigError, match=rf"tenant=.*({said}|should be a valid string)"):
        ChatPrecedent(model="m", tenant=tenant)


def test_query_and_tools_reach_the_engine() -> None:
    model = scripted("a", "b")
    model.bind_tools([look_up]).invoke([SystemMessage("policy"), HumanMessage("where is order 1042?")])
    model.invoke("hi")
    with_tools, without = engine_of(model).requests
    assert with_tools.query == "user: where is order ?"
    assert len(with_tools.tools) == 32
    assert '"name": "look_up"' in with_tools.prompt
    assert without.tools == ""


def test_every_form_of_tool_is_shown() -> None:
    class change_address(BaseModel):
        """Change the address of an order."""

        number: str

    def refund(number: str) -> str:
        """Refund an order."""
        return number

    anthropic = {"name": "cancel", "description": "Cancel.", "input_schema": {"type": "object", "properties": {}}}
    openai = {"type": "function", "function": {"name": "close", "parameters": {}}}
    schema = {"title": "reopen", "description": "Reopen.", "type": "object", "properties": {}}
    model = scripted("a")
    model.bind_tools([look_up, change_address, refund, anthropic, openai, schema]).invoke("hi")
    prompt = engine_of(model).requests[0].prompt
    for name in ("look_up", "change_address", "refund", "cancel", "close", "reopen"):
        assert f'{{"type": "function", "function": {{"name": "{name}"' in prompt


# What is refused, and how


@pytest.mark.parametrize(
    ("kwargs", "error", "said"),
    [
        ({"temprature": 1}, ConfigError, "takes no 'temprature'; did you mean 'temperature'"),
        ({"xyz": 1}, ConfigError, "known: temperature"),
        ({"temperature": -1}, ConfigError, "temperature=-1 must be 0"),
        ({"speculation": "on"}, ConfigError, "speculation='on' is neither True"),
        ({"speculation": {"max_node": 4}}, ConfigError, "did you mean 'max_nodes'"),
        ({"model": "other"}, UnsupportedError, "model='other' is not loaded, and a call loads nothing"),
        ({"response_format": {"type": "xml"}}, ConfigError, "response_format=.* is neither a class nor a dict"),
        ({"strict": "very"}, ConfigError, "strict='very' must be 'auto', True or False"),
        ({"tool_choice": "any"}, ConfigError, "tool_choice='any' forces a call, and no tool is bound"),
        ({"n": 2}, UnsupportedError, "n=2 is not supported"),
    ],
)
async def test_a_bad_call_is_refused_before_anything_runs(kwargs: Any, error: type[Exception], said: str) -> None:
    model = scripted("a")
    for attempt in (lambda: model.invoke("hi", **kwargs), lambda: list(model.stream("hi", **kwargs))):
        with pytest.raises(error, match=said):
            attempt()
    with pytest.raises(error, match=said):
        await model.ainvoke("hi", **kwargs)
    assert engine_of(model).requests == []


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"temprature": 1}, "ChatPrecedent takes no 'temprature'; did you mean 'temperature'"),
        ({"temperature": -0.1}, "temperature=-0.1 must be 0"),
        ({"top_p": 0.0}, "top_p=0.0 must be a number in"),
        ({"stop": [""]}, "stop holds an empty string"),
    ],
)
def test_a_bad_setting_is_refused_in_one_line(settings: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        ChatPrecedent(model="m", **settings)
    assert "\n" not in str(caught.value)


def test_one_tool_in_two_forms_is_shown_once_and_two_of_one_name_are_refused() -> None:
    class close(BaseModel):
        """Close an order."""

        number: str

    other = create_model("close", __doc__="Close an order.", number=(int, ...))
    model = scripted("a")
    model.bind_tools([close, look_up, close.model_json_schema()]).invoke("hi")
    prompt = engine_of(model).requests[0].prompt
    assert [prompt.count(f'"name": "{name}"') for name in ("close", "look_up")] == [1, 1]
    assert prompt.index("look_up") > prompt.index("close"), "in the order in which they were bound"
    with pytest.raises(PromptError, match="tool 'close' is bound twice"):
        model.bind_tools([close, other])


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (
            {"title": "order", "type": "object", "properties": {"a": {"type": "text"}}},
            "tool 'order' has no valid JSON Schema",
        ),
        ({"type": "web_search"}, "has no name|cannot be shown"),
        (3, r"tool number 1 cannot be shown to the model \(.*\): give a function"),
    ],
)
def test_a_bad_tool_is_refused_by_name(bad: Any, said: str) -> None:
    with pytest.raises(PromptError, match=said):
        scripted("a").bind_tools([bad])


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, "model is missing: give a Hugging Face id or a folder as model=…"),
        ({"model": 3}, "model=3 must be a text"),
        ({"model": "m", "temperature": "warm"}, "temperature='warm' must be 0"),
        ({"model": "m", "drafters": ["recall", 3]}, r"drafters=\['recall', 3\] must be a list of names"),
        ({"model": "m", "drafters": "recall"}, "drafters='recall'"),
        ({"model": "m", "speculation": "off"}, "speculation='off' is neither True, False"),
        ({"model": "m", "tenant": ""}, "tenant='' must be a text that is not empty"),
    ],
)
def test_a_wrong_field_is_one_line_before_anything_is_loaded(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        ChatPrecedent(**fields)
    assert "\n" not in str(refused.value)


def test_drafters_of_a_call_are_a_list_which_may_be_empty() -> None:
    model = scripted("a", "b")
    with pytest.raises(ConfigError, match=r"drafters='recall' must be a list of names: \['recall'\]"):
        model.invoke("hi", drafters="recall")
    model.invoke("hi", drafters=[])
    assert engine_of(model).requests[0].speculation.drafters == ()


def test_no_messages_and_a_prompt_that_is_too_long() -> None:
    with pytest.raises(PromptError, match="message list is empty"):
        scripted("a").invoke([])
    with pytest.raises(ContextOverflowError, match="the context 20"):
        scripted("a", context_length=20).invoke("a long question")


async def test_an_error_of_the_engine_reaches_the_caller() -> None:
    with pytest.raises(GenerationError, match="0 answers"):
        scripted().invoke("hi")
    with pytest.raises(GenerationError, match="0 answers"):
        await scripted().ainvoke("hi")


# Cancellation and concurrency


def test_breaking_out_of_a_stream_cancels_the_request() -> None:
    model = scripted("x" * 5000, max_burst=1, pace=0.001)
    for _ in model.stream("hi", max_tokens=4000):
        break
    (request,) = engine_of(model).requests
    assert request.ended.wait(5)
    assert request.cancelled


async def test_leaving_an_async_stream_or_cancelling_its_task_cancels_the_request() -> None:
    model = scripted("x" * 5000, "x" * 5000, max_burst=1, pace=0.001)
    stream = model.astream("hi", max_tokens=4000)
    await anext(stream)
    await stream.aclose()  # type: ignore[attr-defined]
    task = asyncio.create_task(model.ainvoke("hi", max_tokens=4000))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    for request in engine_of(model).requests:
        assert await asyncio.to_thread(request.ended.wait, 5)
        assert request.cancelled


async def test_async_streams_run_side_by_side_on_the_callers_thread() -> None:
    threads = set()
    engine = ScriptedEngine(TOKENIZER, lambda prompt: prompt[-40:-30] * 3, pace=0.001)
    model = ChatPrecedent.from_engine(engine)

    async def one(number: int) -> str:
        text = ""
        async for chunk in model.astream(f"request {number}"):
            threads.add(threading.current_thread())
            text += str(chunk.content)
        return text

    answers = await asyncio.gather(*(one(number) for number in range(16)))
    assert answers == [engine_answer(engine, number) for number in range(16)]
    assert threads == {threading.main_thread()}


def engine_answer(engine: ScriptedEngine, number: int) -> str:
    (request,) = [request for request in engine.requests if f"request {number}<" in request.prompt]
    return request.generation.result().text


def test_a_streaming_handler_sees_every_text() -> None:
    handler = Streaming()
    message = scripted("Hello there", max_burst=3).invoke("hi", {"callbacks": [handler]}, stream=True)
    assert "".join(handler.texts) == message.content == "Hello there"


# What LangChain asks about the model


def test_parameters_for_tracing_and_caches() -> None:
    model = ChatPrecedent(model="m", temperature=0.5, max_tokens=9, stop=["a"])
    params = model._get_ls_params(stop=["b"])
    assert (params["ls_provider"], params["ls_model_name"], params["ls_stop"]) == ("precedent", "m", ["a", "b"])
    assert (params["ls_temperature"], params["ls_max_tokens"]) == (0.5, 9)
    assert model._llm_type == "precedent-chat"
    assert ChatPrecedent(model_name="m").model == model.model_name == "m"


@pytest.mark.parametrize(
    "other",
    [
        *({"model": "n"}, {"seed": 1}, {"dtype": "float32"}, {"temperature": 1.0}, {"stop": ["x"]}, {"tenant": "t"}),
        *({"model_kwargs": {"revision": "v2"}}, {"strict_tools": False}, {"logprobs": True}),
    ],
)
def test_an_answer_cache_keeps_different_models_apart(other: dict[str, Any]) -> None:
    one, two = (ChatPrecedent(**{"model": "m", **changes}) for changes in ({}, other))
    assert one._get_llm_string() != two._get_llm_string()
    assert one._get_llm_string() == ChatPrecedent(model="m")._get_llm_string()


def test_an_answer_cache_does_not_mix_up_two_engines_of_one_name() -> None:
    cache = InMemoryCache()
    models = [ChatPrecedent.from_engine(ScriptedEngine(TOKENIZER, [text]), cache=cache) for text in ("one", "two")]
    assert [model.invoke("hi").content for model in models] == ["one", "two"]
    assert models[0].invoke("hi").content == "one", "this one comes from the cache: the script is used up"


def test_tokens_are_counted_by_the_models_own_tokenizer_and_template() -> None:
    model = scripted("a")
    assert model.get_token_ids("ab<|im_end|>") == TOKENIZER.encode("ab<|im_end|>")
    count = model.get_num_tokens_from_messages([HumanMessage("where?")])
    model.invoke("where?")
    assert count == len(engine_of(model).requests[0].prompt_ids)
    assert model.get_num_tokens_from_messages([HumanMessage("where?")], tools=[look_up]) > count


# Engines


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Replaces the loading of weights; records what was asked for."""
    calls: list[dict[str, Any]] = []

    def load(target: Any, options: EngineOptions, *, tokenizer: Any) -> ScriptedEngine:
        calls.append({"target": target, "tokenizer": tokenizer, "options": options})
        time.sleep(0.02)
        return ScriptedEngine(TOKENIZER, lambda prompt: "a")

    monkeypatch.setattr(Engine, "load", load)
    return calls


def test_weights_are_loaded_once_and_only_when_needed(loads: list[dict[str, Any]]) -> None:
    model = ChatPrecedent(model="m", draft_model="d", device="cpu", dtype="float32")
    assert loads == []
    model.batch(["hi"] * 8)
    options = EngineOptions(draft_model="d", device="cpu", dtype="float32")
    assert loads == [{"target": "m", "tokenizer": None, "options": options}]


def test_graphs_make_another_engine_and_other_answers(loads: list[dict[str, Any]]) -> None:
    """A graph's attention rounds in its own way, which an answer cache must not confuse with another."""
    models = [ChatPrecedent(model="m", cuda_graphs=chosen) for chosen in (None, True)]
    for model in models:
        model.invoke("hi")
    assert [load["options"].cuda_graphs for load in loads] == [False, True]
    assert models[0]._identifying_params != models[1]._identifying_params


async def test_copies_that_langchain_makes_share_the_engine(loads: list[dict[str, Any]]) -> None:
    model = ChatPrecedent(model="m")
    configurable = model.configurable_fields(temperature=ConfigurableField(id="temperature"))
    for temperature in (0.0, 0.5, 1.0):
        await configurable.with_config(configurable={"temperature": temperature}).ainvoke("hi")
    copy.deepcopy(model).invoke("hi")
    model.model_copy(update={"seed": 3}).invoke("hi")
    assert len(loads) == 1


def test_from_model_hands_over_the_weights(loads: list[dict[str, Any]]) -> None:
    class Weights:
        config = type("Config", (), {"_name_or_path": "folder/name"})

    weights = Weights()
    model = ChatPrecedent.from_model(weights, TOKENIZER, temperature=0.5)
    assert model.model_name == "folder/name"
    model.invoke("hi")
    assert loads[0]["target"] is weights
    assert loads[0]["tokenizer"] is TOKENIZER
    with pytest.raises(ConfigError, match="device cannot be set for a model object"):
        ChatPrecedent.from_model(weights, TOKENIZER, device="cpu")


@pytest.mark.parametrize("given", [(TOKENIZER, object()), ("folder/name", "folder/name")])
def test_from_model_says_what_it_takes(given: tuple[Any, Any]) -> None:
    with pytest.raises(ConfigError, match=r"takes a transformers model and its tokenizer.*ChatPrecedent\(model=…\)"):
        ChatPrecedent.from_model(*given)


@pytest.mark.parametrize("given", [True, 3])
def test_a_cache_that_is_none_is_refused_before_weights_are_loaded(loads: list[dict[str, Any]], given: Any) -> None:
    with pytest.raises(ConfigError, match=f"a {type(given).__name__} names no cache: give a folder"):
        ChatPrecedent(model="m", speculation_cache=given).invoke("hi")
    assert loads == []


def test_what_belongs_to_the_engine_is_not_given_to_from_engine() -> None:
    with pytest.raises(ConfigError, match="speculation_cache belongs to the engine"):
        ChatPrecedent.from_engine(ScriptedEngine(TOKENIZER, []), speculation_cache="x.db")
