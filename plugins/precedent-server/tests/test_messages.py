"""`/v1/messages` and `/v1/messages/count_tokens`: what they read, answer, stream and refuse, in Anthropic's words."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest

from precedent_server.keys import KeyFile, add_key
from precedent_server.settings import ServerLimits
from precedent_testing.scripted_model import scripted_tokenizer

CHAT, MESSAGES, COUNT = "/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens"
HI = [{"role": "user", "content": "hi"}]
SIZE = {"enum": ["x", None], "default": None}
SCHEMA = {"type": "object", "properties": {"number": {"type": "string"}, "size": SIZE}}
TOOL = {"name": "look_up", "description": "Finds an order.", "input_schema": SCHEMA}
FUNCTION = {"name": "look_up", "description": "Finds an order.", "parameters": SCHEMA}
CALL = '<tool_call>\n{"name": "look_up", "arguments": {"number": "7"}}\n</tool_call>'
VERSION = {"anthropic-version": "2023-06-01"}


def asked(**more: Any) -> dict[str, Any]:
    return {"model": "scripted", "max_tokens": 200, "temperature": 0, "messages": HI, **more}


def events_in(text: str) -> list[dict[str, Any]]:
    """The events of a stream; each has its own type as its name."""
    found = re.findall(r"event: (.+)\ndata: (.+)\n\n", text)
    assert "".join(f"event: {name}\ndata: {data}\n\n" for name, data in found) == text
    events = [json.loads(data) for _, data in found]
    assert [event["type"] for event in events] == [name for name, _ in found]
    return events


def message_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that the events of a stream make, as Anthropic's clients put it together."""
    message, inputs = events[0]["message"], dict[int, str]()
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
        elif event["type"] == "content_block_delta":
            (key,) = event["delta"].keys() - {"type"}
            if key == "partial_json":
                inputs[event["index"]] = inputs.get(event["index"], "") + event["delta"][key]
            else:
                message["content"][event["index"]][key] += event["delta"][key]
        elif event["type"] == "message_delta":
            message |= event["delta"] | {"usage": event["usage"], "speculation": event["speculation"]}
    for index, written in inputs.items():
        try:
            message["content"][index]["input"] = json.loads(written)
        except ValueError:
            message["content"][index]["input"] = {"INVALID_JSON": written}
    return message


async def posted(client: Any, **body: Any) -> dict[str, Any]:
    answer = await client.post(MESSAGES, json=asked(**body))
    assert answer.status_code == 200, answer.text
    return message_of(events_in(answer.text)) if body.get("stream") else answer.json()  # type: ignore[no-any-return]


async def counted(client: Any, **body: Any) -> int:
    answer = await client.post(COUNT, json={"model": "scripted", **body})
    assert answer.status_code == 200, answer.text
    (number,) = answer.json().values()
    return int(number)


def thinking_tokenizer() -> Any:
    tokenizer = copy.deepcopy(scripted_tokenizer())
    tokenizer.chat_template = (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n"
        "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
        "{{ message.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
        "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    )
    return tokenizer


ANSWERS = {
    "text": ("Good day.", {}, [{"type": "text", "text": "Good day."}], "end_turn"),
    "nothing": ("", {}, [], "end_turn"),
    "call": (
        f"I look.\n{CALL}", {"tools": [TOOL]},
        [{"type": "text", "text": "I look."}, {"type": "tool_use", "name": "look_up", "input": {"number": "7"}}],
        "tool_use",
    ),
    "two calls": (
        f"{CALL}\n{CALL}", {"tools": [TOOL]},
        [{"type": "tool_use", "name": "look_up", "input": {"number": "7"}}] * 2, "tool_use",
    ),
    "broken call": (
        CALL.replace('"7"}', "seven"), {"tools": [TOOL]},
        [{"type": "tool_use", "name": "look_up", "input": {"INVALID_JSON": '{"number": seven}\n</tool_call>'}}],
        "tool_use",
    ),
    "length": ("one two three four five six", {"max_tokens": 2}, None, "max_tokens"),
}  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ANSWERS)
async def test_answers(client: Any, name: str, stream: bool) -> None:
    script, more, content, reason = ANSWERS[name]
    message = await posted(client, stream=stream, messages=[{"role": "user", "content": script}], **more)
    assert re.fullmatch(r"msg_\w+", message.pop("id"))
    for block in message["content"]:
        assert block["type"] != "tool_use" or re.fullmatch(r"toolu_\w+", block.pop("id"))
    assert message["stop_reason"] == reason
    assert message["content"] == content or content is None
    assert (message["type"], message["role"], message["model"]) == ("message", "assistant", "scripted")
    assert message["usage"]["output_tokens"] > 0
    assert message["speculation"]["lossless"] is True


