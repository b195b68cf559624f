"""The server next to the same engine in process, 32 streams at once, and its memory under mixed traffic.

    python benchmarks/bench_server.py [--rounds 8] [--streams 32] [--minutes 0] [--json FILE]

Clients run in a process of their own (`clients.py`) on keep-alive connections of the standard library. Both ways
alternate with the same prompts, whose KV is kept except for the end, so that they give the same answers from the same
drafts. `--minutes` then sends mixed traffic at 90 % of the load that the server was seen to sustain, and records the
memory of the process. Let nothing else run meanwhile.
"""

from __future__ import annotations

import os
import threading
import time
from argparse import Namespace
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import uvicorn

from clients import Timed, streamed, together, traffic
from measuring import options, run
from precedent.cache import SpeculationCache
from precedent.config import SpeculationConfig
from precedent.engine.engine import Engine
from precedent.langchain import ChatPrecedent
from precedent_server.app import server_app
from precedent_server.serving import Served, Serving

MODEL = "smollm2-135m-instruct"
TOKENS, FIRST_TOKENS_PER_ROUND, SAMPLES_PER_MINUTE = 128, 8, 12


def body(number: int, max_tokens: int, speculation: Any) -> dict[str, Any]:
    """Make a request that shares its beginning with no other."""
    text = f"{number:06d}: write a long story about a lighthouse keeper and the sea, with many details."
    asked = {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": max_tokens}
    counted = {"stream": True, "stream_options": {"include_usage": True}}
    return {"model": MODEL, "speculation": speculation, **counted, **asked}


def in_process(model: ChatPrecedent, asked: dict[str, Any]) -> Timed:
    """Answer the same request without a server."""
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
    """An engine, called in process and through a server by clients in another process."""

    def __init__(self, engine: Engine, port: int, clients: ProcessPoolExecutor) -> None:
        self.engine, self.port, self.clients = engine, port, clients
        self.chat, self.number, self.turn = ChatPrecedent.from_engine(engine), 0, 1

    def pair(self, max_tokens: int, speculation: Any = False, *, fresh: bool = True) -> dict[str, Timed]:
        """Ask one request each way, in alternating order: a new one that both already know, or always the same."""
        self.number, self.turn = self.number + fresh, -self.turn
        asked = body(self.number if fresh else 0, max_tokens, speculation)
        if fresh:
            in_process(self.chat, {**asked, "max_tokens": 1, "speculation": False})
        ways = {
            "process": lambda: in_process(self.chat, asked),
            "server": lambda: self.clients.submit(streamed, self.port, asked).result(),
        }
        return {way: ways[way]() for way in list(ways)[:: self.turn]}

    def one_stream(self, rounds: int) -> dict[str, Any]:
        """Tokens per second of a whole answer, and milliseconds to the first token; medians of both ways."""
        self.pair(TOKENS, speculation=True)  # leaves answers to draft from
        found: dict[str, Any] = {}
        for name, speculation in (("plain", False), ("speculated", {"write_back": False})):
            pairs = [self.pair(TOKENS, speculation) for _ in range(rounds)]
            speeds = [{way: one.num_tokens / one.times[-1] for way, one in each.items()} for each in pairs]
            found[name] = {way: median(each[way] for each in speeds) for way in ("server", "process")}
            found[name]["ratio"] = median(each["server"] / each["process"] for each in speeds)
        firsts = [self.pair(2, fresh=False) for _ in range(rounds * FIRST_TOKENS_PER_ROUND + 1)][1:]
        times = [{way: one.times[0] * 1e3 for way, one in each.items()} for each in firsts]
        found["first_token_ms"] = {way: median(each[way] for each in times) for way in ("server", "process")}
        found["first_token_ms"]["more"] = median(each["server"] - each["process"] for each in times)
        return found

    def many_streams(self, number: int) -> dict[str, Any]:
        """Longest silence of any stream while all of them run, in median steps."""
        asked = [{**body(10**5 + place, 64, False), "logprobs": True} for place in range(number)]  # one chunk per token
        found = self.clients.submit(together, self.port, asked).result()
        begun, ended = max(one.times[0] for one in found), min(one.times[-1] for one in found)
        gaps = [
            later - sooner
            for one in found
            for sooner, later in zip(one.times, one.times[1:], strict=False)
            if begun <= sooner and later <= ended
        ]
        step, longest = median(gaps), max(gaps)
        times = {"step_ms": step * 1e3, "longest_ms": longest * 1e3, "longest_in_steps": longest / step}
        return {"streams": number, **times}

    def soak(self, minutes: float) -> dict[str, Any]:
        """Memory of the process by minute under mixed traffic at 90 % of what the server sustains."""
        bears = self.clients.submit(traffic, self.port, 30.0, None).result()
        running = self.clients.submit(traffic, self.port, minutes * 60, 0.9 * bears["requests_per_second"])
        held = list[dict[str, float]]()
        while not running.done():
            held.append(self.held())
            time.sleep(60 / SAMPLES_PER_MINUTE)
        starts = range(0, len(held), SAMPLES_PER_MINUTE)
        by_minute = [
            {"minute": number}
            | {name: median(one[name] for one in held[at : at + SAMPLES_PER_MINUTE]) for name in held[0]}
            for number, at in enumerate(starts, 1)
        ]
        return {"bears": bears, "sent": running.result(), "by_minute": by_minute}

    def held(self) -> dict[str, float]:
        """Mebibytes of the process, of idle and reserved KV; requests and completions."""
        found, pages = self.engine.metrics(), Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
        return {
            "mebibytes": int(pages) * os.sysconf("SC_PAGE_SIZE") / 2**20,
            "idle_kv_mebibytes": found.kv_cache_idle_bytes / 2**20,
            "reserved_kv_mebibytes": found.kv_cache_reserved_bytes / 2**20,
            "requests": found.num_requests_running + found.num_requests_waiting,
            "completions": self.engine.cache.stats().records,
        }


def measure(given: Namespace) -> dict[str, Any]:
    with ExitStack() as held:
        clients = held.enter_context(ProcessPoolExecutor(1, mp_context=get_context("spawn")))
        clients.submit(int).result()
        cache = held.enter_context(SpeculationCache.open(held.enter_context(TemporaryDirectory(prefix="bench-"))))
        engine = held.enter_context(closing(Engine.load(MODEL, cache=cache)))
        serving = held.enter_context(closing(Serving({MODEL: Served.of(MODEL, engine)})))
        bench = Bench(engine, held.enter_context(serving_at(serving)), clients)
        found: dict[str, Any] = {"one stream": bench.one_stream(given.rounds)}
        found["streams"] = bench.many_streams(given.streams)
        return found | ({"soak": bench.soak(given.minutes)} if given.minutes else {})


if __name__ == "__main__":
    run(options(__doc__, rounds=8, streams=32, minutes=0.0), measure)
