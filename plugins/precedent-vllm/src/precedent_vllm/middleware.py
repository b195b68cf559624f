"""ASGI middleware of vLLM's server: says whose request it is, and stores what was answered."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from precedent_server.keys import Caller, KeyFile
from precedent_vllm.answers import Events, Gathered, written
from precedent_vllm.counts import prometheus_text
from precedent_vllm.keeper import Keeper
from precedent_vllm.requests import DRAFTED, Passed, Refusal, passed
from precedent_vllm.settings import Settings

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_log = logging.getLogger(__name__)

OPEN = ("/health", "/ping", "/version", "/load", "/metrics")
"""Routes that need no key, as in vLLM."""

MAX_BODY_BYTES = 64 << 20

CHARACTERS_PER_TOKEN = 64
"""A prediction may have so many characters for each token of the context; workers count tokens."""


class Middleware:
    """Asks for an API key where there is a key file, seals the request's tenant for the workers, stores its answer.

    The key's name is the workflow step. Raises ConfigError for settings that do not fit.
    """

    def __init__(self, app: App, settings: Settings | None = None) -> None:
        self._app, self._settings = app, settings or Settings.read()
        self._keys = KeyFile(self._settings.api_keys) if self._settings.api_keys else None
        self._keeper: Keeper | None = None
        self._drafts = self._settings.on and bool(self._settings.secret)
        if self._settings.on and not self._drafts:
            _log.error(
                "vLLM did not load the plugin 'precedent': name it in VLLM_PLUGINS; until then no tenant is known"
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one connection."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, self._living(scope, send))
            return
        try:
            await self._answer(scope, receive, send)
        except Refusal as refusal:
            await _refuse(refusal, scope, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if path.rstrip("/") == "/metrics" and self._settings.folder is not None:
            await self._app(_with_headers(scope, drop=(b"accept-encoding",)), receive, self._with_counts(send))
            return
        asked = scope["type"] == "http" and scope["method"] == "OPTIONS"  # a browser's question brings no key
        caller = None if asked or path in OPEN else self._caller(scope)
        if scope["type"] != "http" or scope["method"] != "POST" or path not in DRAFTED or not self._drafts:
            await self._app(scope, receive, send)
            return
        raw = await _body(receive)
        if raw is not None:
            await self._draft(scope, receive, send, self._passed(scope, path, caller, raw))

    def _caller(self, scope: Scope) -> Caller | None:
        """Who asks; None on a server without keys. Raises Refusal without a valid key."""
        if self._keys is None:
            return None
        scheme, _, key = _header(scope, b"authorization").partition(" ")
        caller = self._keys.caller(key.strip()) if scheme.lower() == "bearer" and key.strip() else None
        if caller is None:
            message = "this server needs an API key: send the header 'Authorization: Bearer KEY'"
            raise Refusal(message, status=401, code="invalid_api_key")
        return caller

    def _passed(self, scope: Scope, path: str, caller: Caller | None, raw: bytes) -> Passed:
        tenant, step = (caller.tenant, caller.name) if caller else (self._settings.tenant, "")
        longest = CHARACTERS_PER_TOKEN * scope["app"].state.vllm_config.model_config.max_model_len
        return passed(raw, path, tenant, step, longest, self._settings)

    async def _draft(self, scope: Scope, receive: Receive, send: Send, request: Passed) -> None:
        """Have vLLM answer; gather its token ids if the answer is to be stored."""
        told = _with_headers(scope, {b"content-length": str(len(request.body)).encode()})
        before = _Body(request.body, receive)
        if request.stored is None:
            await self._app(told, before, send)
            return
        answer = _Answer(send, Gathered(request.shows_ids))
        await self._app(told, before, answer)
        if answer.ended:
            self._kept_by(scope).keep(answer.gathered.whole(), request.stored, request.model)

    def _kept_by(self, scope: Scope) -> Keeper:
        if self._keeper is None:
            self._keeper = Keeper(self._settings, scope["app"].state.vllm_config.model_config.tokenizer)
        return self._keeper

    def _with_counts(self, send: Send) -> Send:
        async def counted(body: bytes) -> bytes:
            if self._keeper is not None:
                await asyncio.to_thread(self._keeper.publish)
            return body + (await asyncio.to_thread(prometheus_text, self._settings.folder)).encode()

        return _Whole(send, counted)

    def _living(self, scope: Scope, send: Send) -> Send:
        """Opens the store before the server starts, and closes it when the server has ended."""

        async def living(message: Message) -> None:
            if message["type"] == "lifespan.startup.complete" and self._drafts and self._settings.store:
                self._kept_by(scope).warm_up()
            if message["type"].startswith("lifespan.shutdown.") and self._keeper is not None:
                keeper, self._keeper = self._keeper, None
                await asyncio.to_thread(keeper.close)
            await send(message)

        return living


class _Body:
    """`receive` of a request whose body was read already."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        self._body: bytes | None = body
        self._receive = receive

    async def __call__(self) -> Message:
        if self._body is None:
            return await self._receive()  # the client's going away
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}


