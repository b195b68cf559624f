"""What openai-python sees of every route: what the model wrote, whole and streamed alike."""

from __future__ import annotations

import json
from typing import Any

import pytest
from langchain_core.exceptions import ContextOverflowError
from openai import AsyncOpenAI, BadRequestError, NotFoundError, pydantic_function_tool
from pydantic import BaseModel

from precedent_server.client import ChatPrecedentServer
from precedent_server.keys import KeyFile, add_key
from precedent_server.settings import ServerLimits

ADA = '{"name": "Ada", "born": 1815}'
CALL = '<tool_call>\n{"name": "look_up", "arguments": {"number": "10 €"}}\n</tool_call>'
LOOK_UP: dict[str, Any] = {
    "name": "look_up",
    "parameters": {"type": "object", "properties": {"number": {"type": "string"}}, "required": ["number"]},
}
TOOL: Any = {"type": "function", "function": LOOK_UP}
ITEM: Any = {"type": "function", "strict": False, **LOOK_UP}
USAGE: Any = {"include_usage": True}


class Person(BaseModel):
    name: str
    born: int


class look_up(BaseModel):
    number: str


def user(text: str) -> Any:
    return [{"role": "user", "content": text}]


async def chat(openai: AsyncOpenAI, text: str, **more: Any) -> Any:
    return await openai.chat.completions.create(
        model="scripted", messages=user(text), **{"temperature": 0, "max_tokens": 200, **more}
    )


async def chunks(openai: AsyncOpenAI, text: str, **more: Any) -> list[Any]:
    return [chunk async for chunk in await chat(openai, text, stream=True, stream_options=USAGE, **more)]


def text_of(told: list[Any]) -> str:
    return "".join(choice.delta.content or "" for chunk in told for choice in chunk.choices)


async def test_a_chat(openai: AsyncOpenAI) -> None:
    text, asked = "Good morning, Zoë! This is long enough to be predicted.", {"logprobs": True, "top_logprobs": 2}
    answer = await chat(openai, text, prediction={"type": "content", "content": text}, **asked)
    (choice,) = answer.choices
    assert (choice.message.content, choice.finish_reason, choice.index) == (text, "stop", 0)
    assert answer.usage.completion_tokens == len(choice.logprobs.content)
    assert answer.usage.completion_tokens_details.accepted_prediction_tokens > 10
    assert all(len(one.top_logprobs) == 2 for one in choice.logprobs.content)
    assert answer.speculation["num_steps"] >= 1
    streamed = await chunks(openai, text, **asked)
    assert streamed[0].choices[0].delta.role == "assistant"
    assert text_of(streamed) == text
    assert [chunk.choices[0].finish_reason for chunk in streamed if chunk.choices][-1] == "stop"
    assert (streamed[-1].choices, streamed[-1].usage.total_tokens) == ([], answer.usage.total_tokens)
    assert all(chunk.usage is None for chunk in streamed[:-1])
    assert len({chunk.id for chunk in streamed}) == 1
    told = [one for chunk in streamed for choice in chunk.choices if choice.logprobs for one in choice.logprobs.content]
    assert [one.token for one in told] == [one.token for one in choice.logprobs.content]


async def test_calls_of_a_chat_and_their_results(openai: AsyncOpenAI) -> None:
    said = f"Let me see.{CALL}\n{CALL}"
    (choice,) = (await chat(openai, said, tools=[TOOL])).choices
    calls = choice.message.tool_calls
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me see.")
    assert [(one.function.name, json.loads(one.function.arguments)) for one in calls] == [
        ("look_up", {"number": "10 €"})
    ] * 2
    streamed = await chunks(openai, said, tools=[TOOL])
    deltas = [delta for chunk in streamed[:-1] for delta in chunk.choices[0].delta.tool_calls or ()]
    assert [(one.index, one.function.name) for one in deltas if one.id] == [(0, "look_up"), (1, "look_up")]
    written = ["".join(one.function.arguments for one in deltas if one.index == index) for index in range(2)]
    assert written == [one.function.arguments for one in calls]
    assert (streamed[-2].choices[0].finish_reason, text_of(streamed)) == ("tool_calls", "Let me see.")
    results: list[Any] = [{"role": "tool", "tool_call_id": one.id, "content": "sent"} for one in calls]
    messages = [*user(said), choice.message, *results, *user("And now?")]
    after = await openai.chat.completions.create(model="scripted", messages=messages, tools=[TOOL])
    assert after.choices[0].message.content == "And now?"


