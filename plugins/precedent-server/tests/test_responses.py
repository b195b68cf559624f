"""`/v1/responses`: items in, items out, and the events of a stream in their order."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.responses import Response

from precedent_server.responses import messages_of
from precedent_server.settings import ServerLimits

CALL = '<tool_call>\n{"name": "look_up", "arguments": {"number": "10 €"}}\n</tool_call>'
TOOL = {
    "type": "function",
    "name": "look_up",
    "parameters": {"type": "object", "properties": {"number": {"type": "string"}}, "required": ["number"]},
}
ASKED: dict[str, Any] = {"model": "scripted", "input": "Hello?", "temperature": 0}


async def events(client: Any, **more: Any) -> list[dict[str, Any]]:
    answer = await client.post("/v1/responses", json={**ASKED, "stream": True, **more})
    assert answer.status_code == 200, answer.text
    found = []
    for event in answer.text.strip().split("\n\n"):
        named, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert named == f"event: {found[-1]['type']}"
    assert [one["sequence_number"] for one in found] == list(range(len(found)))
    return found


async def test_a_text(serve: Any) -> None:
    answer = await serve(["Good morning."]).post("/v1/responses", json=ASKED)
    found = Response.model_validate(answer.json())
    assert (found.output_text, found.status) == ("Good morning.", "completed")
    assert found.usage is not None
    assert found.usage.total_tokens == found.usage.input_tokens + found.usage.output_tokens
    assert answer.json()["speculation"]["num_steps"] >= 1


async def test_a_cut_text(serve: Any) -> None:
    answer = await serve(["Good morning."]).post("/v1/responses", json={**ASKED, "max_output_tokens": 2})
    found = Response.model_validate(answer.json())
    assert found.status == "incomplete"
    assert found.incomplete_details is not None
    assert found.incomplete_details.reason == "max_output_tokens"


async def test_a_stream_of_text(serve: Any) -> None:
    found = await events(serve(["Good morning."]))
    kinds = [one["type"] for one in found]
    text = "".join(one["delta"] for one in found if one["type"] == "response.output_text.delta")
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert text == "Good morning." == found[-4]["text"]
    assert Response.model_validate(found[-1]["response"]).output_text == text


async def test_log_probabilities_of_a_stream_are_those_of_the_whole(serve: Any) -> None:
    client, asked = serve(["Good morning."] * 2), {"top_logprobs": 1}
    whole = (await client.post("/v1/responses", json={**ASKED, **asked})).json()["output"][0]["content"][0]
    found = await events(client, **asked)
    told = [one for event in found if event["type"] == "response.output_text.delta" for one in event["logprobs"]]
    (done,) = (one for one in found if one["type"] == "response.output_text.done")
    last = found[-1]["response"]["output"][0]["content"][0]
    assert "".join(one["token"] for one in told).startswith("Good morning.")
    assert told == done["logprobs"] == last["logprobs"]
    assert [one["token"] for one in whole["logprobs"]][: len(told)] == [one["token"] for one in told]


async def test_calls(serve: Any) -> None:
    whole = await serve([f"Let me see.{CALL}"]).post("/v1/responses", json={**ASKED, "tools": [TOOL]})
    text, call = Response.model_validate(whole.json()).output
    assert (text.type, call.type) == ("message", "function_call")
    assert (call.name, json.loads(call.arguments)) == ("look_up", {"number": "10 €"})
    found = await events(serve([f"Let me see.{CALL}"]), tools=[TOOL])
    pieces = "".join(one["delta"] for one in found if one["type"] == "response.function_call_arguments.delta")
    assert json.loads(pieces) == {"number": "10 €"}
    items = [one["item"]["type"] for one in found if one["type"] == "response.output_item.done"]
    assert items == ["message", "function_call"]
    assert [one["type"] for one in found[-1]["response"]["output"]] == items


def test_items_become_turns() -> None:
    """What a client sends back: its own words, the model's thoughts, texts and calls, and results."""
    given = [
        {"role": "user", "content": [{"type": "input_text", "text": "Where is 10?"}]},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "Look."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "c1", "name": "look_up", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "look_up", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "sent"},
        {"type": "function_call_output", "call_id": "c2", "output": "lost"},
    ]
    system, user, assistant, first, second = messages_of(given, "Be brief.")
    assert (system["role"], system["content"], user["role"]) == ("system", "Be brief.", "user")
    assert (assistant["content"], assistant["reasoning_content"]) == ("I look.", "Look.")
    assert [call["id"] for call in assistant["tool_calls"]] == ["c1", "c2"]
    assert [(turn["tool_call_id"], turn["content"]) for turn in (first, second)] == [("c1", "sent"), ("c2", "lost")]


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"input": [{"type": "image_generation_call"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
        ({"input": []}, "input"),
        ({"text": {"verbosity": "low"}}, "text"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temprature": 1}, "temprature"),
    ],
)
async def test_what_is_refused_names_the_key_of_this_route(client: Any, more: Any, param: str) -> None:
    answer = await client.post("/v1/responses", json={**ASKED, **more})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


async def test_the_event_of_an_error_has_the_next_number(serve: Any) -> None:
    def fail(prompt: str) -> str:
        raise RuntimeError("no")

    found = await events(serve(fail))  # which checks the numbers
    assert [one["type"] for one in found] == ["response.created", "response.in_progress", "error"]


async def test_the_event_of_a_stream_that_takes_too_long_has_the_next_number(serve: Any) -> None:
    client = serve(["word " * 2000], limits=ServerLimits(request_seconds=0.3))
    found = await events(client, max_output_tokens=4000)
    assert found[-1]["type"] == "error"
    assert found[-1]["code"] == "timeout"


@pytest.mark.parametrize("role", [None, "tool", "nobody", ["user"]])
async def test_a_wrong_role_of_an_item_is_told_in_the_words_of_its_route(client: Any, role: Any) -> None:
    asked = {"model": "scripted", "input": [{"role": "user", "content": "Hi."}, {"role": role, "content": "Hi."}]}
    error = (await client.post("/v1/responses", json=asked)).json()["error"]
    assert error["param"] == "input"
    assert error["message"].startswith("input[1].role must be one of assistant, system, developer, user")
