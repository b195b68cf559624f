"""A real `vllm serve` on the CPU with the order desk's SmolLM2-135M, and requests to it: the same for every server."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import Any, Self

from langchain_openai import ChatOpenAI
from openai import OpenAI

NAME = "desk"
TOKENS = 16
COMMAND = Path(__file__).parents[2] / "plugins" / "precedent-vllm" / "tests" / "vllm_command.py"
START_SECONDS, END_SECONDS = 900, 120
"""Generous, for busy machines."""

SPECULATION = {"method": "custom_class", "model": "precedent_vllm.Drafter", "num_speculative_tokens": TOKENS}


def folder() -> Path:
    """The model: SmolLM2-135M with the order desk's adapter merged in."""
    from precedent_demo.adapted import adapted_target

    return adapted_target()


class VllmServer:
    """`with VllmServer(log, PRECEDENT_VLLM_STORE=…) as server:`; `speculation=None` is vLLM without any of ours."""

    def __init__(
        self,
        log: Path,
        speculation: dict[str, Any] | None = SPECULATION,
        model: Path | None = None,
        **environment: str,
    ) -> None:
        self._log, self._speculation, self._environment = log, speculation, environment
        self._model = model or folder()
        self._process: subprocess.Popen[bytes] | None = None
        self.port = _free_port()
        self.url = f"http://127.0.0.1:{self.port}"

    def start(self) -> Self:
        """Start it, and wait until it answers. Raises RuntimeError with its last lines if it does not start."""
        speculating = ["--speculative-config", json.dumps(self._speculation)] if self._speculation else []
        ours = ["--middleware", "precedent_vllm.Middleware"] if self._speculation == SPECULATION else []
        template = str(files("precedent.text") / "templates" / "hermes.jinja")
        command = [
            *(sys.executable, str(COMMAND), "serve", str(self._model), "--served-model-name", NAME),
            *("--host", "127.0.0.1", "--port", str(self.port), "--disable-uvicorn-access-log"),
            *("--dtype", "float32", "--enforce-eager", "--max-model-len", "4096", "--max-num-seqs", "8"),
            *("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--chat-template", template),
            *speculating,
            *ours,
        ]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=self._variables(), start_new_session=True
            )
        until = time.monotonic() + START_SECONDS
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > until:
                self.kill()
                raise RuntimeError(f"vLLM did not start:\n{self.log()[-6000:]}")
            time.sleep(1)
        return self

    def stop(self) -> None:
        """End it as an operator does."""
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(END_SECONDS)
            self.kill()

    def kill(self) -> None:
        """End it and its workers at once, as a crash would."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def log(self) -> str:
        """What it wrote so far."""
        return self._log.read_text(errors="replace")

    def client(self, key: str = "none") -> OpenAI:
        """A client that never tries again: a failed request is a failed test."""
        return OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=900)

    def counts(self) -> Counter[str]:
        """All counters and gauges, by name; those of ours by source as `name:source`, over all processes."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        found = Counter[str]()
        for line in lines:
            if not line.startswith("#"):
                labelled, _, value = line.rpartition(" ")
                name, _, labels = labelled.partition("{")
                source = labels.partition('source="')[2].partition('"')[0]
                found[f"{name}:{source}" if source else name] += float(value)  # type: ignore[assignment]
        return found

    def counted(self, name: str, least: float) -> float:
        """A count, once it is at least that high: workers and writers tell theirs a second later."""
        until = time.monotonic() + END_SECONDS
        while (found := self.counts()[name]) < least:
            assert time.monotonic() < until, f"{name} stays {found}, below {least}"
            time.sleep(0.2)
        return found

    def resting(self) -> Counter[str]:
        """All counts once they have not changed for three seconds, so that nothing of earlier requests is missing."""
        found, since = self.counts(), time.monotonic()
        while time.monotonic() - since < 3:
            time.sleep(0.2)
            now = self.counts()
            if any(now[name] != found[name] for name in now if name.startswith("precedent:")):
                since = time.monotonic()
            found = now
        return found

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=10) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def _variables(self) -> dict[str, str]:
        openmp = Path(sys.prefix) / "lib" / "libiomp5.so"
        clean = {name: value for name, value in os.environ.items() if not name.startswith("PRECEDENT_VLLM")}
        settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
        numba = {"NUMBA_BOUNDSCHECK": "0"}  # the tests' own setting, which compiles everything anew
        preload = {"LD_PRELOAD": str(openmp)} if openmp.exists() else {}
        return {**clean, **settings, **numba, **preload, **self._environment}

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


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
    from precedent_demo import MAX_TOKENS_PER_TURN, make_database, run_request
    from precedent_demo.workflows import generate_requests

    model = ChatOpenAI(
        base_url=f"{server.url}/v1", api_key=key, model=NAME, temperature=0.0, max_tokens=MAX_TOKENS_PER_TURN,
        max_retries=0, streaming=streaming,
    )  # fmt: skip
    desk = make_database(7)
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
