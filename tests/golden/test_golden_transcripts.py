"""Transcripts of the public interfaces on models that follow a script: LangChain, HTTP, and the command line.

Ids are numbered in the order in which they appear, and times are left out. Neighbouring pieces of a stream that differ
only in their text are joined, because their sizes depend on how fast the stream is read.
"""

from __future__ import annotations

import http.client
import json
import re
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from golden.scripted_server import answer
from helpers.command_line import precedent
from helpers.forked import Program
from helpers.golden import Golden, shape
from helpers.saved_models import saved
from langchain_core.messages import BaseMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from pydantic import BaseModel
from pytest_socket import enable_socket

from precedent import ChatPrecedent, ChatPrecedentServer, PrecedentError, SpeculationCache
from precedent.langchain import PrecedentLLM
from precedent_testing.embedders import HashEmbedder
from precedent_testing.scripted_model import scripted_model_engine
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm

SERVER = Path(__file__).with_name("scripted_server.py")

ID_KEYS = {"id", "item_id", "call_id", "tool_call_id", "response_id", "request_id", "previous_response_id"}
SHORTEST_ID = 12
CLOCK_KEYS = {"created", "created_at", "completed_at", "estimated_speedup", "latency_microseconds"}
COUNTING_PIECES = {"sequence_number"}
TEXT_KEYS = {"content", "arguments", "args", "text", "delta", "reasoning_content", "reasoning", "refusal"}


class Normal:
    """Values of one transcript as JSON, with ids numbered and times left out."""

    def __init__(self) -> None:
        self._ids: dict[str, str] = {}

    def __call__(self, value: Any, key: str = "") -> Any:
        if isinstance(value, BaseModel):
            value = value.model_dump(mode="json")
        if key in CLOCK_KEYS and isinstance(value, int | float | dict):
            return f"{type(value).__name__} left out"
        if key in ID_KEYS and isinstance(value, str) and len(value) >= SHORTEST_ID:
            prefix = re.match("(?:[a-z_]*[-_]+)?", value)
            return self._ids.setdefault(value, f"{prefix[0] if prefix else ''}{len(self._ids) + 1}")
        if isinstance(value, Mapping):
            return {name: self(one, name) for name, one in value.items() if name not in COUNTING_PIECES}
        if isinstance(value, list | tuple):
            return [self(one, key) for one in value]
        return value


def joined(pieces: Iterable[Any]) -> list[Any]:
    """Join neighbouring pieces of a stream that differ only in their text."""
    found: list[Any] = []
    for piece in pieces:
        both = _both(found[-1], piece) if found else None
        if both is None:
            found.append(piece)
        else:
            found[-1] = both
    return found


def _both(first: Any, second: Any, key: str = "") -> Any:
    """Join two pieces; None if they differ in more than their text."""
    if isinstance(first, dict) and isinstance(second, dict):
        if first.keys() != second.keys():
            return None
        merged = {name: _both(first[name], second[name], name) for name in first}
        return None if any(merged[name] is None and first[name] is not None for name in first) else merged
    if key in TEXT_KEYS and isinstance(first, str) and isinstance(second, str):
        return first + second if first and second else None
    if isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        elements = [_both(one, other, key) for one, other in zip(first, second, strict=True)]
        return None if any(one is None for one in elements) else elements
    return first if first == second else None


# LangChain


@tool
def look_up(number: str) -> str:
    """Look up an order."""
    return f"order {number} was sent"


class Order(BaseModel):
    """An order."""

    number: str
    sent: bool


QUESTION = [SystemMessage("Be kind."), HumanMessage("Where is order 1042?")]
AS_JSON = [HumanMessage("Where is order 1042? Answer as JSON.")]


@contextmanager
def chat_model(**settings: Any) -> Iterator[ChatPrecedent]:
    """A chat model whose cache is empty."""
    with (
        SpeculationCache.open(None, embedder=HashEmbedder()) as cache,
        closing(scripted_model_engine(answer, name="scripted", cache=cache)) as engine,
    ):
        yield ChatPrecedent.from_engine(engine, **settings)


