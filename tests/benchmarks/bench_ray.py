"""Replicas under Ray beside plain servers: time per token, first token, from store to draft, and kills.

    python tests/benchmarks/bench_ray.py [--rounds 6] [--tokens 64] [--kills 20] [--model MODEL] [--json FILE]

Run it in the environment of `make test-ray`. Two replicas with a thread each, and then two `precedent serve` processes
with a thread each, answer two streams at once: the same load per core. First tokens take turns between both ways. What
one replica stores and another drafts, and the kills, are those of a tiny model in float64, whose answers are compared
with plain decoding. Let nothing else run meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from helpers.ray_cluster import RayCluster, free_port
from helpers.ray_traffic import Plain, Told, ask, prompt, traffic, until
from helpers.saved_models import saved
from openai import OpenAI

from precedent.engine.engine import Engine
from precedent.routing import preferred
from precedent.runtime.processor import processor
from precedent.server.stored_keys import add_key
from precedent.testing.tiny_models import tiny_causal_lm
from precedent_postgres.testing import TemporaryServer

STREAMS = 2
TENANTS = tuple(f"tenant-{number}" for number in range(8))
FIRSTS_PER_ROUND = 8
STORED = 5
KILLED_TOKENS = 300
"""Long enough that kills meet streams."""


def streamed(url: str, key: str, model: str, question: str, tokens: int) -> tuple[float, float, int]:
    """Seconds to the first text and to the end of one stream, and its tokens."""
    client = OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=900)
    started, first, number = perf_counter(), 0.0, 0
    stream = client.completions.create(
        model=model, prompt=question, max_tokens=tokens, temperature=0, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    for chunk in stream:
        if chunk.choices and chunk.choices[0].text and not first:
            first = perf_counter() - started
        number = chunk.usage.completion_tokens if chunk.usage else number
    return first, perf_counter() - started, number


def per_token(
    urls: Sequence[str], keys: Sequence[str], model: str, rounds: int, tokens: int, offset: int
) -> list[float]:
    """Milliseconds per token after the first of `STREAMS` streams at once, a fresh question each."""

    def one(stream: int, number: int) -> float:
        question = f"{offset + number} {stream}: write a long story about a lighthouse keeper and the sea."
        first, whole, made = streamed(urls[stream % len(urls)], keys[stream], model, question, tokens)
        return (whole - first) / max(1, made - 1) * 1e3

    with ThreadPoolExecutor(STREAMS) as threads:
        return [found for number in range(rounds) for found in threads.map(one, range(STREAMS), [number] * STREAMS)]


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
    """Time per token and to the first one, with Ray and without."""
    keys = {tenant: add_key(folder / "keys.json", f"b-{tenant}", tenant) for tenant in TENANTS}
    with ExitStack() as held:
        cluster = held.enter_context(RayCluster(folder / "log", num_cpus=2))
        cluster.deploy(model=model, api_keys=folder / "keys.json", min_replicas=2, max_replicas=2)
        chosen = of_two_homes(keys, list(cluster.figures(keys[TENANTS[0]])))
        per_token([cluster.url], chosen, model, 1, 8, 900)
        ray = per_token([cluster.url], chosen, model, rounds, tokens, 0)
        with_ray = [streamed(cluster.url, chosen[0], model, "The sea", 2)[0] for _ in range(rounds * FIRSTS_PER_ROUND)][
            1:
        ]
    with plain_servers(model, STREAMS) as urls:
        per_token(urls, ["none"] * STREAMS, model, 1, 8, 900)
        plain = per_token(urls, ["none"] * STREAMS, model, rounds, tokens, 0)
        without = [streamed(urls[0], "none", model, "The sea", 2)[0] for _ in range(rounds * FIRSTS_PER_ROUND)][1:]
    return {
        "ms_per_token": {"ray": median(ray), "servers": median(plain), "ratio": median(ray) / median(plain)},
        "first_token_ms": {"ray": median(with_ray) * 1e3, "server": median(without) * 1e3,
                           "more": (median(with_ray) - median(without)) * 1e3},
    }  # fmt: skip


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
        "store_to_draft_seconds": drafted,
        "kills": number,
        "requests": number * 4 * len(TENANTS),
        "answered": len(told.answered),
        "changed": len(told.wrong),
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
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found: dict[str, Any] = {"processor": processor(), "load_before": os.getloadavg()[0]}
    with tempfile.TemporaryDirectory() as folder:
        if args.rounds:
            found["ingress"] = ingress(Path(folder), args.model, args.rounds, args.tokens)
        if args.kills:
            found["kills"] = kills(Path(folder), args.kills)
    found["load_after"], found["time"] = os.getloadavg()[0], time.strftime("%Y-%m-%d")
    for part, figures in found.items():
        for name, value in figures.items() if isinstance(figures, dict) else [("", figures)]:
            print(f"{part:>12}  {name:24}  {value}")
    if args.json:
        args.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
