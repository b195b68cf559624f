"""Runs a server, with bounds on its connections, until it is told to stop, and then lets running requests end."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any, cast

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from precedent.errors import ConfigError
from precedent_server.access import LOOPBACK, NO_RULES, AccessRules
from precedent_server.access_log import write_logs
from precedent_server.app import server_app
from precedent_server.serving import Serving
from precedent_server.settings import ServerLimits
from precedent_server.tls import Certificate, Handshake
from precedent_server.transport import FIRST_BYTE

log = logging.getLogger(__name__)

KEEP_ALIVE_SECONDS = 30

SWITCH_SECONDS = 0.0005
"""After so long a thread that prepares a request gives way to the one that decodes; Python's default is ten times that,
which the decoding thread would wait again and again in every step."""

LARGEST_HEADERS = 32 * 1024

FULL = b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nRetry-After: 5\r\nContent-Length: 0\r\n\r\n"
TOO_SLOW = b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"

LAST_WORDS_SECONDS = 5
"""Time for a client to read the last answer on a connection that is being closed."""


def check_address(host: str, *, has_keys: bool, rules: AccessRules = NO_RULES) -> None:
    """Raise ConfigError unless `host` may be served: without keys and allowed hosts only the loopback address is."""
    if not has_keys and "*" in rules.cors_origins:
        raise ConfigError(
            "--cors-origins '*' would let every web page use the models: name origins, or give --api-keys"
        )
    if has_keys or host in LOOPBACK:
        return
    if not rules.allowed_hosts:
        raise ConfigError(
            f"--host {host} would let everybody on the network use the models and read the cache: "
            "make keys with 'precedent keys add' and give --api-keys FILE, or leave --host out; a container behind a "
            "published port may name its hosts with --allowed-hosts"
        )
    log.warning("without --api-keys everybody who reaches %s and sends an allowed host name may use the models", host)


def check_port(host: str, port: int) -> None:
    """Raise ConfigError for an address at which nothing can listen, before models are loaded for it."""
    _listening(host, port).close()


def serve(
    serving: Serving, host: str, port: int, *,
    ready: Callable[[str], object], log_json: bool = False, certificate: Certificate | None = None,
) -> None:  # fmt: skip
    """Serve until SIGTERM or Ctrl-C, on the main thread; `ready` gets the address once requests are taken.

    With a `certificate` connections use TLS, and SIGHUP reads it again. Raises ConfigError for an address that may not
    or cannot be served.
    """
    check_address(host, has_keys=serving.keys is not None, rules=serving.access)
    write_logs(log_json)
    gc.collect()
    gc.freeze()  # models stay: looking through them for garbage makes all streams pause
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        with hangups_ignored(), _listening(host, port) as listener:
            address = _address(listener, "http" if certificate is None else "https")
            reloads = [] if certificate is None else [certificate.reload]
            _Server(uvicorn_config(serving, certificate), serving, ready, address, reloads).run([listener])
    finally:
        sys.setswitchinterval(before)


def uvicorn_config(serving: Serving, certificate: Certificate | None = None) -> uvicorn.Config:
    """How uvicorn runs the application, with bounds on connections and headers."""
    return uvicorn.Config(
        server_app(serving),
        http=partial(_connection, serving.limits, certificate),  # type: ignore[arg-type]  # called like a class
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="off",
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=serving.limits.grace_seconds,  # type: ignore[arg-type]  # asyncio takes fractions
        h11_max_incomplete_event_size=LARGEST_HEADERS,
    )


def _connection(limits: ServerLimits, certificate: Certificate | None, **given: Any) -> asyncio.Protocol:
    connection = Connection(limits, **given)
    if certificate is None:
        return connection
    return Handshake(
        certificate, connection, given["server_state"].connections,
        most=limits.max_connections, seconds=limits.header_seconds, closing_seconds=LAST_WORDS_SECONDS,
    )  # fmt: skip


class Connection(H11Protocol):
    """One connection, after its handshake if it uses TLS.

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


class _Server(uvicorn.Server):
    """Says when it is ready, and takes no more requests once it is told to stop."""

    def __init__(
        self, config: uvicorn.Config, serving: Serving, ready: Callable[[str], object], address: str,
        reloads: Sequence[Callable[[], object]],
    ) -> None:  # fmt: skip
        super().__init__(config)
        self._serving, self._ready, self._address, self._reloads = serving, ready, address, reloads

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and tell the address; from now on SIGHUP reloads models as well."""
        await super().startup(sockets)
        self._serving.models.watch()
        loop = asyncio.get_running_loop()
        self._reloads = [*self._reloads, lambda: loop.call_soon_threadsafe(self._serving.models.begin_reload)]
        self._ready(self._address)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop gracefully on SIGINT and SIGTERM; uvicorn dies of them then, before models and caches are closed.

        SIGHUP reloads.
        """
        handlers: dict[int, Any] = dict.fromkeys((signal.SIGINT, signal.SIGTERM), self.handle_exit)
        if hasattr(signal, "SIGHUP"):
            handlers[signal.SIGHUP] = self.handle_hangup
        before = {kind: signal.signal(kind, handler) for kind, handler in handlers.items()}
        try:
            yield
        finally:
            for kind, former in before.items():
                signal.signal(kind, former)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let running requests end; those that outlast the grace are cancelled, and say so to their clients."""
        await super().shutdown(sockets)
        if cancelled := set(self.server_state.tasks):
            await asyncio.wait(cancelled, timeout=LAST_WORDS_SECONDS)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Refuse new requests from now on; running ones have `grace_seconds` to end."""
        self._serving.closed = True
        super().handle_exit(sig, frame)

    def handle_hangup(self, sig: int, frame: FrameType | None) -> None:
        """Read again what may have changed. Keys are read at every request."""
        for reload in self._reloads:
            reload()


@contextmanager
def hangups_ignored() -> Iterator[None]:
    """Ignore SIGHUP while there is nothing to read again: models are loaded, or closed."""
    if not hasattr(signal, "SIGHUP") or threading.current_thread() is not threading.main_thread():
        yield
        return
    former = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, former)


def _listening(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if os.name == "posix":  # on Windows two servers could share the port then
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {host} port {port}: {error.strerror or error}; give another --port"
        ) from error
    return listener


def _address(listener: socket.socket, scheme: str) -> str:
    host, port = listener.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
