"""The longest pause of a stranger's stream while a body of some megabytes arrives, for each field that could carry it.

    python benchmarks/bench_pauses.py [--megabytes 10] [--rounds 3] [--hidden 512] [--layers 8] [--json FILE]

A server with random weights streams to one client; another sends the bodies, one after another, and rests as long
between them. Figures are milliseconds; the step is the median gap of the stream. Let nothing else run meanwhile.
"""

from __future__ import annotations

import http.client
import json
import time
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable
from contextlib import closing
from functools import partial
from itertools import count, pairwise
from multiprocessing import get_context
from statistics import median
from typing import Any

import torch

from measuring import options, run
from precedent.engine.engine import Engine
from precedent_server.running import serve
from precedent_server.serving import Served, Serving
from precedent_server.settings import ServerLimits
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm

WINDOW = 0.5
"""Seconds for which a body, or the rest after it, is watched at least."""


def serving(address: Any, hidden: int, layers: int) -> None:
    torch.set_num_threads(1)
    sizes: dict[str, Any] = {"hidden_size": hidden, "intermediate_size": 4 * hidden, "num_hidden_layers": layers}
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    model = tiny_causal_lm("llama", **sizes, num_attention_heads=8, num_key_value_heads=8, max_position_embeddings=8192)
    with (
        closing(Engine(model, tokenizer, name="tiny")) as engine,
        closing(Serving({"tiny": Served.of("tiny", engine)}, ServerLimits())) as served,
    ):
        serve(served, "127.0.0.1", 0, ready=address.put)


def asked(port: int, body: bytes) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
    return connection.getresponse()


def streaming(port: int, times: Any) -> None:
    """Put the times of the pieces of one answer after another, each with its answer's number."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4000, "stream": True}
    for stream in count():
        answer = asked(port, json.dumps({**body, "speculation": False, "logit_bias": {"65": 100}}).encode())
        for number, line in enumerate(answer):
            if number > 20 and line.startswith(b"data"):
                times.put((stream, time.monotonic()))


def bodies(size: int) -> dict[str, bytes]:
    """A body of about `size` bytes for each field."""
    text, words = "word " * (size // 5), [f"word {number}" for number in range(size // 14)]
    schema = {"type": "object", "properties": {word: {"type": "string"} for word in words[::3]}}
    tool = {"type": "function", "function": {"name": "f", "description": "x", "parameters": {}}}
    fields: dict[str, dict[str, Any]] = {
        "one message": {"messages": [{"role": "user", "content": text}]},
        "many messages": {"messages": [{"role": "user", "content": "x"}] * (size // 35)},
        "a tool's schema": {"tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}]},
        "many tools": {"tools": [tool] * (size // 96)},
        "many templates": {"templates": words},
        "one template": {"templates": [text]},
        "prediction": {"prediction": {"type": "content", "content": text}},
        "stop": {"stop": words},
        "logit_bias": {"logit_bias": {str(number): 1 for number in range(size // 12)}},
        "response_format": {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}},
        "metadata": {"metadata": dict.fromkeys(words[::2], "x")},
        "speculation": {"speculation": {"drafters": words}},
    }
    base = {"model": "tiny", "messages": [{"role": "user", "content": "Hello?"}], "max_tokens": 4}
    return {name: json.dumps(base | field).encode() for name, field in fields.items()}


def watched(action: Callable[[], object]) -> tuple[float, float, object]:
    begin = time.monotonic()
    result = action()
    time.sleep(max(WINDOW / 2, WINDOW - (time.monotonic() - begin)))
    return begin, time.monotonic(), result


def measure(given: Namespace) -> Any:
    context = get_context("spawn")
    address, times = context.Queue(), context.Queue()
    server = context.Process(target=serving, args=(address, given.hidden, given.layers), daemon=True)
    server.start()
    port = int(address.get(timeout=300).rsplit(":", 1)[1].rstrip("/"))
    client = context.Process(target=streaming, args=(port, times), daemon=True)
    client.start()
    times.get(timeout=300)
    time.sleep(3.0)
    spans = defaultdict[str, list[tuple[float, float, object]]](list)
    for _ in range(given.rounds):
        for name, body in bodies(int(given.megabytes * 1_000_000)).items():
            spans["nothing"].append(watched(lambda: 0))
            spans[name].append(watched(partial(_status, port, body)))
    last, found = time.monotonic(), list[tuple[int, float]]()
    while not found or found[-1][1] < last:
        found.append(times.get(timeout=120))
    client.terminate()
    server.terminate()
    gaps = [(at, after - at) for (one, at), (other, after) in pairwise(found) if one == other]
    step = median(gap for _, gap in gaps)
    rows = {}
    for name, seen in spans.items():
        longest = [max(gap for at, gap in gaps if at + gap >= begin and at <= end) for begin, end, _ in seen]
        rows[name] = {
            "status": seen[0][2],
            "longest_milliseconds": [1000 * gap for gap in sorted(longest)],
            "over_three_steps": [sum(gap > 3 * step for gap in longest), len(longest)],
        }
    return {"step_milliseconds": 1000 * step, "megabytes": given.megabytes, "fields": rows}


def _status(port: int, body: bytes) -> int | str:
    try:
        return asked(port, body).status
    except OSError as error:
        return type(error).__name__


if __name__ == "__main__":
    run(options(__doc__, megabytes=10.0, rounds=3, hidden=512, layers=8), measure)
