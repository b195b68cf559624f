"""Servers on scripted engines, asked over ASGI without a socket, and a place for API keys."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from helpers.forked import Program
from openai import AsyncOpenAI
from pytest_socket import enable_socket

from precedent.cache import SpeculationCache
from precedent.engine.engine import Engine
from precedent_server.access import NO_RULES, AccessRules
from precedent_server.app import server_app
from precedent_server.keys import KeyFile
from precedent_server.serving import Served, Serving
from precedent_server.settings import ServerLimits
from precedent_testing.embedders import HashEmbedder
from precedent_testing.scripted_model import scripted_model_engine
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm


class Client(httpx.AsyncClient):
    """A client of one server, which is at hand as well."""

    def __init__(self, serving: Serving) -> None:
        self.serving, self.app = serving, server_app(serving)
        transport = httpx.ASGITransport(app=self.app, raise_app_exceptions=False)
        super().__init__(transport=transport, base_url="http://127.0.0.1:8000")


Serve = Callable[..., Client]


def echo(prompt: str) -> str:
    """Says the last turn of a conversation again, and continues any other text with itself."""
    turn = prompt.rpartition("<|im_start|>assistant")[0].rpartition("<|im_start|>")[2]
    return turn.partition("\n")[2].partition("<|im_end|>")[0] if "<|im_start|>" in prompt else f" {prompt}"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Makes a client of a server whose only model, `scripted`, follows a script."""
    with ExitStack() as held:
        yield partial(served_by, held)


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    """A client of one server for all tests of a file, whose model is an `echo`."""
    with ExitStack() as held:
        yield served_by(held, echo)


@pytest.fixture(scope="module")
def tiny() -> Iterator[Client]:
    """A client of a server on a tiny model, which follows no script."""
    model = tiny_causal_lm("llama", seed=21)
    with (
        closing(Engine.load(model, tokenizer=byte_tokenizer(), name="tiny")) as engine,
        closing(Serving({"tiny": Served.of("tiny", engine)})) as serving,
    ):
        yield Client(serving)


@pytest.fixture
def openai(client: Client) -> AsyncOpenAI:
    """openai-python on the same server."""
    return AsyncOpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none", max_retries=0, http_client=client)


@pytest.fixture
def start_process() -> Callable[..., AbstractContextManager[tuple[Program, int]]]:
    """Starts a server of the settings of `running_server.py` in a process of its own; gives it and its port."""

    @contextmanager
    def started(**settings: Any) -> Iterator[tuple[Program, int]]:
        enable_socket()
        program = Path(__file__).with_name("running_server.py")
        with Program([program, json.dumps(settings, default=str)]) as process:
            try:
                yield process, int(process.stdout.readline().rpartition(":")[2])
            finally:
                process.send_signal(signal.SIGTERM)

    return started


def served_by(
    held: ExitStack, script: Any, *, limits: ServerLimits | None = None, keys: KeyFile | None = None,
    access: AccessRules = NO_RULES, kept_steps: int = 0, **engine: Any,
) -> Client:  # fmt: skip
    cache = held.enter_context(SpeculationCache.open(None, embedder=HashEmbedder()))
    running = held.enter_context(closing(scripted_model_engine(script, name="scripted", cache=cache, **engine)))
    served = Served.of("scripted", running, kept_steps=kept_steps)
    return Client(held.enter_context(closing(Serving({"scripted": served}, limits, keys, access=access))))