def transcript(act: Callable[[ChatPrecedent], Any], **settings: Any) -> Any:
    """A call's result, or its error, on a new engine."""
    with chat_model(**settings) as llm:
        try:
            return Normal()(act(llm))
        except PrecedentError as error:
            return f"{type(error).__name__}: {error}"


def with_a_result(llm: ChatPrecedent) -> list[BaseMessage]:
    """A question, the call of a tool, and the answer to its result."""
    bound = llm.bind_tools([look_up])
    asked = bound.invoke(QUESTION)
    (call,) = asked.tool_calls
    return [asked, bound.invoke([*QUESTION, asked, ToolMessage("sent", tool_call_id=call["id"])])]


LANGCHAIN: dict[str, tuple[Callable[[ChatPrecedent], Any], dict[str, Any]]] = {
    "invoke": (lambda llm: llm.invoke(QUESTION), {}),
    "invoke twice": (lambda llm: [llm.invoke(QUESTION), llm.invoke(QUESTION)], {}),
    "invoke without speculation": (lambda llm: llm.invoke(QUESTION, speculation=False), {}),
    "invoke, seeded": (lambda llm: llm.invoke(QUESTION), {"temperature": 0.7, "seed": 3}),
    "invoke with logprobs": (lambda llm: llm.invoke(QUESTION, max_tokens=3), {"logprobs": True, "top_logprobs": 1}),
    "invoke, cut": (lambda llm: llm.invoke(QUESTION), {"max_tokens": 5}),
    "invoke, stopped": (lambda llm: llm.invoke(QUESTION, stop=["The refund"]), {}),
    "invoke, output version 1": (lambda llm: llm.invoke(QUESTION), {"output_version": "v1"}),
    "stream": (lambda llm: joined(Normal()(piece) for piece in llm.stream(QUESTION)), {}),
    "stream, output version 1": (
        lambda llm: joined(Normal()(piece) for piece in llm.stream(QUESTION)),
        {"output_version": "v1"},
    ),
    "batch": (lambda llm: llm.batch([QUESTION, AS_JSON], config={"max_concurrency": 1}), {}),
    "tools": (with_a_result, {}),
    "tools, stream": (lambda llm: joined(Normal()(piece) for piece in llm.bind_tools([look_up]).stream(QUESTION)), {}),
    "tools, forced": (lambda llm: llm.bind_tools([look_up], tool_choice="any").invoke(AS_JSON), {}),
    "tools, none": (lambda llm: llm.bind_tools([look_up], tool_choice="none").invoke(QUESTION), {}),
    "structured output": (lambda llm: llm.with_structured_output(Order, include_raw=True).invoke(AS_JSON), {}),
    "structured output, schema": (
        lambda llm: llm.with_structured_output(Order.model_json_schema()).invoke(AS_JSON),
        {},
    ),
    "structured output, stream": (lambda llm: list(llm.with_structured_output(Order).stream(AS_JSON))[-1], {}),
    "json mode": (lambda llm: llm.invoke(AS_JSON, response_format={"type": "json_object"}), {}),
    "generate": (lambda llm: llm.generate([QUESTION]).llm_output, {}),
    "number of tokens": (lambda llm: llm.get_num_tokens_from_messages(QUESTION), {}),
    "profile": (lambda llm: dict(llm.profile or {}), {}),
}


def test_langchain_is_as_recorded(golden: Golden) -> None:
    found = {name: transcript(act, **settings) for name, (act, settings) in LANGCHAIN.items()}
    with closing(scripted_model_engine(answer, name="scripted")) as engine:
        llm = PrecedentLLM.from_engine(engine)
        found["llm"] = [llm.invoke("Where is order 1042?"), "".join(llm.stream("Where is order 1042?"))]
    golden("transcripts/langchain", found)


# HTTP

