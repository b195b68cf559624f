"""Runs in Ray's HTTP proxies: an answer whose replica is lost ends in an error that a client understands.

Ray leaves such an answer without an end, or without a beginning. Set on every node before Ray starts:
`RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=precedent_ray.ingress:middlewares`.
"""

from __future__ import annotations

from starlette.middleware import Middleware
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from precedent_server.errors import FAILED, ApiError
from precedent_server.transport import error_event

VARIABLE = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
IMPORT_PATH = "precedent_ray.ingress:middlewares"

RETRY_SECONDS = 1
EVENTS = b"text/event-stream"

OWN_PATHS = "/-/"
"""Paths that the proxy answers itself."""


def middlewares() -> list[Middleware]:
    """What Ray puts around its proxies."""
    return [Middleware(WholeAnswers)]


def lost() -> ApiError:
    """What a client is told whose replica is lost."""
    return ApiError(
        "the replica that answered was lost: send the request again", status=503, kind=FAILED, code="replica_lost",
        headers={"Retry-After": str(RETRY_SECONDS)},
    )  # fmt: skip


class WholeAnswers:
    """ASGI middleware: gives every answer an end. A stream that was cut gets an error event in OpenAI's form."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and end its answer where the proxy did not."""
        if scope["type"] != "http" or scope["path"].startswith(OWN_PATHS):
            await self._app(scope, receive, send)
            return
        answer = _Answer(send, receive)
        await self._app(scope, answer.receive, answer.send)
        await answer.end()


class _Answer:
    """What was sent of one answer so far."""

    def __init__(self, send: Send, receive: Receive) -> None:
        self._send, self._receive = send, receive
        self._begun = self._streams = self._ended = self._left = False

    async def receive(self) -> Message:
        message = await self._receive()
        self._left = self._left or message["type"] == "http.disconnect"
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = dict(message["headers"])
            self._begun, self._streams = True, headers.get(b"content-type", b"").startswith(EVENTS)
        elif message["type"] == "http.response.body":
            self._ended = not message.get("more_body", False)
        await self._send(message)

    async def end(self) -> None:
        """Send what is missing. An answer of another kind that was cut stays cut: its client sees that it is short."""
        if self._ended or self._left:
            return
        if not self._begun:
            error = lost()
            refusal = JSONResponse(error.body(), status_code=error.status, headers=error.headers)
            await refusal({"type": "http"}, self._receive, self._send)
        elif self._streams:
            body = error_event(lost()).encode()
            await self._send({"type": "http.response.body", "body": body, "more_body": False})
