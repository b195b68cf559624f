"""Replicas under Ray beside plain servers: time per token, first token, from store to draft, and kills.

    python tests/benchmarks/bench_ray.py [--rounds 6] [--tokens 64] [--kills 20] [--model MODEL] [--json FILE]

Run it in the environment of `make test-ray`. Two replicas with a thread each, and then two `precedent serve` processes
with a thread each, answer two streams at once: the same load per core, in alternating halves. What one replica stores
and another drafts, and the kills, are those of a tiny model in float64, whose answers are compared with plain decoding.
Let nothing else run meanwhile.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from helpers.ray_cluster import RayCluster, free_port
from helpers.ray_traffic import Plain, Told, ask, prompt, traffic, until
from helpers.saved_models import saved
from measurement import Measurement, json_option
from openai import OpenAI

from precedent.engine.engine import Engine
from precedent.routing import preferred
from precedent.target.load.loading import load_target
from precedent.testing.tiny_models import tiny_causal_lm
from precedent.text.end_tokens import end_token_ids
from precedent_postgres.testing import TemporaryServer
from precedent_server.stored_keys import add_key

STREAMS = 2
TENANTS = tuple(f"tenant-{number}" for number in range(8))
FIRSTS_PER_ROUND = 8
EVENTS = 100
STORED = 5
KILLED_TOKENS = 300
"""Long enough that kills meet streams."""


class Asked:
    """Asks a model for answers of exactly so many tokens; `ends`, which would end one, are forbidden."""

    def __init__(self, model: str, ends: Sequence[int]) -> None:
        self._model, self._bias = model, {str(token): -100 for token in ends}

    def streamed(self, url: str, key: str, question: str, tokens: int) -> tuple[float, float]:
        """Seconds to the first text and to the last. Raises SystemExit for an answer of another length."""
        client = OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=900)
        started, seen, number = perf_counter(), list[float](), 0
        stream = client.completions.create(
            model=self._model, prompt=question, max_tokens=tokens, temperature=0, stream=True,
            stream_options={"include_usage": True}, logit_bias=self._bias,
        )  # fmt: skip
        for chunk in stream:
            if chunk.choices and chunk.choices[0].text:
                seen.append(perf_counter() - started)
            number = chunk.usage.completion_tokens if chunk.usage else number
        if number != tokens or not seen:
            sys.exit(f"an answer has {number} tokens instead of {tokens}: its times say nothing")
        return seen[0], seen[-1]

    def per_token(self, urls: Sequence[str], keys: Sequence[str], numbers: Sequence[int], tokens: int) -> list[float]:
        """Milliseconds per token after the first of `STREAMS` streams at once, a fresh question each."""

        def one(stream: int, number: int) -> float:
            question = f"Story {number} for listener {stream}. A lighthouse keeper looked at the sea and"
            first, last = self.streamed(urls[stream % len(urls)], keys[stream], question, tokens)
            return (last - first) / (tokens - 1) * 1e3

        with ThreadPoolExecutor(STREAMS) as threads:
            return [found for number in numbers for found in threads.map(one, range(STREAMS), [number] * STREAMS)]

    def firsts(self, url: str, key: str, count: int) -> list[float]:
        """Milliseconds to the first text of a known prompt, `count` times, one after the other."""
        return [self.streamed(url, key, "The sea is", 2)[0] * 1e3 for _ in range(count + 1)][1:]


@contextmanager
def plain_servers(model: str, number: int) -> Iterator[list[str]]:
    """`precedent serve` processes with one thread each."""
    ports = [free_port() for _ in range(number)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    program = str(Path(sys.executable).parent / "precedent")
    running = [
        subprocess.Popen([program, "serve", "--target", model, "--port", str(port)], env=environment,
                         stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for port in ports
    ]  # fmt: skip
    try:
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        for url in urls:
            until(lambda url=url: answers(url), "a server")
        yield urls
    finally:
        for one in running:
            one.terminate()
        for one in running:
            one.wait(60)


def answers(url: str) -> bool:
    with suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
        return bool(answer.status == 200)
    return False


def of_two_homes(keys: dict[str, str], replicas: Sequence[str]) -> list[str]:
    """The keys of tenants that prefer different replicas."""
    homes = {preferred(f"tenant {tenant}", replicas)[0]: key for tenant, key in keys.items()}
    return list(homes.values())[:STREAMS]


def ingress(folder: Path, model: str, rounds: int, tokens: int) -> dict[str, Any]:
    """Time per token and to the first one, with Ray and without, in alternating halves."""
    keys = {tenant: add_key(folder / "keys.json", f"b-{tenant}", tenant) for tenant in TENANTS}
    asked, half = Asked(model, ends_of(model)), max(1, rounds // 2)
    ray, plain = (Times(), Times())
    for part in range(2):
        numbers = range(part * half, part * half + half)
        with plain_servers(model, STREAMS) as urls:
            plain.take(asked, urls, ["none"] * STREAMS, numbers, tokens)
        with RayCluster(folder / f"log-{part}", num_cpus=2) as cluster:
            cluster.deploy(model=model, api_keys=folder / "keys.json", min_replicas=2, max_replicas=2)
            chosen = of_two_homes(keys, list(cluster.figures(keys[TENANTS[0]])))
            ray.take(asked, [cluster.url], chosen, numbers, tokens)
    return {
        "ms_per_token": {"ray": median(ray.tokens), "servers": median(plain.tokens),
                         "ratio": median(ray.tokens) / median(plain.tokens)},
        "first_token_ms": {"ray": median(ray.firsts), "server": median(plain.firsts),
                           "more": median(ray.firsts) - median(plain.firsts)},
    }  # fmt: skip


@dataclass
class Times:
    """Milliseconds per token, and to the first one."""

    tokens: list[float] = field(default_factory=list)
    firsts: list[float] = field(default_factory=list)

    def take(self, asked: Asked, urls: Sequence[str], keys: Sequence[str], numbers: Sequence[int], tokens: int) -> None:
        """Measure one way once, after a first answer of each process that does not count."""
        asked.per_token(urls, keys, [10**6], 8)
        self.tokens += asked.per_token(urls, keys, numbers, tokens)
        self.firsts += asked.firsts(urls[0], keys[0], len(numbers) * FIRSTS_PER_ROUND)


def floor(folder: Path) -> dict[str, Any]:
    """Milliseconds to the first event of an application that does nothing, with Ray and without."""
    here = {"PYTHONPATH": str(Path(__file__).parent)}
    os.environ.update(here)
    port = free_port()
    place = ("--port", str(port), "--log-level", "warning")
    alone = subprocess.Popen([sys.executable, "-m", "uvicorn", "empty_app:empty", *place])
    try:
        with RayCluster(folder / "log-empty", num_cpus=2) as cluster:
            cluster.deploy_app("empty_app:app")
            urls = {"ray": cluster.url, "server": f"http://127.0.0.1:{port}"}
            for url in urls.values():
                until(lambda url=url: first_event(url) > 0, "an answer of the empty application")
            times = {name: [first_event(url) for _ in range(EVENTS)] for name, url in urls.items()}
    finally:
        alone.terminate()
        alone.wait(60)
    found = {name: median(each) for name, each in times.items()}
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


def ends_of(model: str) -> list[int]:
    """The tokens that end an answer of this model."""
    target, tokenizer = load_target(model)
    return sorted(end_token_ids(target, tokenizer))


def kills(folder: Path, number: int) -> dict[str, Any]:
    """Seconds from an answer's end to its draft in another replica, and what `number` kills lose or change."""
    model = saved(folder / "model", tiny_causal_lm(scale=4.0))
    keys = {tenant: add_key(folder / "tiny.json", f"t-{tenant}", tenant) for tenant in TENANTS}
    told, drafted = Told(), list[float]()
    with ExitStack() as held:
        database = held.enter_context(TemporaryServer())
        plain = Plain(held.enter_context(closing(Engine.load(str(model)))))
        cluster = held.enter_context(RayCluster(folder / "log"))
        shared = {"cache": database.url, "api_keys": folder / "tiny.json", "num_cpus": 0.5, "min_replicas": 2}
        cluster.deploy(model=f"tiny={model}", max_replicas=2, target_ongoing_requests=1, **shared)
        for attempt in range(STORED):
            drafted.append(store_to_draft(cluster, keys[TENANTS[0]], 1000 + attempt))
        for kill in range(number):
            kill_one = partial(kill_amid, cluster, cluster.replicas()[kill % 2])
            numbers = range(kill * 4, kill * 4 + 4)
            found = traffic(cluster, keys, numbers, plain, meanwhile=kill_one, tokens=KILLED_TOKENS)
            print(
                f"kill {kill + 1}: {len(found.answered)} answered, {len(found.wrong)} changed, {dict(found.kinds)}",
                flush=True,
            )
            told.answered += found.answered
            told.wrong += found.wrong
            told.errors += found.errors
            until(lambda: len(cluster.figures(keys[TENANTS[0]])) == 2, "a replica in the place of the killed one")
    return {
        "store_to_draft_seconds": {"least": min(drafted), "most": max(drafted), "times": len(drafted)},
        "kills": number,
        "requests": number * 4 * len(TENANTS),
        "answered": len(told.answered),
        "changed": len(told.wrong),
        "repeated": sum(told.kinds.values()),
        "repeated_after": dict(told.kinds),
    }


