"""One table of requests that are refused, of all routes: each by the key of its own route, in OpenAI's form.

The commonest are among the golden transcripts.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

CHAT, TEXTS, RESPONSES, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
HI = [{"role": "user", "content": "hi"}]
BROKEN = {"function": {"name": "f", "arguments": "no JSON"}}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HI},
    TEXTS: {"prompt": "hi"},
    RESPONSES: {"input": "hi"},
    EMBEDDINGS: {"input": "hi"},
    TOKENIZE: {"prompt": "hi"},
    DETOKENIZE: {"tokens": [1]},
}


def tool(path: str, name: str) -> dict[str, Any]:
    return {"type": "function", "name": name} if path == RESPONSES else {"type": "function", "function": {"name": name}}


def allowed(path: str, mode: str, *names: str) -> dict[str, Any]:
    """A choice among three tools."""
    choice = {"mode": mode, "tools": [tool(path, name) for name in names]}
    choice = choice if path == RESPONSES else {"allowed_tools": choice}
    tools = [tool(path, name) for name in ("look_up", "refund", "cancel")]
    return {"tools": tools, "tool_choice": {"type": "allowed_tools", **choice}}


def runs_elsewhere(path: str, kind: str) -> dict[str, Any]:
    return {"tools": [tool(path, "refund"), {"type": kind, "name": "x"}]}


REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    (CHAT, {"n": 0}, "n", "between 1 and 16"),
    (CHAT, {"functions": []}, "functions", "write tools"),
    (CHAT, {"response_format": {"type": "json_schema"}}, "response_format", "_format.json_schema: Field required"),
    (CHAT, {"response_format": {"type": "xml"}}, "response_format", "response_format.type: Input should be 'text' or"),
    (CHAT, {"tool_choice": "required"}, "tool_choice", "there are no tools: send some"),
    (RESPONSES, {"tool_choice": {"type": "function", "name": "x"}}, "tool_choice", "is not among tools: none"),
    (CHAT, {"tenant": "other"}, "tenant", "API key"),
    (CHAT, {"temperature": "hot"}, "temperature", "number"),
    (CHAT, {"temperature": -1, "stream": True}, "temperature", "temperature"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages[0]", "content"),
    (CHAT, {"messages": [{"role": "user", "content": "x" * 20_000}]}, "messages", "context"),
    (CHAT, {"messages": [{"role": "tool", "content": {}}]}, "messages[0].content", "list of parts"),
    (CHAT, {"messages": [{"role": "assistant", "content": {}}]}, "messages[0].content", "list of parts"),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": {}}]}, "messages[0].tool_calls", "list"),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": ""}]}, "messages[0].tool_calls", "list"),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{"type": "custom"}]}]}, "messages[0]", "functions"),
    (CHAT, {"messages": [{"role": "assistant", "function_call": 5}]}, "messages[0].function_call", "object"),
    (
        CHAT,
        {"messages": [{"role": "assistant", "tool_calls": [{"type": "custom", **BROKEN}]}]},
        "messages[0].tool_calls",
        "functions",
    ),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{"id": 5, **BROKEN}]}]}, "messages[0]", "string"),
    (CHAT, {"messages": [{"role": "assistant", "function_call": {}}]}, "messages[0].function_call.name", "text"),
    (
        CHAT,
        {"messages": [{"role": "assistant", "function_call": {"name": "f", "arguments": 5}}]},
        "messages[0].function_call.arguments",
        "JSON text",
    ),
    (CHAT, {"messages": [{"role": "assistant", "refusal": {}}]}, "messages[0].content", "list of parts"),
    (CHAT, {"messages": [{"role": "assistant", "content": "x", "refusal": 5}]}, "messages[0]", "string"),
    (
        RESPONSES,
        {"input": [{"role": "user", "content": [{"type": ["text"], "text": "x"}]}]},
        "input",
        "only text is read",
    ),
    (CHAT, {"stop": ["x"] * 17}, "stop", "at most 16"),
    *((CHAT, {"logit_bias": {token: 1}}, "logit_bias", "token ids") for token in ("", "a", "1.5")),
    (CHAT, {"logit_bias": dict.fromkeys(map(str, range(16_385)), 1)}, "logit_bias", "16,385 entries: at most 16,384"),
    (CHAT, {"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "differ"),
    (CHAT, {"speculation": {"write_bak": False}}, "", "write_bak"),
    (CHAT, {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "messages"),
    (CHAT, {"response_format": {"type": "yaml"}}, "response_format", ""),
    (CHAT, {"top_k": 1.5}, "top_k", ""),
    (CHAT, {"top_k": -2}, "top_k", ""),
    (CHAT, {"stream_options": {"include_sources": 1}}, "stream_options", "valid boolean"),
    (CHAT, {"stream_options": {"include_source": True}}, "stream_options", ""),
    *((CHAT, {"best_of": number}, "best_of", "") for number in (2, True)),
    (CHAT, {"min_tokens": 5}, "min_tokens", ""),
    (
        CHAT,
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"pattern": "x" * 1001}}}},
        "response_format",
        "a pattern is longer",
    ),
    (CHAT, {"messages": [{"role": "user", "content": "x"}] * 16_385}, "messages", "16,385 messages"),
    (CHAT, {"verbosity": "low"}, "verbosity", "max_completion_tokens"),
    (CHAT, {"ignore_eos": True}, "ignore_eos", ""),
    (TEXTS, {"best_of": 2}, "best_of", "ask for n"),
    (TEXTS, {"suffix": "x"}, "suffix", "into the prompt"),
    *((TEXTS, {"prompt": prompt}, "prompt", "") for prompt in ([], [[]], [10**9], [-1])),
    (TEXTS, {"prompt": ["x"] * 17}, "n", "between 1 and 16"),
    (TEXTS, {"echo": True, "logprobs": 1, "stream": True}, "echo", "not streamed"),
    (TEXTS, {"echo": True, "logprobs": 6}, "logprobs", "at most 5 with echo"),
    (TEXTS, {"max_tokens": 0}, "max_tokens", "at least 1"),
    (TOKENIZE, {"messages": HI}, "prompt", "one of the two"),
    (TOKENIZE, {"prompt": None}, "prompt", "one of the two"),
    (TOKENIZE, {"prompt": ["a", "b"]}, "prompt", "valid string"),
    (TOKENIZE, {"prompt": "word " * 150_000}, "prompt", "more than"),
    (TOKENIZE, {"tools": []}, "tools", "for messages"),
    *(
        (TOKENIZE, {"prompt": None, "messages": HI, **more}, name, "")
        for name, more in {
            "add_special_tokens": {"add_special_tokens": True},
            "continue_final_message": {"continue_final_message": True},
            "messages": {"messages": [{"role": "user", "content": "word " * 150_000}]},
            "messages[0]": {"messages": [{"role": "nobody"}]},
            "tools": {"tools": [{"type": "web_search"}]},
            "chat_template_kwargs": {"chat_template_kwargs": {"messages": []}},
        }.items()
    ),
    *((DETOKENIZE, {"tokens": ids}, "tokens", said) for ids, said in ((["a"], "integer"), ([-1], "knows 0 to"))),
    (DETOKENIZE, {"tokens": [10**9]}, "tokens", "knows 0 to"),
    (DETOKENIZE, {"tokens": [1] * 262_145}, "", "values"),
    *((EMBEDDINGS, {"input": texts}, "input", "") for texts in ("", [], ["x", ""], ["x"] * 257, ["x", "x" * 32_769])),
    (RESPONSES, {"temprature": 1}, "temprature", "known: "),
    (RESPONSES, {"background": True}, "background", ""),
    (RESPONSES, {"conversation": "conv_1"}, "conversation", "previous_response_id"),
    (RESPONSES, {"previous_response_id": 7}, "previous_response_id", "valid string"),
    (RESPONSES, {"include": ["file_search_call.results"]}, "include", ""),
    (RESPONSES, {"input": []}, "input", ""),
    (RESPONSES, {"input": [{"type": "image_generation_call"}]}, "input", ""),
    (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input", "only text"),
    *(
        (
            RESPONSES,
            {"input": [*HI, {"role": role, "content": "hi"}]},
            "input",
            "input[1].role must be one of assistant",
        )
        for role in (None, "tool", "nobody", ["user"])
    ),
    (RESPONSES, {"text": {"verbosity": "low"}}, "text", ""),
    (RESPONSES, {"reasoning": {"depth": 3}}, "reasoning", "known: effort"),
    (RESPONSES, {"truncation": "middle"}, "truncation", ""),
    (RESPONSES, {"max_output_tokens": 0}, "max_output_tokens", ""),
    *(
        (path, {name: number}, name, said)
        for path, name in ((CHAT, "max_tokens"), (TEXTS, "max_tokens"), (RESPONSES, "max_output_tokens"))
        for number, said in ((10**9, "context"), (10**30, ""))
    ),
]
for route in (CHAT, RESPONSES):
    for choice in (("auto", "other"), ("auto",), ("sometimes", "refund")):
        REFUSED.append((route, allowed(route, *choice), "tool_choice", ""))
    for kind in ("web_search_2025_08_26", "code_interpreter", "mcp", "custom"):
        REFUSED.append((route, runs_elsewhere(route, kind), "tools", repr(kind)))
for place in ("file:///etc/passwd", "http://127.0.0.1:1/x", "/etc/passwd", "data:text/plain,x"):
    # Only texts are read; a test may not open a socket, so one that did would fail.
    for kind in ("image_url", "input_audio", "file"):
        part = {"type": kind, kind: {"url": place, "data": place, "format": "wav", "file_id": place}}
        said = f"messages[0].content[0] is of type {kind!r}: only text is read"
        REFUSED.append((CHAT, {"messages": [{"role": "user", "content": [part]}]}, "messages[0].content[0]", said))


@pytest.mark.parametrize(
    ("path", "more", "param", "said"),
    REFUSED,
    ids=[f"{path[4:8]}-{param}-{n}" for n, (path, _, param, _) in enumerate(REFUSED)],
)
async def test_what_is_not_supported_is_refused_by_name(
    client: Any, path: str, more: dict[str, Any], param: str, said: str
) -> None:
    answer = await client.post(path, json={"model": "scripted", **BODIES[path], **more})
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error"), error
    assert (error["param"] or "").startswith(param), error
    assert said in error["message"]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b'{"a": NaN}', b"[" * 100_000, b'{"a":' * 3000])
async def test_bodies_that_are_none(client: Any, body: bytes) -> None:
    answer = await client.post(CHAT, content=body)
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")


TAKEN: list[tuple[str, dict[str, Any]]] = [
    *((CHAT, habit) for habit in ({"user": "u"}, {"store": True}, {"metadata": {"a": "b"}}, {"service_tier": "auto"})),
    *((path, more) for path in (CHAT, TEXTS) for more in ({"best_of": 1}, {"min_tokens": 0}, {"top_k": -1})),
    *((path, {"stream_options": {"include_usage": True}}) for path in (CHAT, TEXTS)),
    *((CHAT, {name: value}) for name, value in {
        "verbosity": "medium", "ignore_eos": False, "use_beam_search": False, "skip_special_tokens": True,
        "length_penalty": 1.0, "audio": None, "tool_choice": None, "tools": None, "logit_bias": None,
        "response_format": {"type": "text", "json_schema": None},
    }.items()),
    *((CHAT, {"tools": [{"type": "function", "function": {"name": "f", **more}}]})
      for more in ({"description": None}, {"strict": None}, {"parameters": None})),
    (CHAT, {"stream_options": {"include_usage": None}, "stream": True}),
    *((RESPONSES, {"reasoning": {"summary": kind, "effort": None}}) for kind in ("auto", "detailed", None)),
    *((RESPONSES, {"truncation": kind}) for kind in ("auto", "disabled")),
    (RESPONSES, {"text": {"verbosity": "medium"}}),
    (RESPONSES, {"text": {"format": None, "verbosity": None}}),
    (RESPONSES, {"background": False, "previous_response_id": None}),
    (RESPONSES, {"stream": True, "stream_options": {"include_obfuscation": False}}),
    (RESPONSES, {"input": [{"role": "user", "content": "hi", "id": None, "status": None}]}),
    (RESPONSES, {"tools": [{"type": "function", "name": "f", "description": None, "strict": None}]}),
]  # fmt: skip


@pytest.mark.parametrize(("path", "more"), TAKEN, ids=str)
@pytest.mark.sampled(2)
async def test_habits_nulls_and_values_that_ask_for_nothing_are_taken(client: Any, path: str, more: Any) -> None:
    answer = await client.post(path, json={"model": "scripted", **BODIES[path], **more})
    assert answer.status_code == 200, answer.text
    assert "hi" in answer.text


@pytest.mark.parametrize("path", [CHAT, TEXTS, RESPONSES])
async def test_the_known_keys_are_listed_once(client: Any, path: str) -> None:
    known = (await client.post(path, json={"temprature": 1})).json()["error"]["message"].partition("known: ")[2]
    assert "temperature" in known.split(", ")
    assert len(known.split(", ")) == len(set(known.split(", ")))


@pytest.mark.parametrize(
    "pattern", [".*" * 300, "(a+)+$" * 50, "(a{1,1000}){1,1000}", "((((a{1,30}){1,30}){1,30}){1,30})"]
)
async def test_costly_patterns_are_answered_or_refused_at_once(serve: Any, pattern: str) -> None:
    """Llguidance bounds the work of every grammar; one that it gives up on is the caller's."""
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": pattern}}, "required": ["a"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}
    client = serve(lambda prompt: json.dumps({"a": "a"}), may_stray=True)
    answer = await client.post(
        CHAT, json={"model": "scripted", **BODIES[CHAT], "max_tokens": 9, "response_format": wanted}
    )
    if answer.status_code != 200:
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported_value"), answer.text