QUESTION_OF_A_USER = {"role": "user", "content": "Where is order 1042?"}
AS_JSON_OF_A_USER = {"role": "user", "content": "Where is order 1042? Answer as JSON."}

Sent = tuple[str, str, Any]


def chat(**more: Any) -> Sent:
    asked = {"model": "scripted", "messages": [QUESTION_OF_A_USER], "temperature": 0, **more}
    return "POST", "/v1/chat/completions", asked


def complete(**more: Any) -> Sent:
    asked = {"model": "scripted", "prompt": "Where is order 1042?", "temperature": 0, "max_tokens": 60, **more}
    return "POST", "/v1/completions", asked


def respond(**more: Any) -> Sent:
    return "POST", "/v1/responses", {"model": "scripted", "input": "Where is order 1042?", "temperature": 0, **more}


FUNCTION = {
    "name": "look_up",
    "description": "Look up an order.",
    "parameters": {"type": "object", "properties": {"number": {"type": "string"}}, "required": ["number"]},
}
TOOL = {"type": "function", "function": FUNCTION}
SCHEMA = {
    "name": "order",
    "schema": {
        "type": "object",
        "properties": {"number": {"type": "string"}, "sent": {"type": "boolean"}},
        "required": ["number", "sent"],
    },
}
RESULT = [
    {"role": "assistant", "content": "", "tool_calls": [{"id": "call_1", "type": "function", "function": {
        "name": "look_up", "arguments": '{"number": "1042"}',
    }}]},
    {"role": "tool", "tool_call_id": "call_1", "content": "sent"},
]  # fmt: skip

FORMAT = {"type": "json_schema", "json_schema": SCHEMA}
WRONG_FORMAT = {"type": "json_schema", "json_schema": {}}
NAMED = {"type": "function", **FUNCTION}

REQUESTS: dict[str, Sent] = {
    "chat": chat(),
    "chat, logprobs": chat(logprobs=True, top_logprobs=1, max_tokens=2),
    "chat, cut": chat(max_completion_tokens=4),
    "chat, stop": chat(stop="The refund"),
    "chat, without speculation": chat(speculation=False),
    "chat, tools": chat(tools=[TOOL]),
    "chat, tool result": chat(tools=[TOOL], messages=[QUESTION_OF_A_USER, *RESULT]),
    "chat, schema": chat(messages=[AS_JSON_OF_A_USER], response_format=FORMAT),
    "chat, stream": chat(stream=True, stream_options={"include_usage": True}),
    "chat, stream with tools": chat(stream=True, tools=[TOOL]),
    "completions": complete(),
    "completions, stream": complete(stream=True),
    "responses": respond(),
    "responses, tools": respond(tools=[NAMED]),
    "responses, cut": respond(max_output_tokens=4),
    "responses, stream": respond(stream=True),
    "responses, stream with tools": respond(stream=True, tools=[NAMED]),
    "embeddings": ("POST", "/v1/embeddings", {"model": "scripted", "input": "order"}),
    "models": ("GET", "/v1/models", None),
    "model": ("GET", "/v1/models/scripted", None),
    "health": ("GET", "/health", None),
    "error, unknown model": chat(model="another"),
    "error, model of a path": ("GET", "/v1/models/another", None),
    "error, no messages": ("POST", "/v1/chat/completions", {"model": "scripted"}),
    "error, empty messages": chat(messages=[]),
    "error, role": chat(messages=[{"role": "narrator", "content": "x"}]),
    "error, temperature": chat(temperature=-1),
    "error, unknown field": chat(temprature=1),
    "error, audio": chat(modalities=["audio"]),
    "error, many answers": chat(n=1000),
    "error, tool choice": chat(tool_choice="required"),
    "error, schema": chat(response_format=WRONG_FORMAT),
    "error, too long": complete(prompt="0123456789" * 4000),
    "error, completions without a prompt": ("POST", "/v1/completions", {"model": "scripted"}),
    "error, stored response": respond(previous_response_id="resp_1"),
    "error, not JSON": ("POST", "/v1/chat/completions", "{"),
    "error, path": ("GET", "/v1/nothing", None),
    "error, method": ("GET", "/v1/chat/completions", None),
}