def kill_amid(cluster: RayCluster, pid: int, run: Told) -> None:
    """End one of two replicas while all tenants ask; its process is looked for before, which takes a while."""
    until(lambda: len(run.answered) >= len(TENANTS), "the first answers")
    cluster.kill(pid)


def store_to_draft(cluster: RayCluster, key: str, number: int) -> float:
    """Seconds until another replica than the tenant's own drafts an answer, which that one has just stored.

    Long answers keep the tenant's own replica busy meanwhile, so that its router sends what follows to the other.
    """
    client = cluster.client(key)
    with ThreadPoolExecutor(4) as threads:
        ask(client, prompt(TENANTS[0], number))
        stored = perf_counter()
        busy = [threads.submit(ask, client, prompt(TENANTS[0], 2000 + place), 700) for place in range(3)]
        while True:
            _, recalled = ask(client, prompt(TENANTS[0], number))
            if recalled:
                found = perf_counter() - stored
                break
        for one in busy:
            one.result()
    return found


def main() -> None:
    """Measure, print a table, and write the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    json_option(parser)
    args = parser.parse_args()
    measurement, found = Measurement(), dict[str, Any]()
    with tempfile.TemporaryDirectory() as folder:
        if args.rounds:
            found["ingress"] = ingress(Path(folder), args.model, args.rounds, args.tokens)
            found["empty application"] = floor(Path(folder))
        if args.kills:
            found["kills"] = kills(Path(folder), args.kills)
    for part, figures in found.items():
        for name, value in figures.items():
            print(f"{part:>18}  {name:24}  {value}")
    measurement.write(args.json, found)


if __name__ == "__main__":
    main()
