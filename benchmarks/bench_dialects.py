"""Anthropic's and Ollama's routes next to OpenAI's on a scripted model: first tokens, and streams of all at once.

    python benchmarks/bench_dialects.py [--rounds 400] [--streams 32] [--json FILE]

Routes alternate in changing order; differences to OpenAI's are paired by round, their median has a 95 % bootstrap
interval. A step is the median gap between two events of a stream. Let nothing else run meanwhile.
"""

from __future__ import annotations

import json
import os
import re
from argparse import Namespace
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack, closing
from itertools import pairwise
from multiprocessing import get_context
from random import Random
from statistics import median, quantiles
from time import perf_counter
from typing import Any

from bench_server import serving_at
from clients import connection_to
from measuring import options, run
from precedent_server.serving import Served, Serving
from precedent_testing.scripted_model import scripted_model_engine

SHORT, LONG = "Answer briefly.", "Go on."
ANSWERS = {SHORT: "Yes.", LONG: " ".join(f"word{number}" for number in range(120))}
ROUTES: dict[str, tuple[str, dict[str, Any]]] = {
    "openai": ("/v1/chat/completions", {"temperature": 0}),
    "anthropic": ("/v1/messages", {"temperature": 0, "max_tokens": 2000}),
    "ollama": ("/api/chat", {"options": {"temperature": 0}}),
}
HEADERS = {"Content-Type": "application/json", "anthropic-version": "2023-06-01"}
TEXT, WARM_UP = re.compile(rb'"(content|text)": ?"[^"]'), 5


def answer(prompt: str) -> str:
    return ANSWERS[SHORT if SHORT in prompt else LONG]


def times_of(port: int, route: str, said: str) -> list[float]:
    """Clock times of a stream's beginning and of its lines with text."""
    asked = {"model": "scripted", "messages": [{"role": "user", "content": said}], "stream": True}
    (path, more), connection, found = ROUTES[route], connection_to(port), [perf_counter()]
    connection.request("POST", path, json.dumps(asked | more), HEADERS)
    response = connection.getresponse()
    while line := response.readline():
        found += [perf_counter()] if TEXT.search(line) else []
    assert len(found) > 1, f"{path} answers {response.status} without a text"
    return found


def first_tokens(port: int, rounds: int) -> dict[str, list[float]]:
    """Milliseconds to the first event of each route, by round."""
    rng, found = Random(0), {route: list[float]() for route in ROUTES}
    for route in (one for _ in range(rounds + WARM_UP) for one in rng.sample(list(ROUTES), len(ROUTES))):
        begun, first, *_ = times_of(port, route, SHORT)
        found[route].append((first - begun) * 1e3)
    return {route: times[WARM_UP:] for route, times in found.items()}


def mixed(port: int, streams: int) -> list[list[float]]:
    with ThreadPoolExecutor(streams) as pool:
        return list(pool.map(lambda place: times_of(port, list(ROUTES)[place % len(ROUTES)], LONG), range(streams)))


def of_pairs(values: list[float]) -> dict[str, Any]:
    cuts = quantiles((median(Random(seed).choices(values, k=len(values))) for seed in range(2000)), n=40)
    return {"median": median(values), "interval": [cuts[0], cuts[-1]]}


def measure(given: Namespace) -> dict[str, Any]:
    os.environ["PRECEDENT_SPECULATION"] = "off"  # a token at each step
    with ExitStack() as held:
        clients = held.enter_context(ProcessPoolExecutor(1, mp_context=get_context("spawn")))
        engine = held.enter_context(closing(scripted_model_engine(answer, name="scripted")))
        serving = held.enter_context(closing(Serving({"scripted": Served.of("scripted", engine)})))
        port = held.enter_context(serving_at(serving))
        firsts = clients.submit(first_tokens, port, given.rounds).result()
        streams = clients.submit(mixed, port, given.streams).result()
    usual = firsts.pop("openai")
    more = {route: of_pairs([a - b for a, b in zip(each, usual, strict=True)]) for route, each in firsts.items()}
    begun, ended = max(times[1] for times in streams), min(times[-1] for times in streams)
    gaps = [b - a for times in streams for a, b in pairwise(times[1:]) if begun <= a and b <= ended]
    pause = max(gaps) / median(gaps)
    told = " and ".join(f"{one['median']:+.2f} ms ({route})" for route, one in more.items())
    print(f"First token next to OpenAI's: {told}. Longest pause of {given.streams} streams: {pause:.1f} steps.")
    return {"first_token_ms": median(usual), "more_ms": more, "step_ms": median(gaps) * 1e3, "longest_in_steps": pause}


if __name__ == "__main__":
    run(options(__doc__, rounds=400, streams=32), measure)