class _Whole:
    """`send` of an answer that is changed as a whole: its start waits for its body."""

    def __init__(self, send: Send, changed: Callable[[bytes], Awaitable[bytes]]) -> None:
        self._send, self._changed = send, changed
        self._start: Message = {}
        self._body = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start = message
            return
        self._body += message.get("body", b"")
        if not message.get("more_body", False):
            body = await self._changed(self._body)
            await self._send(_with_headers(self._start, {b"content-length": str(len(body)).encode()}))
            await self._send({"type": "http.response.body", "body": body})


class _Answer:
    """`send` of an answer whose token ids are gathered: of JSON as a whole, of events as they pass."""

    def __init__(self, send: Send, gathered: Gathered) -> None:
        self._send, self.gathered = send, gathered
        self._through: Send = send
        self._events: Events | None = None
        self.ended = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            kind = _header(message, b"content-type")
            if kind.startswith("application/json"):
                self._through = _Whole(self._send, self._json)
            elif kind.startswith("text/event-stream"):
                self._events = Events(self.gathered)
        elif message["type"] == "http.response.body":
            self.ended = not message.get("more_body", False)
            if self._events is not None:
                message = {**message, "body": self._events.push(message.get("body", b""), last=self.ended)}
        await self._through(message)

    async def _json(self, body: bytes) -> bytes:
        try:
            told = json.loads(body)
        except ValueError:
            return body
        self.gathered.take(told)
        return body if self.gathered.shows_ids else written(told)


async def _body(receive: Receive) -> bytes | None:
    """The whole body; None if the client went away. Raises Refusal for one that is too long."""
    pieces, length, more = list[bytes](), 0, True
    while more:
        message = await receive()
        if message["type"] != "http.request":
            return None
        pieces.append(message.get("body", b""))
        length, more = length + len(pieces[-1]), message.get("more_body", False)
        if length > MAX_BODY_BYTES:
            raise Refusal(f"the body has more than {MAX_BODY_BYTES} bytes", status=413)
    return b"".join(pieces)


def _header(message: MutableMapping[str, Any], name: bytes) -> str:
    found = next((value for key, value in message.get("headers", ()) if key.lower() == name), b"")
    return bytes(found).decode("latin-1")


def _with_headers(
    message: MutableMapping[str, Any], new: dict[bytes, bytes] | None = None, drop: tuple[bytes, ...] = ()
) -> dict[str, Any]:
    """A copy with some headers replaced."""
    new = new or {}
    kept = [(key, value) for key, value in message.get("headers", ()) if key.lower() not in (*drop, *new)]
    return {**message, "headers": [*kept, *new.items()]}


async def _refuse(refusal: Refusal, scope: Scope, send: Send) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008, "reason": str(refusal)})
        return
    body = refusal.body()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
