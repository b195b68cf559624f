"""What vLLM 0.32's model runner hands a drafter, and an application that answers as its HTTP server does."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from helpers.services import END
from precedent.cache import SpeculationCache
from precedent_testing.embedders import HashEmbedder
from precedent_vllm import Middleware
from precedent_vllm.engine import Vllm
from precedent_vllm.note import Note, seal, unseal

SLOTS, CONTEXT = 8, 64

SECRET = b"of this server"


ORDER = [40, 41, 42, 43, 44, 45, END]
REFUND = [50, 51, 52, 53, 54, END]
NORTH = seal(Note(tenant="north", query="an order"), SECRET)
SOUTH = seal(Note(tenant="south", query="an order"), SECRET)


class FakeVllm(Vllm):
    """A vLLM whose workers hold no model; it notes what was asked of it."""

    def __init__(self, version: str = "0.32.0") -> None:
        self.said, self.checked, self.handed_to = version, 0, list[Any]()

    def version(self) -> str:
        return self.said

    def check_rejection_sampler(self) -> None:
        self.checked += 1

    def hand_over_runner(self, drafter: Any) -> None:
        self.handed_to.append(drafter)


def config(rank: int = 0, tp: int = 1, pp: int = 1, tokens: int = 8) -> Any:
    """The part of vLLM's configuration that a drafter reads."""
    return SimpleNamespace(
        model_config=SimpleNamespace(tokenizer="", max_model_len=CONTEXT),
        speculative_config=SimpleNamespace(num_speculative_tokens=tokens),
        parallel_config=SimpleNamespace(
            rank=rank, world_size=tp * pp, tensor_parallel_size=tp, prefill_context_parallel_size=1
        ),
    )


class FakeRunner:
    """Keeps requests in slots as `GPUModelRunner` does; `step` is one of its steps."""

    def __init__(self) -> None:
        self.input_batch = SimpleNamespace(
            req_ids=[],
            num_tokens_no_spec=np.zeros(SLOTS, dtype=np.int32),
            token_ids_cpu=np.full((SLOTS, CONTEXT), -7, dtype=np.int32),  # what is behind a row's end is old rubbish
        )
        self.requests: dict[str, Any] = {}

    def add(
        self, req_id: str, prompt: Sequence[int] | None, note: Any = None, max_tokens: int = 50, **how: Any
    ) -> None:
        """A request that runs from now on."""
        params = SimpleNamespace(
            max_tokens=max_tokens,
            all_stop_token_ids={2},  # the model's end is in it whether or not it is ignored
            stop_token_ids=[],
            extra_args=None if note is None else {"precedent": note},
            **how,
        )
        self.requests[req_id] = SimpleNamespace(
            prompt_token_ids=None if prompt is None else list(prompt), output_token_ids=[], sampling_params=params
        )
        self.input_batch.req_ids.append(req_id)

    def finish(self, req_id: str) -> None:
        """A request that vLLM forgets; the last slot's request moves into its place."""
        ids = self.input_batch.req_ids
        place, last = ids.index(req_id), ids.pop()
        if last != req_id:
            ids[place] = last
        del self.requests[req_id]

    def preempt(self, req_id: str) -> None:
        """A request that waits from now on: it leaves the batch, and vLLM still knows it."""
        self.input_batch.req_ids.remove(req_id)

    def swap(self, one: int, other: int) -> None:
        """Two requests change slots."""
        ids = self.input_batch.req_ids
        ids[one], ids[other] = ids[other], ids[one]

    def step(self, drafter: Any, sampled: dict[str, list[int]], **how: Any) -> dict[str, list[int]]:
        """Append what was sampled to each request, ask for drafts and return them by request."""
        batch, kind = self.input_batch, how.get("kind", list)
        for row, req_id in enumerate(batch.req_ids):
            request = self.requests[req_id]
            request.output_token_ids += sampled.get(req_id, [])
            whole = [*(request.prompt_token_ids or []), *request.output_token_ids]
            batch.token_ids_cpu[row, : len(whole)], batch.num_tokens_no_spec[row] = whole, len(whole)
        new = [kind(sampled.get(req_id, [])) for req_id in batch.req_ids]
        drafter.runner = self
        drafts = drafter.propose(new, batch.num_tokens_no_spec, batch.token_ids_cpu, slot_mappings=None)
        assert len(drafts) == len(new)
        assert all(type(draft) is list and all(type(token) is int for token in draft) for draft in drafts)
        return dict(zip(batch.req_ids, drafts, strict=True))


PROMPT = [1, 2, 3]


