"""Responses that a later request continues: what is kept, for whom, for how long, and what forgets it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI, NotFoundError

from precedent_server.keys import KeyFile, add_key
from precedent_server.response_store import KeptResponse, ResponseStore
from precedent_server.settings import ServerLimits

ROUTE = "/v1/responses"
CALL = '<tool_call>\n{"name": "look_up", "arguments": {"number": "7"}}\n</tool_call>'
TOOL = {"type": "function", "name": "look_up", "parameters": {"type": "object", "properties": {"number": {}}}}
ONE, TWO = ("desk", "shop"), ("other", "shop")


def heard(prompt: str) -> str:
    """Says what the users of the conversation said, and whether there are instructions; calls the tool it is given."""
    turns = [turn.partition("\n") for turn in prompt.split("<|im_start|>")]
    if "look_up" in prompt and not any("tool_response" in text for _, _, text in turns):
        return CALL
    said = [text.partition("<|im_end|>")[0].strip() for role, _, text in turns if role == "user"]
    return " | ".join([*said, "instructed" if "Be terse." in prompt else "free"])


async def asked(client: Any, given: Any, key: str | None = None, **more: Any) -> Any:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    body = {"model": "scripted", "input": given, "temperature": 0, **more}
    return await client.post(ROUTE, json=body, headers=headers)


def text_of(response: dict[str, Any]) -> str:
    return "".join(part["text"] for item in response["output"] for part in item.get("content", ()))


async def test_a_conversation_goes_on_without_its_instructions_whole_and_as_a_stream(serve: Any) -> None:
    client = serve(heard)
    openai = AsyncOpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none", max_retries=0, http_client=client)
    first = await openai.responses.create(model="scripted", input="one", instructions="Be terse.")
    assert (first.output_text, first.store, first.previous_response_id) == ("one | instructed", True, None)
    stream = await openai.responses.create(model="scripted", input="two", previous_response_id=first.id, stream=True)
    second = [event async for event in stream][-1].response
    assert (second.output_text, second.previous_response_id) == ("one | two | free", first.id)
    await openai.responses.delete(first.id)
    third = await openai.responses.create(model="scripted", input="three", previous_response_id=second.id)
    assert third.output_text == "one | two | three | free"
    again = await openai.responses.create(model="scripted", input="other", previous_response_id=second.id)
    assert again.output_text == "one | two | other | free", "a response may be continued twice"
    assert (await openai.responses.retrieve(third.id)).to_dict() == third.to_dict()
    with pytest.raises(NotFoundError):
        await openai.responses.retrieve(first.id)


async def test_a_tool_s_result_follows_the_call_that_was_kept(serve: Any) -> None:
    client = serve(heard)
    first = (await asked(client, "Where is 7?", tools=[TOOL])).json()
    (call,) = first["output"]
    result = [{"type": "function_call_output", "call_id": call["call_id"], "output": "sent"}]
    answer = await asked(client, result, tools=[TOOL], previous_response_id=first["id"])
    assert "Where is 7?" in text_of(answer.json())


async def test_only_its_own_key_can_name_a_response_and_not_one_that_was_not_stored(serve: Any, path: Path) -> None:
    tenants = {"desk": "shop", "other": "shop", "bank": "bank"}
    keys = {name: add_key(path, name, tenant) for name, tenant in tenants.items()}
    client = serve(heard, keys=KeyFile(path))
    kept = (await asked(client, "secret", keys["desk"])).json()["id"]
    unkept = (await asked(client, "secret", keys["desk"], store=False)).json()
    assert unkept["store"] is False
    for key, name in ((keys["other"], kept), (keys["bank"], kept), (keys["desk"], unkept["id"]), (keys["desk"], "x")):
        answer = await asked(client, "And?", key, previous_response_id=name)
        error = answer.json()["error"]
        assert (answer.status_code, error["type"], error["param"], error["code"]) == (
            404, "invalid_request_error", "previous_response_id", "previous_response_not_found",
        )  # fmt: skip
        for method in ("GET", "DELETE"):
            answer = await client.request(method, f"{ROUTE}/{name}", headers={"Authorization": f"Bearer {key}"})
            assert (answer.status_code, answer.json()["error"]["type"]) == (404, "invalid_request_error")
    assert text_of((await asked(client, "And?", keys["desk"], previous_response_id=kept)).json()).startswith("secret")
    assert (await client.get(f"{ROUTE}/{kept}")).status_code == 401


async def test_what_a_cache_forgets_ends_all_that_was_stored(serve: Any) -> None:
    client = serve(heard)
    kept = (await asked(client, "secret")).json()["id"]
    cache = client.serving.models["scripted"].engine.cache
    await asyncio.to_thread(cache.forget, tenant="default")
    assert (await client.get(f"{ROUTE}/{kept}")).status_code == 404


async def test_what_is_forgotten_while_an_answer_is_written_is_not_stored_with_it(serve: Any) -> None:
    def forgetful(prompt: str) -> str:
        client.serving.response_store.clear()
        return "x"

    client = serve(forgetful)
    name = (await asked(client, "secret")).json()["id"]
    assert (await client.get(f"{ROUTE}/{name}")).status_code == 404


async def test_a_long_conversation_is_bounded_by_the_context(serve: Any) -> None:
    client, name = serve(lambda prompt: "x"), {}
    for _ in range(20):
        answer = await asked(client, "word " * 900, **name)
        if answer.status_code != 200:
            break
        name = {"previous_response_id": answer.json()["id"]}
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")


async def test_a_stored_response_is_not_streamed_again(client: Any) -> None:
    answer = await client.get(f"{ROUTE}/x", params={"stream": "true"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stream")


LIMITS = ServerLimits(max_stored_per_key=3, max_stored_bytes_per_key=900, max_stored_bytes=1200, stored_seconds=60)

BOUNDS: dict[str, tuple[list[tuple[Any, ...]], list[str], list[str]]] = {
    "number": ([(ONE, "a", 10), (ONE, "b", 10), (ONE, "c", 10), (ONE, "a"), (ONE, "d", 10)], ["a", "c", "d"], []),
    "bytes of a key": ([(ONE, "a", 100), (ONE, "b", 150), (ONE, "c", 100)], ["b", "c"], []),
    "longer than all": ([(ONE, "a", 100), (ONE, "b", 301)], ["a"], []),
    "bytes of all": ([(ONE, "a", 10), (ONE, "b", 250), (TWO, "a", 150)], ["b"], ["a"]),
    "age": ([(ONE, "a", 10), (ONE, "b", 10), 50, (ONE, "b"), 20], ["b"], []),
}
"""What is done, and what is left of each key: responses of a third of their bytes, uses, and seconds that pass."""


@pytest.mark.parametrize("bound", BOUNDS)
def test_the_least_recently_used_are_dropped_at_each_bound(bound: str) -> None:
    done, left, left_of_other = BOUNDS[bound]
    now = [0.0]
    store = ResponseStore(LIMITS, lambda: now[0])
    for what in done:
        if isinstance(what, int):
            now[0] += what
        elif len(what) == 2:
            assert store.get(*what) is not None
        else:
            owner, name, size = what
            store.keep(owner, name, KeptResponse(b"x" * size, (b"y" * size, b"z" * size)), store.num_cleared)
    assert [name for name in "abcd" if store.drop(ONE, name)] == left
    assert [name for name in "abcd" if store.drop(TWO, name)] == left_of_other
