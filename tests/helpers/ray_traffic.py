"""Streams of several tenants at once, tried again until they are whole, as a client's own retries do."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai

from helpers.ray_cluster import MODEL, RayCluster
from precedent.config import SamplingParams, SpeculationConfig
from precedent.engine.engine import Engine

TOKENS = 24
PLAIN = SpeculationConfig(enabled=False, write_back=False)
MOST_TRIES = 60
PAUSE_SECONDS = 1.0
"""Between two tries; a replica takes a while to start on a busy machine."""

CLEAR = (openai.APIError, httpx.TransportError)
"""What a client gets when a replica is lost: an error event, a status, or a connection that ends."""


def prompt(tenant: str, number: int) -> str:
    """A question of a tenant; the same number asks the same."""
    return f"{tenant} asks for order {number}: "


class Plain:
    """What plain decoding answers, each question once."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._known = engine, dict[tuple[str, int], str]()
        self._lock = threading.Lock()

    def __call__(self, asked: str, tokens: int = TOKENS) -> str:
        with self._lock:
            if (asked, tokens) not in self._known:
                ids = self._engine.tokenizer.encode(asked, add_special_tokens=False)
                done = self._engine.submit(ids, SamplingParams(max_tokens=tokens), speculation=PLAIN)
                self._known[asked, tokens] = "".join(emission.text for emission in done)
            return self._known[asked, tokens]


@dataclass
class Told:
    """What a run of requests brought."""

    wrong: list[str] = field(default_factory=list)
    answered: list[str] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)
    recalled: int = 0

    @property
    def kinds(self) -> Counter[str]:
        """How often each kind of error was seen."""
        return Counter(getattr(error, "code", None) or type(error).__name__ for error in self.errors)


def ask(client: openai.OpenAI, asked: str, tokens: int = TOKENS) -> tuple[str, int]:
    """The text of one stream, and how many of its tokens were recalled. Raises the client's errors.

    Each request names another session, as a client does that wants to be somewhere else.
    """
    text, recalled = "", 0
    stream = client.completions.create(
        model=MODEL, prompt=asked, max_tokens=tokens, temperature=0, stream=True,
        extra_headers={"x-session-id": os.urandom(4).hex()},
    )  # fmt: skip
    finished = False
    for chunk in stream:
        for choice in chunk.choices:
            text += choice.text
            finished = finished or choice.finish_reason is not None
        recalled += (getattr(chunk, "speculation", None) or {}).get("accepted_by_source", {}).get("recall", 0)
    if not finished:
        raise httpx.RemoteProtocolError("the stream ended without a reason")
    return text, recalled


def traffic(
    cluster: RayCluster,
    keys: Mapping[str, str],
    numbers: Iterable[int],
    plain: Plain,
    *,
    meanwhile: Callable[[Told], Any] | None = None,
    tokens: int = TOKENS,
) -> Told:
    """Every tenant asks all numbers, one after the other, and beside the other tenants; failed requests are repeated.

    `meanwhile` runs beside them on the caller's thread.
    """
    told, numbers = Told(), list(numbers)
    for tenant in keys:  # before: plain decoding here would keep the clients from asking
        for number in numbers:
            plain(prompt(tenant, number), tokens)
    with ThreadPoolExecutor(len(keys)) as threads:
        asking = [
            threads.submit(_asks, cluster, tenant, key, numbers, plain, told, tokens) for tenant, key in keys.items()
        ]
        if meanwhile is not None:
            meanwhile(told)
        for one in asking:
            one.result()
    return told


def _asks(
    cluster: RayCluster, tenant: str, key: str, numbers: list[int], plain: Plain, told: Told, tokens: int
) -> None:
    client = cluster.client(key)
    for number in numbers:
        asked = prompt(tenant, number)
        text, recalled = until_answered(lambda asked=asked: ask(client, asked, tokens), told)
        told.recalled += recalled
        told.answered.append(asked)
        if text != plain(asked, tokens):
            told.wrong.append(asked)


def until_answered(work: Callable[[], Any], told: Told) -> Any:
    """The result of a request, repeated after each error that says so."""
    for _ in range(MOST_TRIES):
        try:
            return work()
        except CLEAR as error:
            told.errors.append(error)
            time.sleep(PAUSE_SECONDS)
    raise AssertionError(f"no answer in {MOST_TRIES} tries: {told.kinds}")


def until(condition: Callable[[], Any], what: str, seconds: float = 600) -> Any:
    """Wait for something that another process does; what it finally gives."""
    ends = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < ends, f"{what} did not come"
        time.sleep(0.2)
    return found
