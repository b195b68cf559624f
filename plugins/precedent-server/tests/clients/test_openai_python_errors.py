"""What is refused reaches users of openai-python as the class of error that they expect."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import openai
import pytest
from helpers.openai_questions import ask, user
from openai import OpenAI

pytestmark = pytest.mark.clients


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"extra_body": {"top_kk": 1}}, "top_kk"),
        ({"temperature": -1}, "temperature"),
        ({"n": 0}, "n"),
        ({"verbosity": "low"}, "verbosity"),
        ({"tool_choice": "required"}, "tool_choice"),
    ],
)
def test_a_bad_request(client: OpenAI, asked: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, "Hi.", **asked)
    assert caught.value.type == "invalid_request_error"
    assert caught.value.param == param


def test_a_prompt_that_is_too_long(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, "x" * 100_000)
    assert caught.value.code == "context_length_exceeded"


def test_a_bad_request_for_a_stream(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError):
        ask(client, "Hi.", stream=True, temperature=-1)


def test_nothing_is_kept_between_responses(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="send the whole conversation"):
        client.responses.create(model="echo", input="Hi.", previous_response_id="resp_1")


def test_a_wrong_key(server: Any) -> None:
    with OpenAI(base_url=server.url, api_key="pk-wrong") as client, pytest.raises(openai.AuthenticationError) as caught:
        ask(client, "Hi.")
    assert caught.value.code == "invalid_api_key"


def test_a_role_that_may_not(server: Any) -> None:
    with (
        OpenAI(base_url=server.address, api_key=server.keys["desk"]) as client,
        pytest.raises(openai.PermissionDeniedError, match="'admin' is needed"),
    ):
        client.get("/dashboard/figures", cast_to=object)


@pytest.mark.parametrize("route", ["chat", "completions", "embeddings", "responses", "models"])
def test_an_unknown_model(client: OpenAI, route: str) -> None:
    asks: dict[str, Any] = {
        "chat": lambda: client.chat.completions.create(model="gpt", messages=user("Hi.")),
        "completions": lambda: client.completions.create(model="gpt", prompt="Hi."),
        "embeddings": lambda: client.embeddings.create(model="gpt", input="Hi."),
        "responses": lambda: client.responses.create(model="gpt", input="Hi."),
        "models": lambda: client.models.retrieve("gpt"),
    }
    with pytest.raises(openai.NotFoundError) as caught:
        asks[route]()
    assert caught.value.code == "model_not_found"


def test_an_unknown_route(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.files.list()


def test_too_many_at_once(client: OpenAI, fifo: Path) -> None:
    told = list[str]()

    def wait() -> None:
        told.append(ask(client, f"Wait for {fifo}").choices[0].message.content)

    waiting = threading.Thread(target=wait)
    waiting.start()
    with fifo.open("w") as answer:  # opens once the model reads it
        with pytest.raises(openai.RateLimitError) as caught:
            ask(client, "Hi.", n=16)
        answer.write("At last.")
    waiting.join()
    assert caught.value.response.headers["retry-after"] == "1"
    assert told == ["At last."]
