"""The server beside the same engine in process, 32 streams at once, and its memory under mixed traffic.

    python tests/benchmarks/bench_server.py [--rounds 8] [--streams 32] [--minutes 0] [--json FILE]

Clients run in a process of their own (`server_clients.py`), on keep-alive connections of the standard library. Both
ways take turns with the same prompts, of which all but the end is kept, so that they give the same answers from the
same drafts. `--minutes` then sends mixed traffic at 90 % of the load that the server was seen to bear, and notes its
memory, and what of it idle conversations are and running requests reserve. Let nothing else run meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any, NamedTuple

import uvicorn
from measurement import Measurement, json_option
from server_clients import Timed, streamed, together, traffic

from precedent.cache import SpeculationCache
from precedent.config import SpeculationConfig
from precedent.engine.engine import Engine
from precedent.langchain import ChatPrecedent
from precedent_server.app import server_app
from precedent_server.serving import Served, Serving

MODEL = "smollm2-135m-instruct"
TOKENS = 128
FIRST_TOKENS_PER_ROUND = 8
SAMPLES_PER_MINUTE = 12


def body(number: int, max_tokens: int, speculation: Any) -> dict[str, Any]:
    """A request that no other shares its beginning with."""
    text = f"{number:06d}: write a long story about a lighthouse keeper and the sea, with many details."
    asked = {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": max_tokens}
    counted = {"stream": True, "stream_options": {"include_usage": True}}
    return {"model": MODEL, "speculation": speculation, **counted, **asked}


def in_process(model: ChatPrecedent, asked: dict[str, Any]) -> Timed:
    """The same request without a server."""
    settings = {name: asked[name] for name in ("temperature", "max_tokens", "speculation")}
    if isinstance(settings["speculation"], dict):
        settings["speculation"] = SpeculationConfig.from_dict(settings["speculation"])
    started, times, num_tokens = perf_counter(), list[float](), 0
    for chunk in model.stream(asked["messages"][0]["content"], **settings):
        times += [perf_counter() - started] if chunk.text else []
        num_tokens += chunk.usage_metadata["output_tokens"] if chunk.usage_metadata else 0
    return Timed(times, num_tokens)


@contextmanager
def serving_at(serving: Serving) -> Iterator[int]:
    config = uvicorn.Config(server_app(serving), port=0, log_config=None, lifespan="off", timeout_keep_alive=600)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield int(server.servers[0].sockets[0].getsockname()[1])
    finally:
        server.should_exit = True
        thread.join()


class Bench:
    """An engine, asked in process and by clients of a server on it."""

    def __init__(self, engine: Engine, port: int, clients: ProcessPoolExecutor) -> None:
        self._engine, self._port, self._clients = engine, port, clients
        self._chat = ChatPrecedent.from_engine(engine)
        self._number, self._turn = 0, 1

    def pair(self, max_tokens: int, speculation: Any = False, *, fresh: bool = True) -> dict[str, Timed]:
        """One request asked each way, in an order that alternates: a `fresh` one, which both then know, or the same."""
        asked = self._next(max_tokens, speculation) if fresh else body(0, max_tokens, speculation)
        if fresh:
            in_process(self._chat, {**asked, "max_tokens": 1, "speculation": False})
        found, self._turn = {}, -self._turn
        for way in ("process", "server")[:: self._turn]:
            if way == "process":
                found[way] = in_process(self._chat, asked)
            else:
                found[way] = self._clients.submit(streamed, self._port, asked).result()
        return found

    def _next(self, max_tokens: int, speculation: Any = False) -> dict[str, Any]:
        self._number += 1
        return body(self._number, max_tokens, speculation)

    def one_stream(self, rounds: int) -> dict[str, Any]:
        """Time of a whole answer and to its first token, in milliseconds; medians of both ways."""
        self.pair(TOKENS, speculation=True)  # leaves answers to draft from
        found: dict[str, Any] = {}
        for name, speculation in (("plain", False), ("speculated", {"write_back": False})):
            pairs = [self.pair(TOKENS, speculation) for _ in range(rounds)]
            speeds = {way: median(one[way].tokens_per_second for one in pairs) for way in pairs[0]}
            found[name] = {
                **speeds,
                "ratio": median(one["server"].tokens_per_second / one["process"].tokens_per_second for one in pairs),
            }
        firsts = [self.pair(2, fresh=False) for _ in range(rounds * FIRST_TOKENS_PER_ROUND + 1)][1:]
        found["first_token_ms"] = {way: median(one[way].times[0] for one in firsts) * 1e3 for way in firsts[0]}
        found["first_token_ms"]["more"] = (
            median(one["server"].times[0] - one["process"].times[0] for one in firsts) * 1e3
        )
        return found

    def many_streams(self, number: int) -> dict[str, Any]:
        """The longest silence of any stream while all of them run, in median steps."""
        asked = [{**self._next(64), "logprobs": True} for _ in range(number)]  # so that every token is told at once
        found = self._clients.submit(together, self._port, asked).result()
        begun, ended = max(one.times[0] for one in found), min(one.times[-1] for one in found)
        gaps = [
            later - sooner
            for one in found
            for sooner, later in zip(one.times, one.times[1:], strict=False)
            if begun <= sooner and later <= ended
        ]
        return {
            "streams": number,
            "step_ms": median(gaps) * 1e3,
            "longest_ms": max(gaps) * 1e3,
            "longest_in_steps": max(gaps) / median(gaps),
        }

    def soak(self, minutes: float) -> dict[str, Any]:
        """What the process holds, minute by minute, under mixed traffic at 90 % of what the server bears."""
        bears = self._clients.submit(traffic, self._port, 30.0, None).result()
        running = self._clients.submit(traffic, self._port, minutes * 60, 0.9 * bears["requests_per_second"])
        held, pause = list[Held](), 60 / SAMPLES_PER_MINUTE
        while not running.done():
            held.append(self._held())
            time.sleep(pause)
        minutes_of = [held[at : at + SAMPLES_PER_MINUTE] for at in range(0, len(held), SAMPLES_PER_MINUTE)]
        by_minute = [
            {"minute": number, **{name: round(median(column), 1) for name, column in _columns(one)}}
            for number, one in enumerate(minutes_of, 1)
        ]
        return {"bears": bears, "sent": running.result(), "by_minute": by_minute}

    def _held(self) -> Held:
        cache = self._engine.cache
        assert cache is not None
        found = self._engine.metrics()
        idle, reserved = found.kv_cache_idle_bytes / 2**20, found.kv_cache_reserved_bytes / 2**20
        requests = found.num_requests_running + found.num_requests_waiting
        return Held(resident_mebibytes(), idle, reserved, requests, cache.stats().records)


class Held(NamedTuple):
    """What a process holds at one moment."""

    mebibytes: float
    idle_kv_mebibytes: float
    reserved_kv_mebibytes: float
    requests: int
    completions: int


def _columns(held: Sequence[Held]) -> Iterator[tuple[str, tuple[float, ...]]]:
    return zip(Held._fields, zip(*held, strict=True), strict=True)


def resident_mebibytes() -> float:
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE") / 2**20


def main() -> None:
    """Measure, print, and write the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--minutes", type=float, default=0.0)
    json_option(parser)
    args = parser.parse_args()
    measurement = Measurement()
    with ExitStack() as held:
        clients = held.enter_context(ProcessPoolExecutor(1, mp_context=get_context("spawn")))
        clients.submit(int).result()
        folder = held.enter_context(TemporaryDirectory(prefix="bench-server-"))
        cache = held.enter_context(SpeculationCache.open(folder))
        engine = held.enter_context(closing(Engine.load(MODEL, cache=cache)))
        serving = held.enter_context(closing(Serving({MODEL: Served.of(MODEL, engine)})))
        bench = Bench(engine, held.enter_context(serving_at(serving)), clients)
        found: dict[str, Any] = {"one stream": bench.one_stream(args.rounds)}
        found["streams"] = bench.many_streams(args.streams)
        if args.minutes:
            found["soak"] = bench.soak(args.minutes)
    print(json.dumps(found, indent=1))
    measurement.write(args.json, found)


if __name__ == "__main__":
    main()