async def test_calls_are_forced_forbidden_and_parsed(openai: AsyncOpenAI) -> None:
    for choice in ("required", {"type": "function", "function": {"name": "look_up"}}):
        answer = await chat(openai, CALL, tools=[TOOL], tool_choice=choice, parallel_tool_calls=False)
        assert [call.function.name for call in answer.choices[0].message.tool_calls] == ["look_up"]
    (choice,) = (await chat(openai, "Just a text.", tools=[TOOL], tool_choice="none")).choices
    assert (choice.message.content, choice.message.tool_calls) == ("Just a text.", None)
    tools = [pydantic_function_tool(look_up)]
    async with openai.chat.completions.stream(model="scripted", messages=user(CALL), tools=tools) as stream:
        (done,) = [event async for event in stream if event.type == "tool_calls.function.arguments.done"]
    assert (done.name, json.loads(done.arguments)) == ("look_up", {"number": "10 €"})
    parsed = await openai.chat.completions.parse(model="scripted", messages=user(CALL), tools=tools)
    (call,) = parsed.choices[0].message.tool_calls or ()
    assert call.function.parsed_arguments == look_up(number="10 €")


@pytest.mark.parametrize("mode", ["auto", "required"])
@pytest.mark.parametrize("route", ["chat/completions", "responses"])
async def test_only_the_allowed_tools_are_shown_and_the_mode_holds(serve: Any, route: str, mode: str) -> None:
    """The model would rather talk; a required call is forced, to a tool that is allowed."""
    prompts = list[str]()
    client, of_items = serve(lambda prompt: prompts.append(prompt) or "No.", may_stray=True), route == "responses"  # type: ignore[func-returns-value]
    look_up, refund, cancel = (
        {"type": "function", **(named if of_items else {"function": named})}
        for named in ({**LOOK_UP, "name": name} for name in ("look_up", "refund", "cancel"))
    )
    choice: Any = {"mode": mode, "tools": [refund, cancel]}
    asked = {"input": "hi", "max_output_tokens": 200} if of_items else {"messages": user("hi"), "max_tokens": 200}
    asked |= {"model": "scripted", "tools": [look_up, refund, cancel], "temperature": 0}
    asked["tool_choice"] = {"type": "allowed_tools", **(choice if of_items else {"allowed_tools": choice})}
    answer = await client.post(f"/v1/{route}", json=asked)
    assert answer.status_code == 200, answer.text
    assert [f'"{name}"' in prompts[0] for name in ("look_up", "refund", "cancel")] == [False, True, True]
    answered = json.dumps(answer.json()["output" if of_items else "choices"])
    assert ('"refund"' in answered or '"cancel"' in answered) is (mode == "required")


async def test_structured_answers(openai: AsyncOpenAI) -> None:
    for wanted in ({"type": "json_object"}, {"type": "json_schema", "json_schema": {"name": "person", "schema": {}}}):
        assert json.loads((await chat(openai, ADA, response_format=wanted)).choices[0].message.content)["born"] == 1815
    asked: Any = {"model": "scripted", "messages": user(ADA), "response_format": Person}
    async with openai.chat.completions.stream(**asked) as stream:
        kinds = {event.type async for event in stream}
        final = await stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    for completion in (final, await openai.chat.completions.parse(**asked)):
        assert completion.choices[0].message.parsed == Person(name="Ada", born=1815)
    asked = {"model": "scripted", "input": ADA, "text_format": Person}
    async with openai.responses.stream(**asked) as of_items:
        assert {event.type async for event in of_items} >= {"response.output_text.delta", "response.completed"}
        assert (await of_items.get_final_response()).output_parsed == Person(name="Ada", born=1815)
    assert (await openai.responses.parse(**asked)).output_parsed == Person(name="Ada", born=1815)


