"""What every route needs of HTTP: a bounded body, a client that goes away, and a stream of events with a time limit."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import ExitStack, aclosing
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from precedent_server.errors import FAILED, ApiError, api_error, stopping
from precedent_server.models import Lease, Served
from precedent_server.serving import Serving
from precedent_server.settings import ServerLimits

log = logging.getLogger(__name__)

Result = TypeVar("Result")

FIRST_BYTE = "precedent.first_byte"
"""Key of a request's scope: the moment, on the event loop's clock, at which its first byte arrived."""

EVENTS = "text/event-stream"
"""The kind of content of server-sent events."""

DONE = "data: [DONE]\n\n"
"""The event that ends a stream."""


def event(data: str) -> str:
    """One server-sent event."""
    return f"data: {data}\n\n"


def error_event(error: ApiError) -> str:
    """An error in a stream whose status was sent already."""
    return event(json.dumps(error.body()))


def failure(error: Exception) -> ApiError:
    """Why a stream failed, for its last event; the log has what the caller is not told."""
    told = api_error(error)
    if told.status >= 500:
        log.error("a stream failed", exc_info=error)
    return told


def _too_late() -> ApiError:
    message = "the answer took longer than the server allows: ask for fewer max_tokens"
    return ApiError(message, status=504, kind=FAILED, code="timeout")


async def read_body(
    request: Request, serving: Serving, read: Callable[[bytes], Result], most: int | None = None
) -> Result:
    """What the request's body says; it has at most `most` bytes (None: what the served models can use).

    Raises ApiError if it is too long, arrives too slowly, or while too many others arrive; and what `read` raises.
    """
    with serving.uploads.held(request.state.key_name) as count:
        raw = await _body(request, serving.limits, most or serving.most_body_bytes, count)
        return await serving.read(raw, read)


async def _body(request: Request, limits: ServerLimits, most: int, count: Callable[[int], None]) -> bytes:
    """The body, read until `upload_seconds` after the request's first byte."""
    declared = request.headers.get("content-length", "")
    size, parts = 0, list[bytes]()
    begun = request.scope.get(FIRST_BYTE, asyncio.get_running_loop().time())
    if declared.isdecimal() and int(declared) > most:
        raise _too_long(most)
    try:
        async with asyncio.timeout_at(begun + limits.upload_seconds):
            async for part in request.stream():
                size += len(part)
                if size > most:
                    raise _too_long(most)
                count(len(part))
                parts.append(part)
    except TimeoutError:
        message = f"the request took longer than {limits.upload_seconds:g} seconds to arrive"
        raise ApiError(message, status=408, headers={"Connection": "close"}) from None
    return b"".join(parts)


def _too_long(most: int) -> ApiError:
    return ApiError(
        f"the body is longer than {most:,} bytes, which is the most that this server's models can use: shorten it",
        status=413, code="context_length_exceeded",
    )  # fmt: skip


async def unless_gone(request: Request, limits: ServerLimits, work: Awaitable[Result], *, timed: bool = True) -> Result:
    """The work's result; ends the work if the client goes away (ClientDisconnect) or time is up (ApiError).

    The request's body must have been read. Work that is not `timed` may take as long as the client waits.
    """
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_gone(request.receive))
    try:
        async with asyncio.timeout(limits.request_seconds if timed else None):
            await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    except TimeoutError:
        raise _too_late() from None
    finally:
        leaving.cancel()
        if not working.done():
            await _ended(working)


async def model_of(request: Request, serving: Serving, lease: Lease) -> Served:
    """The model of a lease, for which its client may wait as long as it takes. Raises what loading it raises."""
    if lease.ready is not None:
        return lease.ready
    return await unless_gone(request, serving.limits, lease.model(), timed=False)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _ended(task: asyncio.Future[Any]) -> None:
    """Cancel a task, and wait until it has ended."""
    task.cancel()
    await asyncio.wait({task})


class EventStream(Response):
    """Sends events as they come; closes their iterator when the client goes away or time is up.

    The iterator turns its own errors into events, since the status has been sent; `told` makes the events for a stream
    that takes too long, and for one that outlasts the time of a stopping server. `held` is closed at the end, also if
    no event was ever asked for.
    """

    def __init__(
        self,
        serving: Serving,
        events: AsyncGenerator[str, None],
        told: Callable[[ApiError], str],
        media_type: str = EVENTS,
        *,
        held: ExitStack,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"}, media_type=media_type)
        del self.headers["content-length"]
        self._serving, self._events, self._told, self._held = serving, events, told, held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all, unless the client leaves or the server stops first."""
        with self._held:
            await self._send_all(receive, send)

    async def _send_all(self, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send(send))
        leaving = asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            if not self._serving.closed:
                raise
            await _ended(sending)
            await send(_part(self._told(stopping()), more=False))
        finally:
            leaving.cancel()
            await _ended(sending)
        if not sending.cancelled():
            sending.result()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self._events) as events:
            try:
                async with asyncio.timeout(self._serving.limits.request_seconds):
                    async for event in events:
                        await send(_part(event))
            except TimeoutError:
                await send(_part(self._told(_too_late())))
        await send(_part("", more=False))


def _part(event: str, *, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": event.encode(), "more_body": more}
