"""ASGI middleware of vLLM's server: says whose request it is, and stores what was answered."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, HTTPConnection, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from precedent_server.access import caller_of
from precedent_server.errors import ApiError
from precedent_server.keys import KeyFile
from precedent_vllm.answers import Events, Gathered, written
from precedent_vllm.counts import prometheus_text
from precedent_vllm.keeper import Keeper
from precedent_vllm.requests import DRAFTED, Passed, passed
from precedent_vllm.settings import Settings

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

    def __init__(self, app: ASGIApp, settings: Settings | None = None) -> None:
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
        except ApiError as error:
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008, "reason": str(error)})
            else:
                refusal = JSONResponse(error.body(), status_code=error.status, headers=error.headers)
                await refusal(scope, receive, send)
        except ClientDisconnect:
            _log.debug("a client went away while it sent its request")

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if path.rstrip("/") == "/metrics" and self._settings.folder is not None:
            headers = MutableHeaders(raw=list(scope["headers"]))
            del headers["accept-encoding"]
            await self._app({**scope, "headers": headers.raw}, receive, _Whole(send, self._with_counts))
            return
        asks = scope["type"] == "http" and scope["method"] == "OPTIONS"  # a browser's question brings no key
        tenant, step = self._settings.tenant, ""
        if self._keys is not None and not asks and path not in OPEN:
            caller = caller_of(HTTPConnection(scope), self._keys)
            tenant, step = caller.tenant, caller.name
        if scope["type"] != "http" or scope["method"] != "POST" or path not in DRAFTED or not self._drafts:
            await self._app(scope, receive, send)
            return
        raw = await _body(Request(scope, receive))
        longest = CHARACTERS_PER_TOKEN * scope["app"].state.vllm_config.model_config.max_model_len
        await self._draft(scope, receive, send, passed(raw, path, tenant, step, longest, self._settings))

    async def _draft(self, scope: Scope, receive: Receive, send: Send, request: Passed) -> None:
        """Have vLLM answer; gather its token ids if the answer is to be stored."""
        headers = MutableHeaders(raw=list(scope["headers"]))
        headers["content-length"] = str(len(request.body))
        told, before = {**scope, "headers": headers.raw}, _read_before(request.body, receive)
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

    async def _with_counts(self, body: bytes) -> bytes:
        if self._keeper is not None:
            await asyncio.to_thread(self._keeper.publish)
        return body + (await asyncio.to_thread(prometheus_text, self._settings.folder)).encode()

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
            headers = MutableHeaders(raw=list(self._start["headers"]))
            headers["content-length"] = str(len(body))
            await self._send({**self._start, "headers": headers.raw})
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
            kind = Headers(raw=list(message["headers"])).get("content-type", "")
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


async def _body(request: Request) -> bytes:
    """The whole body. Raises ClientDisconnect, and ApiError for one that is too long."""
    pieces, length = list[bytes](), 0
    async for piece in request.stream():
        pieces.append(piece)
        length += len(piece)
        if length > MAX_BODY_BYTES:
            raise ApiError(f"the body has more than {MAX_BODY_BYTES} bytes", status=413)
    return b"".join(pieces)


def _read_before(body: bytes, receive: Receive) -> Receive:
    """`receive` of a request whose body was read already: it, then the client's going away."""
    rest = [{"type": "http.request", "body": body, "more_body": False}]

    async def received() -> Message:
        return rest.pop() if rest else await receive()

    return received