async def test_the_events_of_a_stream(serve: Any) -> None:
    """In their order: each block is ended before the next, and usage comes with the reason why the answer ended."""
    tokenizer = copy.deepcopy(scripted_tokenizer())
    tokenizer.chat_template += "{# <think> </think> #}"
    client = serve(lambda prompt: f"<think>Hm.</think>I look.\n{CALL}", tokenizer=tokenizer)
    streamed = events_in((await client.post(MESSAGES, json=asked(tools=[TOOL], stream=True))).text)
    events = [event for event in streamed if event["type"] != "content_block_delta"]
    started = [(event["index"], event["content_block"]["type"]) for event in events if "content_block" in event]
    assert started == [(0, "thinking"), (1, "text"), (2, "tool_use")]
    block = ["content_block_start", "content_block_stop"]
    order = ["message_start", "ping", *block * 3, "message_delta", "message_stop"]
    assert [event["type"] for event in events] == order
    begun, ended = events[0]["message"], events[-2]
    assert (begun["content"], begun["stop_reason"], begun["usage"]["output_tokens"]) == ([], None, 0)
    assert begun["usage"]["input_tokens"] > 0
    assert ended["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    pieces = [event["delta"] for event in streamed if event["type"] == "content_block_delta"]
    assert pieces[-1]["type"] == "input_json_delta"
    assert "".join(piece.get("partial_json", "") for piece in pieces) == '{"number": "7"}'


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("stops", "told", "found"),
    [([" three", "four"], "one, two,", " three"), (["two", "tw"], "one, ", "tw"), (["nine"], None, None)],
)
async def test_the_stop_sequence_that_ended_an_answer_is_told(
    client: Any, stream: bool, stops: list[str], told: str | None, found: str | None
) -> None:
    counting = [{"role": "user", "content": "one, two, three"}]
    message = await posted(client, messages=counting, stop_sequences=stops, stream=stream)
    assert message["content"] == [{"type": "text", "text": told or "one, two, three"}]
    reason = "end_turn" if found is None else "stop_sequence"
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, found)


async def test_a_call_that_max_tokens_cuts(client: Any) -> None:
    """Whole it is text, as it was written; in a stream it is a call whose input ends early."""
    cut: dict[str, Any] = {"messages": [{"role": "user", "content": CALL}], "tools": [TOOL], "max_tokens": 20}
    whole = await posted(client, **cut)
    assert ([block["type"] for block in whole["content"]], whole["stop_reason"]) == (["text"], "max_tokens")
    assert CALL.startswith(whole["content"][0]["text"])
    events = events_in((await client.post(MESSAGES, json=asked(stream=True, **cut))).text)
    written = "".join(event["delta"].get("partial_json", "") for event in events if event["type"].endswith("k_delta"))
    assert '{"number": "7"}'.startswith(written)
    assert events[-3]["type"] == "content_block_stop"
    assert events[-2]["delta"]["stop_reason"] == "max_tokens"


async def test_thinking_where_the_template_has_it(serve: Any) -> None:
    prompts = list[str]()

    def script(prompt: str) -> str:
        prompts.append(prompt)
        return "Good." if prompt.endswith("</think>") else "<think>Hm.</think>Good."

    client = serve(script, tokenizer=thinking_tokenizer())
    thought = {"type": "thinking", "thinking": "Hm.", "signature": "precedent"}
    good = {"type": "text", "text": "Good."}
    for stream in (False, True):
        for kind in ({"type": "adaptive"}, {"type": "enabled", "budget_tokens": 1024}):
            message = await posted(client, thinking=kind, max_tokens=2000, stream=stream)
            assert message["content"] == [thought, good]
            assert message["usage"]["output_tokens_details"]["thinking_tokens"] > 0
        silent = await posted(client, thinking={"type": "disabled"}, stream=stream)
        assert silent["content"] == [good]
        hidden = await posted(client, thinking={"type": "adaptive", "display": "omitted"}, stream=stream)
        assert hidden["content"] == [{**thought, "thinking": ""}, good]
    echoed = [*HI, {"role": "assistant", "content": [thought, good]}, *HI]
    await posted(client, messages=echoed)
    assert "<think>Hm.</think>Good." in prompts[-1]


