"""Replicas under Ray next to plain servers: time per token, first token, from store to draft, and kills.

    .venv-ray/bin/python benchmarks/bench_ray.py [--rounds 6] [--tokens 64] [--kills 20] [--model MODEL] [--json FILE]

Two replicas with a thread each, and then two `precedent serve` processes with a thread each, answer two streams at
once, in alternating halves. Store to draft, and the kills, use a tiny model in float64, whose answers are compared with
plain decoding. Let nothing else run meanwhile.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import urllib.request
from argparse import Namespace
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from helpers.ray_cluster import RayCluster, free_port
from helpers.ray_traffic import Plain, Told, ask, prompt, traffic, until
from helpers.saved_models import saved
from openai import OpenAI
from precedent.routing import preferred

from measuring import options, run
from precedent.engine.engine import Engine
from precedent.target.load.loading import load_target
from precedent.text.end_tokens import end_token_ids
from precedent_postgres.testing import TemporaryServer
from precedent_server.keys import add_key
from precedent_testing.tiny_models import tiny_causal_lm

TENANTS = tuple(f"tenant-{number}" for number in range(8))
STREAMS, FIRSTS_PER_ROUND, EVENTS, STORED = 2, 8, 100, 5
KILLED_TOKENS = 300
"""Long enough that kills interrupt streams."""


class Ways:
    """Milliseconds per token and to the first one, of replicas under Ray and of plain servers."""

    def __init__(self, model: str, tokens: int) -> None:
        self.model, self.tokens = model, tokens
        self.per_token: dict[str, list[float]] = {"ray": [], "servers": []}
        self.firsts: dict[str, list[float]] = {"ray": [], "servers": []}
        self.bias = {str(token): -100 for token in end_token_ids(*load_target(model))}  # every answer has full length

    def streamed(self, url: str, key: str, question: str, tokens: int) -> tuple[float, float]:
        """Seconds to the first text and to the last. Raises SystemExit for an answer of another length."""
        started, seen, number = perf_counter(), list[float](), 0
        stream = OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=900).completions.create(
            model=self.model, prompt=question, max_tokens=tokens, temperature=0, stream=True,
            stream_options={"include_usage": True}, logit_bias=self.bias,
        )  # fmt: skip
        for chunk in stream:
            if chunk.choices and chunk.choices[0].text:
                seen.append(perf_counter() - started)
            number = chunk.usage.completion_tokens if chunk.usage else number
        if number != tokens or not seen:
            sys.exit(f"an answer has {number} tokens instead of {tokens}: its times say nothing")
        return seen[0], seen[-1]

    def take(self, way: str, urls: Sequence[str], keys: Sequence[str], numbers: Sequence[int]) -> None:
        """Measure one way once, after a first answer of each process that does not count."""

        def one(stream: int, number: int, tokens: int) -> float:
            question = f"Story {number} for listener {stream}. A lighthouse keeper looked at the sea and"
            first, last = self.streamed(urls[stream % len(urls)], keys[stream], question, tokens)
            return (last - first) / (tokens - 1) * 1e3

        with ThreadPoolExecutor(STREAMS) as threads:
            list(threads.map(one, range(STREAMS), [10**6] * STREAMS, [8] * STREAMS))
            for number in numbers:
                self.per_token[way] += threads.map(one, range(STREAMS), [number] * STREAMS, [self.tokens] * STREAMS)
        known = [
            self.streamed(urls[0], keys[0], "The sea is", 2)[0] for _ in range(len(numbers) * FIRSTS_PER_ROUND + 1)
        ]
        self.firsts[way] += [taken * 1e3 for taken in known[1:]]

    def figures(self) -> dict[str, Any]:
        tokens, firsts = ({way: median(found) for way, found in each.items()} for each in (self.per_token, self.firsts))
        more = {"more": firsts["ray"] - firsts["servers"]}
        return {"ms_per_token": tokens | {"ratio": tokens["ray"] / tokens["servers"]}, "first_token_ms": firsts | more}


@contextmanager
def running(number: int, *arguments: str) -> Iterator[list[str]]:
    """Start processes that serve HTTP, each on a port of its own with one thread; yields their addresses."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    ports = [str(free_port()) for _ in range(number)]
    started = [subprocess.Popen([*arguments, "--port", port], env=environment, **quiet) for port in ports]  # type: ignore[call-overload]
    try:
        yield [f"http://127.0.0.1:{port}" for port in ports]
    finally:
        for one in started:
            one.terminate()
        for one in started:
            one.wait(60)


