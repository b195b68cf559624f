"""The `ollama` package, and the program `llm` with its plugin `llm-ollama`, which speaks no other interface."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ollama
import pytest
from pydantic import BaseModel

pytestmark = pytest.mark.clients

CALL = '<tool_call>\n{"name": "look_up", "arguments": {"number": "1042"}}\n</tool_call>'
ADA = '{"name": "Ada", "born": 1815}'


class Person(BaseModel):
    name: str
    born: int


def look_up(number: str) -> str:
    """Look an order up.

    Args:
        number: the number of the order
    """
    return f"order {number} was sent on Monday"


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def settings(server: Any) -> dict[str, Any]:
    return {"host": server.address, "headers": {"Authorization": f"Bearer {server.keys['desk']}"}}


@pytest.fixture
def client(server: Any) -> Iterator[ollama.Client]:
    with ollama.Client(**settings(server)) as client:
        yield client


def test_chat_and_generate(client: ollama.Client) -> None:
    answer = client.chat("echo", user("Where is order 1042?"), options={"temperature": 0, "num_ctx": 4096})
    assert (answer.message.content, answer.done_reason) == ("Where is order 1042?", "stop")
    assert all((answer.eval_count, answer.eval_duration, answer.prompt_eval_count, answer.prompt_eval_duration))
    parts = list(client.chat("echo:latest", user("Count to 9"), stream=True))
    assert "".join(part.message.content or "" for part in parts) == "1 2 3 4 5 6 7 8 9"
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert client.generate("echo", "Hello.", system="Be kind.", keep_alive="5m").response == "Hello."
    assert "".join(part.response for part in client.generate("echo", "Once", raw=True, stream=True)) == " Once"
    assert client.generate("echo", keep_alive="5m").done_reason == "load"
    thought = client.chat("scripted-model", user("Think before you answer."), think=True)
    assert thought.message.thinking == "Is it a bun?"


def test_tools_and_formats(client: ollama.Client) -> None:
    messages: list[Any] = user(CALL)
    for stream in (False, True):
        found = client.chat("echo", messages, tools=[look_up], stream=stream)
        parts = list(found) if stream else [found]
        (call,) = [call for part in parts for call in part.message.tool_calls or ()]
        assert (call.function.name, call.function.arguments) == ("look_up", {"number": "1042"})
    result = {"role": "tool", "content": look_up(**call.function.arguments), "tool_name": call.function.name}
    after = client.chat("echo", [*messages, found.message if not stream else parts[0].message, result], tools=[look_up])
    assert "sent on Monday" in after.message.content
    told = client.chat("echo", user(ADA), format=Person.model_json_schema())
    assert Person.model_validate_json(told.message.content) == Person(name="Ada", born=1815)
    assert client.generate("echo", ADA, format="json").response == ADA


def test_embeddings(client: ollama.Client) -> None:
    one, two = client.embed("echo", ["one", "two"]).embeddings
    assert len(one) == len(two) > 1
    assert client.embed("echo", "one").embeddings == [one]
    assert client.embeddings("echo", "one").embedding == one


def test_errors(client: ollama.Client, server: Any) -> None:
    with ollama.Client(server.address) as stranger:
        refused = {
            404: lambda: client.chat("gpt", user("hi")),
            400: lambda: list(client.chat("echo", user("hi"), options={"temperature": -1}, stream=True)),
            401: lambda: stranger.chat("echo", user("hi")),
        }
        for status, ask in refused.items():
            with pytest.raises(ollama.ResponseError) as found:
                ask()
            assert found.value.status_code == status
            assert "{" not in found.value.error
    with pytest.raises(ollama.ResponseError, match="/api/pull is not supported"):
        client.pull("smollm2")


async def test_the_asynchronous_client(server: Any) -> None:
    async with ollama.AsyncClient(**settings(server)) as client:
        assert (await client.chat("echo", user("Hello."))).message.content == "Hello."
        parts = [part async for part in await client.chat("echo", user("One two."), stream=True)]
        assert "".join(part.message.content or "" for part in parts) == "One two."
        assert parts[-1].done_reason == "stop"
        assert (await client.generate("echo", "Hello.")).response == "Hello."


def test_models(client: ollama.Client) -> None:
    assert "echo:latest" in [model.model for model in client.list().models]
    assert "completion" in (client.show("echo").capabilities or [])
    assert "echo:latest" in [model.model for model in client.ps().models]


def test_a_program(server: Any, tmp_path: Path) -> None:
    """It finds the models by itself, streams, and calls a tool."""

    def llm(*arguments: str) -> str:
        told = {"OLLAMA_HOST": server.address, "OLLAMA_API_KEY": server.keys["desk"]}
        told |= {"LLM_USER_PATH": str(tmp_path), "LLM_LOAD_PLUGINS": "llm-ollama"}  # the environment has other plugins
        command = [sys.executable, "-m", "llm", *arguments]
        done = subprocess.run(command, env={**os.environ, **told}, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "ollama/echo" in llm("models")
    assert llm("-m", "ollama/echo", "Count to 9").strip() == "1 2 3 4 5 6 7 8 9"
    assert llm("-m", "ollama/echo", "--no-stream", "-o", "temperature", "0", "Hello.").strip() == "Hello."
    functions = tmp_path / "functions.py"
    functions.write_text('def look_up(number: str) -> str:\n    return f"order {number} was sent on Monday"\n')
    assert "sent on Monday" in llm("-m", "ollama/echo", "--functions", str(functions), CALL)