SEVERAL: dict[str, Sent] = {
    "chat, two answers": chat(n=2, speculation=False),
    "completions, several": complete(prompt=["One", "Two"], echo=True, speculation=False),
}
"""Answers computed at the same time, without speculation: the plan of one would depend on the progress of the other."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model."""
    return saved(tmp_path_factory.mktemp("model"), tiny_causal_lm(dtype=torch.float32))


@contextmanager
def server(folder: Path) -> Iterator[str]:
    """The address of a running server."""
    with Program([SERVER, folder]) as program:
        try:
            for line in program.stdout:
                if found := re.search(r"http://([\d.:]+)/v1", line):
                    yield found[1]
                    return
        finally:
            program.send_signal(signal.SIGTERM)
            program.stdout.read()


def asked(address: str, method: str, path: str, body: Any) -> dict[str, Any]:
    """Return status, content type and body of an answer, or the joined events of a stream."""
    with closing(http.client.HTTPConnection(address, timeout=60)) as connection:
        text = body if body is None or isinstance(body, str) else json.dumps(body)
        connection.request(method, path, text, {"Content-Type": "application/json"})
        answered = connection.getresponse()
        kind, said = answered.headers.get_content_type(), answered.read().decode()
    normal, found = Normal(), {"status": answered.status, "type": kind}
    if kind != "text/event-stream":
        return {**found, "body": normal(json.loads(said))}
    events = [re.sub(r"^event: .*\n", "", event) for event in said.strip().split("\n\n")]
    data = [event.removeprefix("data: ") for event in events]
    return {**found, "events": joined(normal(json.loads(one)) if one != "[DONE]" else one for one in data)}


def test_http_is_as_recorded(golden: Golden, folder: Path) -> None:
    enable_socket()
    with server(folder) as address:
        found: dict[str, Any] = {name: asked(address, *request) for name, request in REQUESTS.items()}
        described = asked(address, "GET", "/openapi.json", None)["body"]
        found["routes"] = {path: sorted(methods) for path, methods in described["paths"].items()}
        llm = ChatPrecedentServer(model="scripted", base_url=f"http://{address}/v1", api_key="none")
        found["client"] = Normal()(llm.invoke(QUESTION))
        found["client, stream"] = joined(Normal()(piece) for piece in llm.stream(QUESTION))
        found["client, tools"] = Normal()(llm.bind_tools([look_up]).invoke(QUESTION))
        found |= {name: asked(address, *request) for name, request in SEVERAL.items()}
    golden("transcripts/http", found)


# The command line


def conversation(task: str, *answers: str) -> dict[str, Any]:
    messages: list[dict[str, Any]] = [{"role": "user", "content": task}]
    for said in answers:
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "thanks"}]
    return {"task_id": task, "messages": messages}


