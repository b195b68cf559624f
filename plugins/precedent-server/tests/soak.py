"""Mixed traffic on a real server beside busy neighbours: no internal error may come of it.

    python plugins/precedent-server/tests/soak.py [MINUTES]

`precedent serve` with the packaged model, a draft model and a speculation cache answers requests of all kinds, wrong
ones and clients that leave, while processes that only burn time come and go. Prints counts as JSON; ends with 1 if an
answer was an internal error, or if the server is not well at the end. `make test-stress` runs it for 30 minutes.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

CLIENTS = 4
MODEL = "smollm2-135m-instruct"
SCHEMA = {"type": "object", "properties": {"order": {"type": "integer"}}, "required": ["order"]}
TOOL = {"type": "function", "function": {"name": "order_status", "parameters": SCHEMA}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "order", "strict": True, "schema": SCHEMA}}
BURNER = "import time, sys\nend = time.time() + float(sys.argv[1])\nwhile time.time() < end: sum(range(10000))"
CALL = {"id": "call_1", "type": "function", "function": {"name": "order_status", "arguments": '{"order": 1'}}
HISTORY = [
    *[{"role": "user", "content": "And order 7?"}, {"role": "assistant", "content": "It was sent on Monday. " * 9}] * 4,
    {"role": "assistant", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "name": "order_status", "content": "sent"},
]
KINDS: dict[str, dict[str, Any]] = {
    "chat": {},
    "stream": {"stream": True},
    "leaving": {"stream": True, "max_tokens": 200},
    "seeded": {"temperature": 0.8, "seed": 7},
    "samples": {"n": 3, "temperature": 1.0, "max_tokens": 16},
    "tools": {"tools": [TOOL]},
    "required tool": {"tools": [TOOL], "tool_choice": "required", "stream": True},
    "history": {"tools": [TOOL]},
    "structured": {"response_format": FORMAT, "max_tokens": 64},
    "refused": {"temperature": -1},
    "responses": {},
}


def ask(client: httpx.Client, kind: str, rng: random.Random) -> str:
    """Send one request; returns how it ended."""
    messages = [{"role": "user", "content": f"Where is order {rng.randrange(12)}?"}]
    messages = [*HISTORY, *messages] if kind == "history" else messages
    most = {"max_tokens": rng.choice((1, 16, 48, 96)), "temperature": rng.choice((0, 0, 0.7, 1.0))}
    route, body = "/v1/chat/completions", {"model": MODEL, "messages": messages, **most, **KINDS[kind]}
    if kind == "responses":
        route, body = "/v1/responses", {"model": MODEL, "input": messages, "max_output_tokens": 32}
    if not body.get("stream"):
        return str(client.post(route, json=body).status_code)
    with client.stream("POST", route, json=body) as answer:
        for number, line in enumerate(answer.iter_lines()):
            if '"error"' in line:
                return f"error in a stream: {line[:300]}"
            if kind == "leaving" and number > 10:
                return "left"
        return str(answer.status_code)


def client_of(url: str, seed: int, until: float, ended: Counter[str]) -> None:
    rng = random.Random(seed)
    with httpx.Client(base_url=url, timeout=300) as client:
        while time.monotonic() < until:
            kind = rng.choice([*KINDS])
            try:
                how = ask(client, kind, rng)
            except httpx.HTTPError as error:
                how = repr(error)
            ended[f"{kind}: {how}"] += 1


def traffic(url: str, minutes: float) -> dict[str, Any]:
    """Ask beside up to three processes that are busy for some seconds each, with pauses."""
    until, ended, rng = time.monotonic() + minutes * 60, Counter[str](), random.Random(1)
    threads = [threading.Thread(target=client_of, args=(url, seed, until, ended)) for seed in range(CLIENTS)]
    for thread in threads:
        thread.start()
    running: list[subprocess.Popen[bytes]] = []
    while time.monotonic() < until:
        if sum(one.poll() is None for one in running) < 3:
            running.append(subprocess.Popen([sys.executable, "-c", BURNER, str(rng.uniform(0.5, 20))]))
        time.sleep(rng.uniform(0.2, 5))
    for waiting in (*threads, *running):
        waiting.join() if isinstance(waiting, threading.Thread) else waiting.wait()
    health = httpx.get(f"{url}/health", timeout=60)
    bad = [how for how in ended if not re.search(r": (200|left)$", how) and how != "refused: 400"]
    told = {"requests": ended.total(), "neighbours": len(running), "ended": dict(sorted(ended.items())), "bad": bad}
    return told | {"health": [health.status_code, health.json()]}


def soak(minutes: float) -> dict[str, Any]:
    """Serve, ask and count."""
    command = [Path(sys.executable).with_name("precedent"), "serve", "--draft-model", "first-layers:4", "--port", "0"]
    with tempfile.TemporaryDirectory() as folder, Path(folder, "log").open("w+", errors="replace") as log:
        server = subprocess.Popen([*command, "--cache", Path(folder, "cache")], stdout=log, stderr=log)
        read = Path(folder, "log").read_text
        try:
            while (url := re.search(r"http://127\.0\.0\.1:[1-9]\d*", read(errors="replace"))) is None:
                time.sleep(0.5)
                assert server.poll() is None, read(errors="replace")
            told = traffic(url.group(), minutes)
            faults = r"Traceback|ERROR|degraded"
            return told | {"log": [line for line in read(errors="replace").splitlines() if re.search(faults, line)]}
        finally:
            server.terminate()
            server.wait(60)


if __name__ == "__main__":
    result = soak(float(sys.argv[1]) if len(sys.argv) > 1 else 30)
    print(json.dumps(result, indent=1))
    sys.exit(bool(result["bad"]) or result["health"][0] != 200)