def ingress(folder: Path, given: Namespace) -> dict[str, Any]:
    """Time per token and to the first one, with Ray and without, in alternating halves."""
    keys = {tenant: add_key(folder / "keys.json", f"b-{tenant}", tenant) for tenant in TENANTS}
    ways, half, program = Ways(given.model, given.tokens), max(1, given.rounds // 2), Path(sys.executable).parent
    for part in range(2):
        numbers = range(part * half, part * half + half)
        with running(STREAMS, str(program / "precedent"), "serve", "--target", given.model) as urls:
            for url in urls:
                until(lambda url=url: first_event(f"{url}/health") > 0, "a server")
            ways.take("servers", urls, ["none"] * STREAMS, numbers)
        with RayCluster(folder / f"log-{part}", num_cpus=2) as cluster:
            cluster.deploy(model=given.model, api_keys=folder / "keys.json", min_replicas=2, max_replicas=2)
            replicas = list(cluster.figures(keys[TENANTS[0]]))
            homes = {preferred(f"tenant {tenant}", replicas)[0]: key for tenant, key in keys.items()}
            ways.take("ray", [cluster.url], list(homes.values()), numbers)
    return ways.figures()


def floor(folder: Path) -> dict[str, Any]:
    """Milliseconds to the first event of an application that does nothing, with Ray and without."""
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)
    uvicorn = (sys.executable, "-m", "uvicorn", "empty_app:empty", "--log-level", "warning")
    with running(1, *uvicorn) as (alone,), RayCluster(folder / "log-empty", num_cpus=2) as cluster:
        cluster.deploy_app("empty_app:app")
        found = {}
        for name, url in (("ray", cluster.url), ("server", alone)):
            until(lambda url=url: first_event(url) > 0, "an answer of the empty application")
            found[name] = median(first_event(url) for _ in range(EVENTS))
    return {"first_event_ms": {**found, "more": found["ray"] - found["server"]}}


def first_event(url: str) -> float:
    """Milliseconds to the first bytes of an answer; 0 while nobody answers."""
    started = perf_counter()
    with suppress(OSError), urllib.request.urlopen(url, timeout=5) as answer:
        answer.readline()
        found = (perf_counter() - started) * 1e3
        answer.read()
        return found
    return 0.0


def kills(folder: Path, number: int) -> dict[str, Any]:
    """Seconds from an answer's end to its draft in another replica, and what `number` kills lose or change."""
    model = saved(folder / "model", tiny_causal_lm(scale=4.0))
    keys = {tenant: add_key(folder / "tiny.json", f"t-{tenant}", tenant) for tenant in TENANTS}
    told, first = Told(), keys[TENANTS[0]]
    with ExitStack() as held:
        database = held.enter_context(TemporaryServer())
        plain = Plain(held.enter_context(closing(Engine.load(str(model)))))
        cluster = held.enter_context(RayCluster(folder / "log"))
        shared = {"cache": database.url, "api_keys": folder / "tiny.json", "num_cpus": 0.5, "min_replicas": 2}
        cluster.deploy(model=f"tiny={model}", max_replicas=2, target_ongoing_requests=1, **shared)
        drafted = [store_to_draft(cluster, first, 1000 + attempt) for attempt in range(STORED)]
        for kill in range(number):
            pid = cluster.replicas()[kill % 2]  # looked up before, which takes a while

            def kill_one(run: Told, pid: int = pid) -> None:
                until(lambda: len(run.answered) >= len(TENANTS), "the first answers")
                cluster.kill(pid)

            numbers = range(kill * 4, kill * 4 + 4)
            found = traffic(cluster, keys, numbers, plain, meanwhile=kill_one, tokens=KILLED_TOKENS)
            told.answered += found.answered
            told.wrong += found.wrong
            told.errors += found.errors
            until(lambda: len(cluster.figures(first)) == 2, "a replica in the place of the killed one")
    counts = {"requests": number * 4 * len(TENANTS), "answered": len(told.answered), "changed": len(told.wrong)}
    times = {"least": min(drafted), "most": max(drafted), "times": len(drafted)}
    return {"store_to_draft_seconds": times, "kills": number, **counts, "repeated": sum(told.kinds.values())}


def store_to_draft(cluster: RayCluster, key: str, number: int) -> float:
    """Seconds until a replica that is not the tenant's own drafts an answer that the tenant's own has just stored.

    Long answers keep the tenant's own replica busy meanwhile, so that its router sends what follows to the other.
    """
    client = cluster.client(key)
    with ThreadPoolExecutor(4) as threads:
        ask(client, prompt(TENANTS[0], number))
        stored = perf_counter()
        busy = [threads.submit(ask, client, prompt(TENANTS[0], 2000 + place), 700) for place in range(3)]
        while not ask(client, prompt(TENANTS[0], number))[1]:
            pass
        found = perf_counter() - stored
        for one in busy:
            one.result()
    return found


def measure(given: Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if given.rounds:
            found |= {"ingress": ingress(folder, given), "empty application": floor(folder)}
        if given.kills:
            found["kills"] = kills(folder, given.kills)
    return found


if __name__ == "__main__":
    run(options(__doc__, rounds=6, tokens=64, kills=20, model="smollm2-135m-instruct"), measure)
