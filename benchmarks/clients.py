"""HTTP clients of `bench_server.py`, for a process of their own: the standard library alone."""

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

OWN = local()
"""Each thread's connection."""


class Timed(NamedTuple):
    """Seconds from a request's start to each chunk of text or tokens, and the number of tokens."""

    times: list[float]
    num_tokens: int


def connection_to(port: int) -> HTTPConnection:
    if getattr(OWN, "port", None) != port:
        OWN.port, OWN.connection = port, HTTPConnection("127.0.0.1", port, timeout=600)
    return OWN.connection  # type: ignore[no-any-return]


def streamed(port: int, asked: dict[str, Any]) -> Timed:
    """Read one stream to its end."""
    connection, raw = connection_to(port), json.dumps(asked)
    started, times, num_tokens = perf_counter(), list[float](), 0
    connection.request("POST", "/v1/chat/completions", raw, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    while line := answer.readline():
        if line.startswith(b"data: {"):
            now, chunk = perf_counter() - started, json.loads(line[6:])
            choices, usage = chunk["choices"], chunk.get("usage")
            num_tokens = usage["completion_tokens"] if usage else num_tokens
            times += [now] if choices and (choices[0]["delta"].get("content") or choices[0].get("logprobs")) else []
    return Timed(times, num_tokens)


def together(port: int, asked: Sequence[dict[str, Any]]) -> list[Timed]:
    """Read all streams at once; times count from the common start."""
    started = perf_counter()

    def one(body: dict[str, Any]) -> Timed:
        late = perf_counter() - started
        found = streamed(port, body)
        return Timed([late + time for time in found.times], found.num_tokens)

    with ThreadPoolExecutor(len(asked)) as pool:
        return list(pool.map(one, asked))


def traffic(port: int, seconds: float, rate: float | None) -> dict[str, Any]:
    """Send mixed requests at a rate per second, or four at a time as fast as they are answered."""
    started, rng = perf_counter(), random.Random(1)
    ends, statuses = monotonic() + seconds, Counter[int]()

    def until_the_end(worker: int) -> None:
        own = random.Random(worker)
        while monotonic() < ends:
            statuses[mixed(port, own.randrange(10**9))] += 1

    def once(number: int) -> None:
        statuses[mixed(port, number)] += 1

    with ThreadPoolExecutor(4 if rate is None else 64) as pool:
        sent = [pool.submit(until_the_end, worker) for worker in range(4)] if rate is None else []
        while rate is not None and monotonic() < ends:
            sent.append(pool.submit(once, rng.randrange(10**9)))
            sleep(rng.expovariate(rate))
        for one in sent:
            one.result()
    return {"requests_per_second": statuses.total() / (perf_counter() - started), "statuses": dict(statuses)}


def mixed(port: int, number: int) -> int:
    """Send one request of several kinds; every tenth client disconnects in the middle of its stream."""
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
    connection, raw = connection_to(port), json.dumps({"model": "smollm2-135m-instruct", **body})
    connection.request("POST", path, raw, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    if body.get("stream") and rng.random() < 0.1:
        answer.readline()
        connection.close()
    else:
        answer.read()
    return answer.status
