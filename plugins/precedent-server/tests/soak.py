"""Mixed traffic on a real server beside busy neighbours: no internal error may come of it.

    python plugins/precedent-server/tests/soak.py [MINUTES]

`precedent serve` with the packaged model, a draft model and a speculation cache answers chats, streams, tools,
structured output, samples, Responses, refused requests and clients that leave, while processes that only burn time
come and go. Prints counts as JSON; ends with 1 if an answer was an internal error, or if the server is not well at
the end. `make test-stress` runs it for 30 minutes.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

CLIENTS = 4
MODEL = "smollm2-135m-instruct"
SERVER = ("serve", "--draft-model", "first-layers:4", "--port", "0")
SCHEMA = {"type": "object", "properties": {"order": {"type": "integer"}}, "required": ["order"]}
TOOL = {"type": "function", "function": {"name": "order_status", "parameters": SCHEMA}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "order", "strict": True, "schema": SCHEMA}}
QUESTIONS = ("Where is order {}?", "Refund order {}.", "List three facts about the number {}.")
BURNER = "import time, sys\nend = time.time() + float(sys.argv[1])\nwhile time.time() < end: sum(range(10000))"

Body = dict[str, Any]


def chat(rng: random.Random) -> Body:
    question = rng.choice(QUESTIONS).format(rng.randrange(12))
    return {
        "model": MODEL,
        "messages": [{"role": "system", "content": "You are an order desk."}, {"role": "user", "content": question}],
        "max_tokens": rng.choice((1, 16, 48, 96)),
        "temperature": rng.choice((0, 0, 0.7, 1.0)),
    }


def with_history(rng: random.Random) -> Body:
    """An echoed call, whose arguments may be broken, with a name in its result, behind some turns of talk."""
    call = {"name": "order_status", "arguments": rng.choice(("{}", "", '{"order": 1', '{"order": 7}'))}
    said = {"role": "assistant", "content": "It was sent on Monday. " * rng.randrange(1, 20)}
    called = {"role": "assistant", "tool_calls": [{"id": "call_1", "type": "function", "function": call}]}
    result = {"role": "tool", "tool_call_id": "call_1", "name": "order_status", "content": "sent"}
    turns = [{"role": "user", "content": "And order 7?"}, said] * rng.randrange(6)
    return chat(rng) | {"messages": [*turns, called, result, *chat(rng)["messages"][1:]], "tools": [TOOL]}


def refused(rng: random.Random) -> Body:
    wrong: tuple[Body, ...] = ({"messages": "none"}, {"temperature": -1}, {"n": 0}, {"colour": 1}, {"stop": [1]})
    return chat(rng) | rng.choice(wrong)


BODIES: dict[str, tuple[Callable[[random.Random], Body], Body]] = {
    "chat": (chat, {}),
    "stream": (chat, {"stream": True}),
    "leaving": (chat, {"stream": True, "max_tokens": 200}),
    "seeded": (chat, {"temperature": 0.8, "seed": 7}),
    "samples": (chat, {"n": 3, "temperature": 1.0, "max_tokens": 16}),
    "tools": (chat, {"tools": [TOOL]}),
    "required tool": (chat, {"tools": [TOOL], "tool_choice": "required", "stream": True}),
    "history": (with_history, {}),
    "structured": (chat, {"response_format": FORMAT, "max_tokens": 64}),
    "refused": (refused, {}),
    "responses": (chat, {}),
}


def ask(client: httpx.Client, kind: str, body: Body) -> str:
    """Send one request; returns how it ended."""
    route = "/v1/chat/completions"
    if kind == "responses":
        route, body = "/v1/responses", {"model": MODEL, "input": body["messages"], "max_output_tokens": 32}
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
            kind = rng.choice([*BODIES])
            make, more = BODIES[kind]
            try:
                how = ask(client, kind, make(rng) | more)
            except httpx.HTTPError as error:
                how = repr(error)
            ended[f"{kind}: {how}"] += 1


def neighbours(until: float) -> int:
    """Keep up to three processes busy for some seconds each, with pauses; returns how many there were."""
    rng, number = random.Random(1), 0
    running: list[subprocess.Popen[bytes]] = []
    while time.monotonic() < until:
        running = [one for one in running if one.poll() is None]
        if len(running) < 3 and rng.random() < 0.5:
            running.append(subprocess.Popen([sys.executable, "-c", BURNER, str(rng.uniform(0.5, 20))]))
            number += 1
        time.sleep(rng.uniform(0.2, 5))
    for one in running:
        one.wait()
    return number


def soak(minutes: float) -> Body:
    """Serve, ask and count."""
    command = Path(sys.executable).with_name("precedent")
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        with log.open("wb") as output:
            cache = Path(folder, "cache")
            server = subprocess.Popen([command, *SERVER, "--cache", cache], stdout=output, stderr=output)
        try:
            url = None
            while url is None:
                time.sleep(0.5)
                url = re.search(r"http://127\.0\.0\.1:[1-9]\d*", log.read_text(errors="replace"))
                if server.poll() is not None:
                    raise RuntimeError(f"no server:\n{log.read_text(errors='replace')}")
            faults = r"Traceback|ERROR|degraded"
            told = traffic(url.group(), minutes)
            lines = log.read_text(errors="replace").splitlines()
            return told | {"log": [line for line in lines if re.search(faults, line)]}
        finally:
            server.terminate()
            server.wait(60)


def traffic(url: str, minutes: float) -> Body:
    until, ended = time.monotonic() + minutes * 60, Counter[str]()
    threads = [threading.Thread(target=client_of, args=(url, seed, until, ended)) for seed in range(CLIENTS)]
    for thread in threads:
        thread.start()
    number = neighbours(until)
    for thread in threads:
        thread.join()
    health = httpx.get(f"{url}/health", timeout=60)
    bad = [how for how in ended if not re.search(r": (200|left)$", how) and how != "refused: 400"]
    return {
        "requests": ended.total(),
        "neighbours": number,
        "ended": dict(sorted(ended.items())),
        "bad": bad,  # server errors, broken streams, refusals of what is right
        "health": [health.status_code, health.json()],
    }


if __name__ == "__main__":
    result = soak(float(sys.argv[1]) if len(sys.argv) > 1 else 30)
    print(json.dumps(result, indent=1))
    sys.exit(bool(result["bad"]) or result["health"][0] != 200)