async def test_a_model_that_never_thinks_need_not_be_told(client: Any) -> None:
    for kind in ("disabled", "adaptive"):
        assert (await posted(client, thinking={"type": kind}))["content"] == [{"type": "text", "text": "hi"}]
    for more in ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, {"output_config": {"effort": "low"}}):
        answer = await client.post(MESSAGES, json=asked(max_tokens=2000, **more))
        assert answer.status_code == 400
        assert answer.json()["error"]["message"].startswith(f"{next(iter(more))}: "), answer.text


async def test_prefix_reuse_is_told_as_cache_reads(client: Any) -> None:
    long = [
        {"role": "user", "content": [{"type": "text", "text": "word " * 200, "cache_control": {"type": "ephemeral"}}]}
    ]
    for stream in (False, True):
        await posted(client, messages=long)
        usage = (await posted(client, messages=long, stream=stream))["usage"]
        assert usage["cache_read_input_tokens"] > 100
        assert usage["cache_creation_input_tokens"] == 0
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == await counted(client, messages=long)


# Conversations

USE = {"type": "tool_use", "id": "t1", "name": "look_up", "input": {"number": "7", "size": None}}
BROKEN = '{"number": 7'
ARGUMENTS = '{"number": "7", "size": null}'
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "sent"}
TOOL_CALL = {"id": "t1", "type": "function", "function": {"name": "look_up", "arguments": ARGUMENTS}}
CALLED = {"role": "assistant", "content": "I look.", "tool_calls": [TOOL_CALL]}


def text(written: str) -> dict[str, Any]:
    return {"type": "text", "text": written}


def turn(role: str, *blocks: Any) -> dict[str, Any]:
    return {"role": role, "content": [text(one) if isinstance(one, str) else one for one in blocks]}