def test_results_of_commands_are_as_recorded(
    golden: Golden, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("precedent.cache.filling.resolve", lambda chosen: HashEmbedder())
    report, cache, log = tmp_path / "report.json", tmp_path / "cache", tmp_path / "log.jsonl"
    sent = "your order is on its way and will arrive on monday"
    records = [conversation("where is it", sent), conversation("where is it", sent, "you are welcome")]
    log.write_text("".join(json.dumps({**one, "order": at}) + "\n" for at, one in enumerate(records)))
    with (
        SpeculationCache.open(cache, embedder=HashEmbedder()),
        closing(scripted_model_engine(answer, cache=str(cache), embedder=HashEmbedder())) as engine,
    ):
        ChatPrecedent.from_engine(engine, tenant="shop").invoke(QUESTION)
    replay: list[object] = ["replay", log, "--tokenizer", folder, "--embedder", "none", "--baselines", "suffix-tree"]
    commands: dict[str, list[object]] = {
        "run": ["run", "hi", "--target", folder, "--max-tokens", 4, "--json", report],
        "cache stats": ["cache", "stats", cache, "--json", report],
        "cache list": ["cache", "list", cache, "--json", report],
        "cache show": ["cache", "show", cache, 1, "--json", report],
        "cache search": ["cache", "search", cache, "order", "--json", report],
        "cache verify": ["cache", "verify", cache, "--json", report],
        "cache compact": ["cache", "compact", cache, "--json", report],
        "cache export": ["cache", "export", cache, tmp_path / "export", "--json", report],
        "cache import": ["cache", "import", tmp_path / "other", tmp_path / "export", "--json", report],
        "cache warm": ["cache", "warm", tmp_path / "other", log, "--target", folder, "--json", report],
        "cache forget": ["cache", "forget", cache, "--tenant", "shop", "--json", report],
        "replay with details": [*replay, "--details", "--calibration", "--budget", "8,16", "--json", report],
        "replay of actions": [*replay, "--actions", "--json", report],
        "keys add": ["keys", "add", "desk", "--file", tmp_path / "keys.json", "--tenant", "shop"],
        "keys list": ["keys", "list", "--file", tmp_path / "keys.json", "--json", report],
        "keys revoke": ["keys", "revoke", "desk", "--file", tmp_path / "keys.json", "--json", report],
        "models": ["models", "llama", "--json", report],
        "doctor": ["doctor", folder, "--json", report],
    }
    found = {}
    for name, arguments in commands.items():
        report.unlink(missing_ok=True)
        status = precedent(*arguments)
        found[name] = {"status": status, "json": shape(json.loads(report.read_text())) if report.exists() else None}
    golden("transcripts/commands", found)


def counts(value: Any) -> Any:
    """Leave out the values that depend on a clock."""
    if isinstance(value, dict):
        return {key: counts(one) for key, one in value.items() if not re.search("second|micro|milli|time|speed", key)}
    if isinstance(value, list):
        return [counts(one) for one in value]
    return round(value, 9) if isinstance(value, float) else value


def test_counts_of_a_replay_are_as_recorded(golden: Golden, folder: Path, tmp_path: Path) -> None:
    log, report = tmp_path / "log.jsonl", tmp_path / "report.json"
    sent = "your order {} is on its way and will arrive on monday"
    records = [conversation(f"where is {number}", sent.format(number), "you are welcome") for number in (17, 18, 19)]
    log.write_text("".join(json.dumps({**one, "order": at}) + "\n" for at, one in enumerate(records)))
    more = ("--budget", "8", "--baselines", "suffix-tree", "--json", report)
    assert precedent("replay", log, "--tokenizer", folder, "--embedder", "none", *more) == 0
    golden("transcripts/replay", counts(json.loads(report.read_text())["drafters"]))


def test_the_status_of_doctor_is_as_recorded(golden: Golden, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert" / "config.json").write_text('{"model_type": "bert"}')
    tiny_causal_lm(dtype=torch.float32, vocab_size=300).save_pretrained(tmp_path / "another")
    byte_tokenizer((("a", "b"),)).save_pretrained(tmp_path / "another")
    report = tmp_path / "report.json"
    commands: dict[str, list[object]] = {
        "a model": [folder],
        "first layers": [folder, "--draft-model", "first-layers:1"],
        "too many first layers": [folder, "--draft-model", "first-layers:9"],
        "a draft model with another tokenizer": [folder, "--draft-model", tmp_path / "another"],
        "a model that cannot be a target": [tmp_path / "bert"],
        "no model": [tmp_path / "nowhere"],
        "an unknown template": [folder, "--chat-template", "{% if"],
    }
    found = {}
    for name, arguments in commands.items():
        report.unlink(missing_ok=True)
        status = precedent("doctor", *arguments, "--json", report)
        told = json.loads(report.read_text()) if report.exists() else {"findings": []}
        states = {one["check"]: one["state"] for one in told["findings"]}
        found[name] = {"status": status, "usable": told.get("usable"), "findings": states}
    golden("transcripts/doctor", found)