async def test_completions(openai: AsyncOpenAI) -> None:
    asked: Any = {"model": "scripted", "prompt": "Once upon", "max_tokens": 50, "temperature": 0, "logprobs": 2}
    answer = await openai.completions.create(**asked)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (" Once upon", "stop")
    told = answer.choices[0].logprobs
    assert told is not None
    assert "".join(told.tokens or ()).startswith(" Once upon")
    assert len(told.tokens or ()) == len(told.token_logprobs or ()) == len(told.text_offset or ()) > 1
    streamed = [chunk async for chunk in await openai.completions.create(**asked, stream=True, stream_options=USAGE)]
    choices = [choice for chunk in streamed for choice in chunk.choices]
    assert "".join(choice.text for choice in choices) == " Once upon"
    assert [choice.finish_reason for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
    assert [one for choice in choices if choice.logprobs for one in choice.logprobs.tokens or ()] == told.tokens
    assert (streamed[-1].choices, streamed[-1].usage.total_tokens) == ([], answer.usage.total_tokens)  # type: ignore[union-attr]
    asked = {"model": "scripted", "prompt": ["One", "Two"], "n": 2, "max_tokens": 50, "echo": True}
    several = await openai.completions.create(**asked)
    assert [one.text for one in several.choices] == ["One One", "One One", "Two Two", "Two Two"]
    texts = dict[int, str]()
    async for chunk in await openai.completions.create(**asked, stream=True):
        texts[chunk.choices[0].index] = texts.get(chunk.choices[0].index, "") + chunk.choices[0].text
    assert [texts[index] for index in range(4)] == [one.text for one in several.choices]


async def test_embeddings_and_models(openai: AsyncOpenAI) -> None:
    for asked in ({"encoding_format": "float"}, {"encoding_format": "base64"}, {}):
        found = await openai.embeddings.create(model="scripted", input=["one", "two", "one"], **asked)  # type: ignore[arg-type]
        vectors = [one.embedding for one in found.data]
        assert vectors[0] == vectors[2] != vectors[1]
        assert (found.usage.prompt_tokens, isinstance(vectors[0], str)) == (3, asked.get("encoding_format") == "base64")
    assert [model.id async for model in openai.models.list()] == ["scripted"]
    assert (await openai.models.retrieve("scripted")).owned_by == "precedent"


async def items(openai: AsyncOpenAI, text: str, **more: Any) -> list[Any]:
    """The events of a stream of Responses, in their order."""
    asked = {"model": "scripted", "input": text, "temperature": 0, "stream": True, **more}
    found = [event async for event in await openai.responses.create(**asked)]
    assert [event.sequence_number for event in found] == list(range(len(found)))
    return found


async def test_responses(openai: AsyncOpenAI) -> None:
    asked: Any = {"model": "scripted", "input": "Good morning.", "instructions": "Be brief.", "top_logprobs": 1}
    answer: Any = await openai.responses.create(**asked)
    assert (answer.status, answer.output_text) == ("completed", "Good morning.")
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    assert answer.speculation["num_steps"] >= 1
    found = await items(openai, "Good morning.", instructions="Be brief.", top_logprobs=1)
    kinds = [event.type.removeprefix("response.") for event in found]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    deltas = [event for event in found if event.type == "response.output_text.delta"]
    assert "".join(event.delta for event in deltas) == found[-1].response.output_text == "Good morning."
    told = [one.token for event in deltas for one in event.logprobs]
    assert told == [one.token for one in found[-4].logprobs]
    assert told == [one.token for one in answer.output[0].content[0].logprobs][: len(told)]
    cut = await openai.responses.create(model="scripted", input="Good morning.", max_output_tokens=2)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")  # type: ignore[union-attr]


async def test_calls_of_responses_and_their_results(openai: AsyncOpenAI) -> None:
    said = f"Let me see.{CALL}"
    answer = await openai.responses.create(model="scripted", input=said, tools=[ITEM])
    found = await items(openai, said, tools=[ITEM])
    pieces = "".join(event.delta for event in found if event.type == "response.function_call_arguments.delta")
    assert json.loads(pieces) == {"number": "10 €"}
    for output in (answer.output, [event.item for event in found if event.type == "response.output_item.done"]):
        text, call = output
        assert (text.type, call.type, call.name) == ("message", "function_call", "look_up")
        assert json.loads(call.arguments) == {"number": "10 €"}
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sent"}
    turns: Any = [*user(said), *(one.to_dict() for one in answer.output), result, *user("And now?")]
    assert (await openai.responses.create(model="scripted", input=turns, tools=[ITEM])).output_text == "And now?"


@pytest.mark.parametrize("too_long", [False, True])
async def test_the_event_of_an_error_has_the_next_number(serve: Any, openai: AsyncOpenAI, too_long: bool) -> None:
    def script(prompt: str) -> str:
        return " ".join(map(str, range(3000))) if too_long else str(1 / 0)

    client = serve(script, limits=ServerLimits(request_seconds=1 if too_long else 600))
    answer = await client.post(
        "/v1/responses", json={"model": "scripted", "input": "hi", "stream": True, "max_output_tokens": 12_000}
    )
    found = [json.loads(line[6:]) for line in answer.text.split("\n") if line.startswith("data: ")]
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    assert (found[-1]["type"], found[-1]["code"]) == ("error", "timeout" if too_long else None)


async def test_an_unknown_model(openai: AsyncOpenAI) -> None:
    for asked in (
        chat(openai, "Hi.", extra_body={"model": "gpt"}),
        openai.completions.create(model="gpt", prompt="Hi."),
        openai.embeddings.create(model="gpt", input="Hi."),
        openai.responses.create(model="gpt", input="Hi."),
        openai.models.retrieve("gpt"),
    ):
        with pytest.raises(NotFoundError) as caught:
            await asked
        assert caught.value.code == "model_not_found"


async def test_a_failed_request_says_nothing_about_the_process(client: Any, openai: AsyncOpenAI) -> None:
    """The grammar does not allow what the script wants to write."""
    answer = await client.post(
        "/v1/chat/completions",
        json={"model": "scripted", "messages": user("no JSON"), "response_format": {"type": "json_object"}},
    )
    assert answer.status_code == 500
    assert answer.json()["error"]["message"] == "the server failed to answer this request; its log says why"
    with pytest.raises(BadRequestError) as caught:
        await chat(openai, "x" * 100_000)
    assert caught.value.code == "context_length_exceeded"
    assert "prompt is too long" in caught.value.message  # by which langchain-openai and langchain-anthropic know it
    llm = ChatPrecedentServer(model="scripted", base_url="http://127.0.0.1:8000", http_async_client=client)
    with pytest.raises(ContextOverflowError):
        await llm.ainvoke("x" * 100_000)


async def ids_of(client: Any, headers: Any = None, **more: Any) -> list[str]:
    """The ids of the calls of a chat's answers, or of a response's."""
    route = "/v1/responses" if "input" in more else "/v1/chat/completions"
    asked = {} if "input" in more else {"messages": user("hi"), "tools": [TOOL], "temperature": 0}
    answer = await client.post(route, json={"model": "scripted", **asked, **more}, headers=headers)
    assert answer.status_code == 200, answer.text
    if "input" in more:
        return [item["call_id"] for item in answer.json()["output"] if item["type"] == "function_call"]
    if not more.get("stream"):
        return [call["id"] for choice in answer.json()["choices"] for call in choice["message"]["tool_calls"]]
    events = [json.loads(line[6:]) for line in answer.text.split("\n\n") if line.startswith("data: {")]
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    return [call["id"] for delta in deltas for call in delta.get("tool_calls", ()) if "id" in call]


async def test_samples_streams_routes_and_repeated_requests_share_no_id_of_a_call(serve: Any) -> None:
    client = serve(lambda prompt: f"{CALL}\n{CALL}")
    ids = await ids_of(client, n=3)
    for more in ({"seed": 1}, {"seed": 1, "n": 3}, {}):
        ids += await ids_of(client, **more) + await ids_of(client, stream=True, **more)
    for _ in range(2):
        ids += await ids_of(client, input="Where is it?", tools=[ITEM])
    assert len(ids) == 6 + 2 * (2 * 2 + 6) + 4
    assert len(set(ids)) == len(ids)


async def test_tenants_share_no_id_of_a_call(serve: Any, path: Any) -> None:
    keys = [add_key(path, tenant, tenant) for tenant in ("shop", "bank")]
    client = serve(lambda prompt: CALL, keys=KeyFile(path))
    ids = [one for key in keys for one in await ids_of(client, {"Authorization": f"Bearer {key}"})]
    assert len(set(ids)) == len(ids) == 2