def said(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


SAME: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "system": ({"system": "Be brief."}, [said("system", "Be brief."), *HI]),
    "system blocks": (
        {"system": [{**text("Be brief."), "cache_control": {"type": "ephemeral"}}, text("Now.")]},
        [said("system", "Be brief.\n\nNow."), *HI],
    ),
    "turns of one role": (
        {"messages": [said("user", "a"), turn("user", "b", "c"), said("assistant", "d"), turn("assistant", "e"), *HI]},
        [said("user", "a\n\nb\n\nc"), said("assistant", "de"), *HI],
    ),
    "a call and its result": (
        {"messages": [*HI, turn("assistant", "I look.", USE), turn("user", {**RESULT, "is_error": None})]},
        [*HI, CALLED, said("tool", "sent", tool_call_id="t1")],
    ),
    "results beside text": (
        {"messages": [
            *HI, turn("assistant", "I look.", USE, {**USE, "id": "t2"}),
            turn("user", RESULT, {**RESULT, "tool_use_id": "t2", "is_error": True}, "And now?"),
        ]},
        [
            *HI, {**CALLED, "tool_calls": [TOOL_CALL, {**TOOL_CALL, "id": "t2"}]},
            said("tool", "sent", tool_call_id="t1"), said("tool", "Error: sent", tool_call_id="t2"),
            said("user", "And now?"),
        ],
    ),
    "a result in blocks, and one without content": (
        {"messages": [
            *HI, turn("assistant", "I look.", USE),
            turn("user", {**RESULT, "content": [text("a"), text("b")]}, {"type": "tool_result", "tool_use_id": "t1"}),
        ]},
        [*HI, CALLED, said("tool", "a\n\nb", tool_call_id="t1"), said("tool", "", tool_call_id="t1")],
    ),
    "a broken call": (
        {"messages": [*HI, turn("assistant", {**USE, "input": {"INVALID_JSON": BROKEN}}), turn("user", RESULT)]},
        [
            *HI,
            said("assistant", "", tool_calls=[{"id": "t1", "function": {"name": "look_up", "arguments": BROKEN}}]),
            said("tool", "sent", tool_call_id="t1"),
        ],
    ),
    "what Anthropic ran": (
        {"messages": [
            *HI, turn("assistant", {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
                      {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
                      {"type": "redacted_thinking", "data": "x"}, "Found."), *HI,
        ]},
        [*HI, said("assistant", "Found."), *HI],
    ),
    "a system turn": ({"messages": [*HI, turn("system", "Be brief."), *HI]}, [*HI, said("system", "Be brief."), *HI]),
}  # fmt: skip


@pytest.mark.parametrize("form", SAME)
@pytest.mark.sampled(3)
async def test_a_conversation_makes_the_prompt_of_a_chat(serve: Any, form: str) -> None:
    prompts = list[str]()
    client = serve(lambda prompt: prompts.append(prompt) or "x", tokenizer=copy.deepcopy(scripted_tokenizer()))
    more, messages = SAME[form]
    tools = [{"type": "function", "function": FUNCTION}]
    assert (await client.post(CHAT, json=asked(messages=messages, tools=tools))).status_code == 200
    message = await posted(client, tools=[TOOL], **more)
    assert prompts[-1] == prompts[0]
    usage = message["usage"]
    told = await counted(client, **{"messages": HI, "tools": [TOOL], **more})
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == told
    assert client.serving.num_ignored == (3 if form == "what Anthropic ran" else 0)


@pytest.mark.parametrize("kind", ["auto", "any", "tool", "none"])
async def test_tool_choices(client: Any, kind: str) -> None:
    choice = {"type": kind, **({"name": "look_up"} if kind == "tool" else {})}
    messages = [{"role": "user", "content": CALL}]
    message = await posted(client, messages=messages, tools=[TOOL], tool_choice=choice)
    assert [block["type"] for block in message["content"]] == ["text" if kind == "none" else "tool_use"]
    shown = await counted(client, messages=messages, tools=[TOOL], tool_choice=choice)
    assert (shown == await counted(client, messages=messages)) is (kind == "none")


async def test_one_call_at_most(serve: Any) -> None:
    client = serve(lambda prompt: f"{CALL}\n{CALL}", may_stray=True)
    for alone in (False, True):
        choice = {"type": "any", "disable_parallel_tool_use": alone}
        message = await posted(client, tools=[TOOL], tool_choice=choice)
        assert [block["type"] for block in message["content"]] == ["tool_use"] * (1 if alone else 2)


async def test_an_answer_in_a_schema(serve: Any) -> None:
    client = serve(lambda prompt: '{"number": "7"}')
    schema = {"type": "object", "properties": {"number": {"type": "string"}}, "required": ["number"]}
    message = await posted(client, output_config={"format": {"type": "json_schema", "schema": schema}})
    assert json.loads(message["content"][0]["text"]) == {"number": "7"}


# What is refused, and in which words

IMAGE = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1:1/x"}}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens is missing"),
    ({"max_tokens": 0}, "max_tokens: Input should be greater than or equal to 1"),
    ({"max_tokens": 10**9}, "max_tokens"),
    ({"temperature": 1.5}, "temperature: Input should be less than or equal to 1"),
    ({"top_k": -1}, "top_k"),
    ({"top_p": 2}, "top_p"),
    ({"temprature": 1}, "'temprature' is not supported: known: "),
    ({"n": 2}, "'n' is not supported"),
    ({"user": "x"}, "'user' is not supported"),
    ({"best_of": 1}, "'best_of' is not supported"),
    ({"stop": ["x"]}, "'stop' is not supported"),
    ({"stop_sequences": ["x"] * 17}, "stop_sequences: stop has 17 texts: at most 16"),
    ({"mcp_servers": [{"url": "http://127.0.0.1:1"}]}, "connect it to the MCP server"),
    ({"container": "x"}, "'container' is not supported: tools run at the client"),
    ({"thread": {"type": "continue", "previous_message_id": "msg_1"}}, "'thread' is not supported: no conversation is"),
    ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "nothing is removed"),
    ({"messages": []}, "messages must be a list of at least one message"),
    ({"messages": 7}, "messages: Input should be a valid list"),
    ({"messages": [said("tool", "x")]}, "messages[0].role: Input should be 'user', 'assistant' or 'system'"),
    ({"messages": [*HI, said("assistant", "Well,")]}, "messages: the last message is the assistant's"),
    ({"messages": [turn("user", "a", IMAGE)]}, "messages.0.content.1: a block of type 'image' is not supported"),
    ({"messages": [turn("user", {"type": "document"})]}, "messages.0.content.0: a block of type 'document'"),
    ({"messages": [*HI, turn("user", USE)]}, "messages.1.content.0: a block of type 'tool_use'"),
    ({"messages": [turn("user", {**RESULT, "content": [IMAGE]})]}, "0: a block of type 'image' is not supported"),
    ({"messages": [turn("assistant", {**USE, "input": "x"}), *HI]}, "messages.0.content.0.input: Input should be a va"),
    ({"system": [{"type": "image"}]}, "system"),
    ({"tools": [{"type": "web_search_20260318", "name": "x"}]}, "tools.0: a tool of type 'web_search_20260318'"),
    ({"tools": [TOOL, {"type": "bash_20250124", "name": "bash"}]}, "tools.1: a tool of type 'bash_20250124'"),
    ({"tools": [{**TOOL, "input_examples": [{}]}]}, "tools.0: 'input_examples' is not supported"),
    ({"tools": [{**TOOL, "defer_loading": True}]}, "tools.0"),
    ({"messages": [said("user", 7)]}, "messages[0].content: Input should be a valid string or a valid list"),
    ({"tools": [{"name": "x"}]}, "tools.0.input_schema: Field required"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name is missing"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice names 'other', which is not"),
    ({"tool_choice": {"type": "any"}}, "tool_choice forces a call, but there are no tools: send some"),
    ({"tools": [TOOL], "tool_choice": {"type": "required"}}, "tool_choice.type: Input should be 'auto'"),
    ({"thinking": {"type": "enabled", "budget_tokens": 5}}, "thinking.budget_tokens: Input should be greater than"),
    ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "thinking.budget_tokens must be less than max_tokens"),
    ({"thinking": {"type": "between_tools"}}, "thinking.type: Input should be 'enabled', 'disabled' or 'adaptive'"),
    ({"output_config": {"task_budget": {}}}, "output_config.task_budget: Extra inputs are not permitted"),
]  # fmt: skip