class FakeServer:
    """Answers with the tokens it was given; remembers what reached it. `broken` ends a stream early."""

    def __init__(self, tokenizer: str, *answers: list[int], finish: str | None = "stop") -> None:
        self.answers, self.finish, self.bodies = answers, finish, list[Any]()
        self.scopes: list[Any] = []
        model = SimpleNamespace(tokenizer=tokenizer, max_model_len=64)
        self.state = SimpleNamespace(vllm_config=SimpleNamespace(model_config=model))

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer."""
        if scope["type"] == "lifespan":
            for step in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{step}.complete"})
            return
        self.scopes.append(scope)
        raw, more = b"", True
        while more:
            piece = await receive()
            raw, more = raw + piece.get("body", b""), piece.get("more_body", False)
        if scope["path"] == "/metrics":
            await _whole(send, b"vllm:num_requests_running 0.0\n", b"text/plain; version=0.0.4")
            return
        try:
            body = json.loads(raw) if raw else {}
        except (ValueError, RecursionError):
            await _whole(send, b'{"error":{"message":"no JSON"}}', status=400)
            return
        self.bodies.append(body)
        asked = body if isinstance(body, dict) else {}
        if not asked.get("stream"):
            await _whole(send, json.dumps(self.answer(asked)).encode())
            return
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        for event in self.events(asked):
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    def answer(self, body: Any) -> dict[str, Any]:
        """A whole chat completion, as vLLM writes it: fields that nobody asked for are null."""
        asked = body.get("return_token_ids")
        choices = [
            {
                "index": i,
                "message": {"role": "assistant", "content": f"ü{i}"},
                "finish_reason": self.finish,
                "token_ids": ids if asked else None,
            }
            for i, ids in enumerate(self.answers)
        ]
        return {"id": "c", "choices": choices, "prompt_token_ids": PROMPT if asked else None}

    def events(self, body: Any) -> Iterator[bytes]:
        """The same as a stream: the role first, then two tokens at a time, and chunks that bring ids alone."""
        asked = bool(body.get("return_token_ids"))
        first = [{"index": i, "delta": {"role": "assistant", "content": ""}} for i in range(len(self.answers))]
        yield _event({"id": "c", "choices": first, "prompt_token_ids": PROMPT if asked else None})
        for i, ids in enumerate(self.answers):
            for at in range(0, len(ids), 2):
                last = at + 2 >= len(ids)
                delta = {} if at == 2 and not last else {"content": f"ü{at}"}
                choice = {"index": i, "delta": delta, "logprobs": None, "finish_reason": self.finish if last else None}
                if delta or asked:
                    yield _event({"id": "c", "choices": [{**choice, "token_ids": ids[at : at + 2] if asked else None}]})
        yield _event({"id": "c", "choices": [], "usage": {"completion_tokens": 1}})
        yield b"data: [DONE]\n\n"


def _event(body: Any) -> bytes:
    return f"data: {json.dumps(body, separators=(',', ':'), ensure_ascii=False)}\n\n".encode()


async def _whole(send: Any, body: bytes, kind: bytes = b"application/json", status: int = 200) -> None:
    headers = [(b"content-type", kind), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class Answer(SimpleNamespace):
    """What a client got: `status`, `headers`, `body`, and the `pieces` of the body."""

    @property
    def json(self) -> Any:
        """The body, parsed."""
        return json.loads(self.body)


async def asked(
    app: Callable[[Any, Any, Any], Awaitable[None]],
    body: bytes | Any = b"",
    *,
    path: str = "/v1/chat/completions",
    method: str = "POST",
    key: str | None = None,
    state: Any = None,
    leaves_after: int | None = None,
    **scope: Any,
) -> Answer:
    """Send one request, in two pieces; `leaves_after` so many messages of the answer, the client goes away."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    inbox = [
        {"type": "http.request", "body": raw[: len(raw) // 2], "more_body": True},
        {"type": "http.request", "body": raw[len(raw) // 2 :], "more_body": False},
    ]
    out: list[Any] = []

    async def receive() -> Any:
        return inbox.pop(0) if inbox else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        out.append(message)
        if leaves_after is not None and len(out) > leaves_after:
            raise asyncio.CancelledError

    headers = [
        (b"content-length", str(len(raw)).encode()),
        *([(b"authorization", f"Bearer {key}".encode())] if key else []),
    ]
    whole = {"type": "http", "method": method, "path": path, "headers": headers, "app": SimpleNamespace(state=state)}
    try:
        await app({**whole, **scope}, receive, send)
    except asyncio.CancelledError:
        if leaves_after is None:
            raise
    pieces = [one.get("body", b"") for one in out if one["type"] == "http.response.body"]
    start = next((one for one in out if one["type"] == "http.response.start"), {"status": None, "headers": []})
    return Answer(
        status=start["status"], headers=dict(start["headers"]), body=b"".join(pieces), pieces=pieces, sent=out
    )


Wrap = Callable[..., tuple[Middleware, FakeServer]]

ASK = {"model": "m", "messages": [{"role": "user", "content": "Where is order 17?"}]}
ANSWER = [40, 41, 42, 43, 44, 2]


def closed(middleware: Middleware) -> None:
    """All that waits is stored, and the store closed."""
    if middleware._keeper is not None:
        middleware._keeper.close()
        middleware._keeper = None


def noted(server: FakeServer) -> Note:
    note = unseal(server.bodies[-1]["vllm_xargs"]["precedent"], SECRET)
    assert note is not None
    return note


def kept(tmp_path: Path) -> list[tuple[str, tuple[int, ...]]]:
    with SpeculationCache.open(tmp_path / "cache.db", embedder=HashEmbedder()) as cache:
        return sorted((one.tenant, one.token_ids) for one in cache.list(limit=None))
