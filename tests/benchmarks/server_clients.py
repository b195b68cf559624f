"""Clients of `bench_server.py`, for a process of their own: the standard library alone, and one clock."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from threading import local
from time import monotonic, perf_counter, sleep
from typing import Any, NamedTuple

_OWN = local()
"""Each thread's connection."""


class Timed(NamedTuple):
    """Seconds from a request's start to each chunk of text or tokens, and how many tokens the answer has."""

    times: list[float]
    num_tokens: int

    @property
    def tokens_per_second(self) -> float:
        """Of the whole answer, its prompt included."""
        return self.num_tokens / self.times[-1]


def streamed(port: int, asked: dict[str, Any]) -> Timed:
    """Read one stream to its end."""
    connection, raw = _connection(port), json.dumps(asked)
    started, times, num_tokens = perf_counter(), list[float](), 0
    connection.request("POST", "/v1/chat/completions", raw, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    while line := answer.readline():
        if line.startswith(b"data: {"):
            now = perf_counter() - started
            chunk = json.loads(line[6:])
            choices, usage = chunk["choices"], chunk.get("usage")
            num_tokens = usage["completion_tokens"] if usage else num_tokens
            times += [now] if choices and (choices[0]["delta"].get("content") or choices[0].get("logprobs")) else []
    return Timed(times, num_tokens)


def together(port: int, asked: Sequence[dict[str, Any]]) -> list[Timed]:
    """All at once; times count from the common start."""
    started = perf_counter()

    def one(body: dict[str, Any]) -> Timed:
        late = perf_counter() - started
        found = streamed(port, body)
        return Timed([late + time for time in found.times], found.num_tokens)

    with ThreadPoolExecutor(len(asked)) as pool:
        return list(pool.map(one, asked))


def traffic(port: int, seconds: float, rate: float | None) -> dict[str, Any]:
    """Mixed requests for so long: at a rate per second, or four at a time as fast as they are answered."""
    ends, statuses, started = monotonic() + seconds, Counter[int](), perf_counter()
    with ThreadPoolExecutor(4 if rate is None else 64) as pool:
        rng, sent = random.Random(1), []
        if rate is None:
            for worker in range(4):
                sent.append(pool.submit(_until, port, ends, worker))
        else:
            while monotonic() < ends:
                sent.append(pool.submit(lambda number: Counter([_mixed(port, number)]), rng.randrange(10**9)))
                sleep(rng.expovariate(rate))
        for one in sent:
            statuses.update(one.result())
    return {"requests_per_second": statuses.total() / (perf_counter() - started), "statuses": dict(statuses)}


def _until(port: int, ends: float, worker: int) -> Counter[int]:
    rng, found = random.Random(worker), Counter[int]()
    while monotonic() < ends:
        found[_mixed(port, rng.randrange(10**9))] += 1
    return found


def _mixed(port: int, number: int) -> int:
    """One request of several kinds; every tenth client leaves in the middle of its stream."""
    rng = random.Random(number)
    text = f"Order {rng.randrange(200)}: where is it? Answer in {rng.randrange(1, 9)} sentences."
    sampled = {"temperature": rng.choice((0, 0.7)), "max_tokens": rng.randrange(8, 64)}
    messages = [{"role": "user", "content": text}]
    path, body = rng.choice([
        ("/v1/chat/completions", {"messages": messages, "stream": True, **sampled}),
        ("/v1/chat/completions", {"messages": messages, **sampled}),
        ("/v1/completions", {"prompt": text, **sampled}),
        ("/v1/responses", {"input": text, "temperature": 0, "max_output_tokens": 32}),
        ("/v1/embeddings", {"input": text}),
    ])  # fmt: skip
    connection = _connection(port)
    raw = json.dumps({"model": "smollm2-135m-instruct", **body})
    connection.request("POST", path, raw, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    if body.get("stream") and rng.random() < 0.1:
        answer.readline()
        connection.close()
    else:
        answer.read()
    return answer.status


def _connection(port: int) -> HTTPConnection:
    """This thread's connection, which is opened again after it was closed."""
    if getattr(_OWN, "port", None) != port:
        _OWN.port, _OWN.connection = port, HTTPConnection("127.0.0.1", port, timeout=600)
    return _OWN.connection  # type: ignore[no-any-return]