@pytest.mark.parametrize(("more", "complaint"), REFUSED, ids=str)
async def test_what_is_not_supported_is_refused_by_name(client: Any, more: dict[str, Any], complaint: str) -> None:
    answer = await client.post(MESSAGES, content=json.dumps(asked(**more)))
    assert answer.status_code == 400, answer.text
    check_error(answer, "invalid_request_error")
    assert complaint in answer.json()["error"]["message"]


async def test_tool_runners_learn_that_they_must_send_the_whole_conversation(client: Any) -> None:
    refused = await client.post(MESSAGES, json=asked(thread={"type": "create"}))
    assert refused.json()["error"]["details"] == {"error_code": "thread_unsupported_request"}
    assert (await posted(client, thread=None))["content"] == [{"type": "text", "text": "hi"}]


def check_error(answer: Any, kind: str) -> None:
    told = answer.json()
    assert told["error"].keys() - {"details"} == {"type", "message"}
    assert (told["type"], told["error"]["type"]) == ("error", kind)
    assert told["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]


@pytest.mark.parametrize(
    "more",
    [
        {"metadata": {"user_id": "u"}}, {"service_tier": "auto"}, {"cache_control": {"type": "ephemeral", "ttl": "1h"}},
        {"container": None, "mcp_servers": [], "context_management": {"edits": []}, "speed": "standard"},
        {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}},
        {"tools": [{**TOOL, "type": "custom", "cache_control": {"type": "ephemeral"}, "eager_input_streaming": True}]},
        {"tools": [], "tool_choice": None, "system": [], "stop_sequences": [], "thinking": None},
        {"top_k": 5, "top_p": 0.9, "temperature": 1.0}, {"top_k": 0}, {"output_config": {"effort": "high"}},
        {"system": [{"type": "text", "text": "x", "citations": None}]},
    ],
    ids=str,
)  # fmt: skip
async def test_what_cannot_change_an_answer_is_taken(client: Any, more: dict[str, Any]) -> None:
    beta = {"anthropic-beta": "x-2025-01-01,y"}
    answer = await client.post(f"{MESSAGES}?beta=true", json=asked(**more), headers=VERSION | beta)
    assert answer.status_code == 200, answer.text
    assert client.serving.num_ignored == 0


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"a": NaN}', b"[" * 100_000])
async def test_bodies_that_are_none(client: Any, body: bytes) -> None:
    for path in (MESSAGES, COUNT):
        answer = await client.post(path, content=body)
        assert answer.status_code == 400
        check_error(answer, "invalid_request_error")


