"""Connections of a server: how many may be open, and how long a client may stay silent on one.

uvicorn bounds neither: it waits for ever for the end of a request's headers, and for a client to read its answer.
"""

from __future__ import annotations

import asyncio
import math
from typing import Any, cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from precedent_server.settings import ServerLimits

FULL = b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nRetry-After: 5\r\nContent-Length: 0\r\n\r\n"
TOO_SLOW = b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"

FIRST_BYTE = "precedent.first_byte"
"""Key of a request's scope: the moment, on the event loop's clock, at which its first byte arrived."""

LAST_WORDS_SECONDS = 5
"""Time for a client to read the last answer on a connection that is being closed."""


class Connection(H11Protocol):
    """One connection.

    Beyond `max_connections` it is closed with 503. A request's headers must arrive within `header_seconds` of the
    connection or of the request's first byte, and so must the rest of a body whose answer has been sent already (408).
    `upload_seconds` after its first byte a request must have arrived as a whole.
    A client that reads nothing for `request_seconds` is cut off.
    """

    def __init__(self, limits: ServerLimits, **given: Any) -> None:
        super().__init__(**given)
        self._limits = limits
        self._head_timer: asyncio.TimerHandle | None = None
        self._abort_timer: asyncio.TimerHandle | None = None
        self._first_byte: float | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        """Wait for the first request, unless there are too many connections."""
        super().connection_made(transport)
        if len(self.connections) > self._limits.max_connections:
            self._close(FULL)
        else:
            self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        """Read on; time runs until a request's headers are complete."""
        if self._first_byte is None:
            self._first_byte = self.loop.time()
            if self._head_timer is not None:
                self._wait_for_head(self._head_timer.when())
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            cast(dict[str, Any], self.cycle.scope).setdefault(FIRST_BYTE, self._first_byte)
            self._stop(self._head_timer)
            self._head_timer = None
        elif self._head_timer is None:
            self._wait_for_head()

    def on_response_complete(self) -> None:
        """End the exchange."""
        if self.conn.their_state is not h11.SEND_BODY:
            self._first_byte = None
        super().on_response_complete()
        if self.transport.is_closing():
            self._abort_in(self._limits.request_seconds)

    def timeout_keep_alive_handler(self) -> None:
        """Close a connection on which no further request came."""
        super().timeout_keep_alive_handler()
        self._abort_in(LAST_WORDS_SECONDS)

    def pause_writing(self) -> None:
        """Wait for a client that does not read, up to a limit."""
        super().pause_writing()
        self._abort_in(self._limits.request_seconds)

    def resume_writing(self) -> None:
        """Go on: the client has read."""
        super().resume_writing()
        if not self.transport.is_closing():
            self._stop(self._abort_timer)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        super().connection_lost(exc)
        self._stop(self._head_timer)
        self._stop(self._abort_timer)

    def _wait_for_head(self, until: float = math.inf) -> None:
        begun = math.inf if self._first_byte is None else self._first_byte
        until = min(until, self.loop.time() + self._limits.header_seconds, begun + self._limits.upload_seconds)
        self._stop(self._head_timer)
        self._head_timer = self.loop.call_at(until, self._too_slow)

    def _too_slow(self) -> None:
        self._close(TOO_SLOW if self.conn.our_state is h11.IDLE else b"")

    def _close(self, last_words: bytes) -> None:
        if not self.transport.is_closing():
            self.transport.write(last_words)
            self.transport.close()
        self._abort_in(LAST_WORDS_SECONDS)

    def _abort_in(self, seconds: float) -> None:
        self._stop(self._abort_timer)
        self._abort_timer = self.loop.call_later(seconds, self.transport.abort)

    def _stop(self, timer: asyncio.TimerHandle | None) -> None:
        if timer is not None:
            timer.cancel()
