"""Requests to a real vLLM, the same for every server, and what came back: plain data that can be compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

from langchain_openai import ChatOpenAI
from openai import OpenAI

from helpers.vllm_server import NAME, VllmServer

GREEDY: dict[str, Any] = {"model": NAME, "temperature": 0.0, "max_tokens": 48}
LONG: dict[str, Any] = {**GREEDY, "extra_body": {"ignore_eos": True}}
"""The desk's model answers in a few words: here it has to go on."""

QUESTIONS = (
    "I want to return my order. What do I have to do?",
    "Please tell me about the city of Paris.",
    "List the first ten even numbers.",
    "What is a database?",
    "Write a short letter to a customer whose parcel is late.",
    "Explain in one sentence why the sky is blue.",
)

LOOK_UP = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look up an order.",
        "parameters": {"type": "object", "properties": {"order": {"type": "string"}}, "required": ["order"]},
    },
}

REFUND = {
    "type": "object",
    "properties": {"order": {"type": "string", "maxLength": 12}, "reason": {"enum": ["late", "broken", "other"]}},
    "required": ["order", "reason"],
    "additionalProperties": False,
}


def messages(question: str) -> list[Any]:
    return [{"role": "user", "content": question}]


def long_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings of a long greedy answer, and those given here."""
    body = {**LONG["extra_body"], **settings.get("extra_body", {})}
    return {**LONG, **settings, "extra_body": body}


def chat(client: OpenAI, question: str, **settings: Any) -> str:
    """The text of an answer."""
    answer = client.chat.completions.create(messages=messages(question), **long_settings(settings))
    return answer.choices[0].message.content or ""


def streamed(client: OpenAI, question: str, **settings: Any) -> str:
    """The same from a stream; every chunk brings something."""
    chunks = client.chat.completions.create(messages=messages(question), stream=True, **long_settings(settings))
    found = [chunk.choices[0] for chunk in chunks]
    assert all(one.delta.model_fields_set or one.finish_reason for one in found)
    assert not any(getattr(one, "token_ids", None) for one in found)
    return "".join(one.delta.content or "" for one in found)


def continued(client: OpenAI) -> str:
    return client.completions.create(prompt="The order was shipped on", **GREEDY).choices[0].text


def forced_call(client: OpenAI) -> tuple[str, str]:
    answer = client.chat.completions.create(
        messages=messages("Where is order A1042?"), tools=[LOOK_UP], **GREEDY,
        tool_choice={"type": "function", "function": {"name": "look_up"}},
    )  # fmt: skip
    (call,) = answer.choices[0].message.tool_calls or ()
    return call.function.name, call.function.arguments


def by_schema(client: OpenAI) -> str:
    schema = {"type": "json_schema", "json_schema": {"name": "refund", "schema": REFUND, "strict": True}}
    asked = messages("Order A1042 came two weeks late. Fill in the refund.")
    answer = client.chat.completions.create(messages=asked, response_format=schema, **GREEDY)  # type: ignore[call-overload]
    return str(answer.choices[0].message.content)


def desk_runs(server: VllmServer, key: str, number: int, *, first: int = 0, streaming: bool = False) -> list[list[Any]]:
    """What the assistant said and called in an agent's runs over the order desk, ChatOpenAI being its model."""
    from precedent_demo.conversation import MAX_TOKENS_PER_TURN, run_request
    from precedent_demo.desk import OrderDesk
    from precedent_demo.workflows import generate_requests

    model = ChatOpenAI(
        base_url=f"{server.url}/v1", api_key=key, model=NAME, temperature=0.0, max_tokens=MAX_TOKENS_PER_TURN,
        max_retries=0, streaming=streaming,
    )  # fmt: skip
    desk = OrderDesk.from_seed(7)
    try:
        runs = [
            run_request(model, request, desk)
            for request in islice(generate_requests("A", 7, desk), first, first + number)
        ]
    finally:
        desk.close()
    return [[(one.text, [(c["name"], c["args"]) for c in one.tool_calls]) for one in run.answers] for run in runs]


def at_once(calls: Iterable[Callable[[], Any]]) -> list[Any]:
    """The results of calls made at the same time, in their order."""
    with ThreadPoolExecutor(8) as pool:
        return [one.result() for one in [pool.submit(call) for call in calls]]


SHORT: dict[str, Any] = {"temperature": 1.5, "max_tokens": 5, "extra_body": {"top_k": 4, "ignore_eos": True}}
"""Answers of five tokens, each of the best four."""


def samples(client: OpenAI, number: int) -> Counter[str]:
    """How often each text came, eight answers per request."""
    found = Counter[str]()
    for _ in range(number // 8):
        answer = client.chat.completions.create(messages=messages("Name a colour."), n=8, **{**GREEDY, **SHORT})
        found.update(one.message.content or "" for one in answer.choices)
    return found


def plain_answers(server: VllmServer, key: str = "none") -> dict[str, Any]:
    """Everything that must be the same with speculation."""
    client = server.client(key)
    return {
        **{question: chat(client, question) for question in QUESTIONS},
        "continued": continued(client),
        "forced call": forced_call(client),
        "schema": by_schema(client),
    }