async def test_errors_of_every_status_are_in_anthropics_form(serve: Any, path: Path) -> None:
    key = add_key(path, "desk", "shop")
    client = serve(lambda prompt: "x", keys=KeyFile(path), limits=ServerLimits(max_queued_per_key=1))
    mine = {"x-api-key": key}
    check_error(await client.post(MESSAGES, json=asked()), "authentication_error")
    check_error(await client.post(MESSAGES, json=asked(model="claude"), headers=mine), "not_found_error")
    check_error(await client.get(MESSAGES, headers=mine), "invalid_request_error")
    check_error(await client.post(f"{MESSAGES}/batches", json={}, headers=mine), "not_found_error")
    check_error(await client.post("/v1/files", headers=mine | VERSION), "not_found_error")
    check_error(await client.post(MESSAGES, content=b" " * 10_000_000, headers=mine), "request_too_large")
    with client.serving.places.held("desk", 1):
        for place in (MESSAGES, COUNT):
            body = asked() if place == MESSAGES else {"model": "scripted", "messages": HI}
            answer = await client.post(place, json=body, headers=mine)
            assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
            check_error(answer, "rate_limit_error")
    client.serving.closed = True
    answer = await client.post(MESSAGES, json=asked(), headers=mine)
    assert answer.status_code == 503
    check_error(answer, "overloaded_error")


async def test_a_stream_that_fails_ends_with_an_error(serve: Any) -> None:
    client = serve(lambda prompt: "x")
    client.serving.models["scripted"].engine.target.score = lambda *args: 1 / 0
    whole = await client.post(MESSAGES, json=asked())
    assert whole.status_code == 500
    check_error(whole, "api_error")
    last = events_in((await client.post(MESSAGES, json=asked(stream=True))).text)[-1]
    assert (last["type"], last["error"]["type"]) == ("error", "api_error")
    assert "zero" not in last["error"]["message"]


@pytest.mark.parametrize(
    "headers",
    [{"x-api-key": "KEY"}, {"Authorization": "Bearer KEY"}, {"Authorization": "Bearer other", "x-api-key": "KEY"}],
)
async def test_either_header_brings_the_key_on_every_route(serve: Any, path: Path, headers: dict[str, str]) -> None:
    key = add_key(path, "desk", "shop")
    client = serve(lambda prompt: "x", keys=KeyFile(path))
    mine = {name: value.replace("KEY", key) for name, value in headers.items()}
    for place in (MESSAGES, CHAT):
        assert (await client.post(place, json=asked(), headers=mine)).status_code == 200
        assert (await client.post(place, json=asked(), headers={"x-api-key": "pk-wrong"})).status_code == 401


async def test_models_in_anthropics_form_for_its_clients(client: Any) -> None:
    listed = (await client.get("/v1/models", headers=VERSION)).json()
    assert (listed["has_more"], listed["first_id"], listed["last_id"]) == (False, "scripted", "scripted")
    (model,) = listed["data"]
    assert (model["type"], model["id"]) == ("model", "scripted")
    assert (await client.get("/v1/models/scripted", headers=VERSION)).json() == model
    check_error(await client.get("/v1/models/claude", headers=VERSION), "not_found_error")
    assert (await client.get("/v1/models")).json()["object"] == "list"
