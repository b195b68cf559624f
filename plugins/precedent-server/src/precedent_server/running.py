"""Runs a server until it is told to stop, and then lets running requests end."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType

import uvicorn

from precedent.errors import ConfigError
from precedent_server.access import LOOPBACK, NO_RULES, AccessRules
from precedent_server.access_log import EscapedFormatter, escaped
from precedent_server.app import server_app
from precedent_server.connections import LAST_WORDS_SECONDS, Connection
from precedent_server.serving import Serving

log = logging.getLogger(__name__)

KEEP_ALIVE_SECONDS = 30

SWITCH_SECONDS = 0.0005
"""After so long a thread that prepares a request gives way to the one that decodes; Python's default is ten times that,
which the decoding thread would wait again and again in every step."""

LARGEST_HEADERS = 32 * 1024


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


def serve(serving: Serving, host: str, port: int, *, ready: Callable[[str], object], log_json: bool = False) -> None:
    """Serve until SIGTERM or Ctrl-C, on the main thread; `ready` gets the address once requests are taken.

    Raises ConfigError for an address that may not or cannot be served.
    """
    check_address(host, has_keys=serving.keys is not None, rules=serving.access)
    _write_logs(log_json)
    gc.collect()
    gc.freeze()  # models stay: looking through them for garbage makes all streams pause
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        with hangups_ignored(), _listening(host, port) as listener:
            _Server(uvicorn_config(serving), serving, ready, _address(listener)).run([listener])
    finally:
        sys.setswitchinterval(before)


def uvicorn_config(serving: Serving) -> uvicorn.Config:
    """How uvicorn runs the application, with bounds on connections and headers."""
    return uvicorn.Config(
        server_app(serving),
        http=partial(Connection, serving.limits),  # type: ignore[arg-type]  # called like a class
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="off",
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=serving.limits.grace_seconds,  # type: ignore[arg-type]  # asyncio takes fractions
        h11_max_incomplete_event_size=LARGEST_HEADERS,
    )


class _Server(uvicorn.Server):
    """Says when it is ready, and takes no more requests once it is told to stop."""

    def __init__(self, config: uvicorn.Config, serving: Serving, ready: Callable[[str], object], address: str) -> None:
        super().__init__(config)
        self._serving, self._ready, self._address = serving, ready, address

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and tell the address."""
        await super().startup(sockets)
        self._ready(self._address)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop gracefully on SIGINT and SIGTERM; uvicorn dies of them then, before models and caches are closed."""
        before = {kind: signal.signal(kind, self.handle_exit) for kind in (signal.SIGINT, signal.SIGTERM)}
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


@contextmanager
def hangups_ignored() -> Iterator[None]:
    """Ignore SIGHUP, which asks for the keys to be read: they are read at every request."""
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
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {host} port {port}: {error.strerror or error}; give another --port"
        ) from error
    return listener


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _write_logs(log_json: bool) -> None:
    """Write a line per request to stderr, as text or JSON; errors and warnings as well unless logging is set up."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Line(log_json))
    access = logging.getLogger("precedent.access")
    access.handlers, access.propagate = [handler], False
    access.setLevel(logging.INFO)
    if not logging.root.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(EscapedFormatter())
        logging.root.addHandler(handler)


class _Line(logging.Formatter):
    """One request on one line."""

    def __init__(self, as_json: bool) -> None:
        super().__init__()
        self._as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        told = {"time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"), **getattr(record, "request", {})}
        if self._as_json:
            return json.dumps(told)
        told["key"] = told.get("key") or "-"
        told = {name: escaped(value) if isinstance(value, str) else value for name, value in told.items()}
        return "{time} {key} {method} {path} {status} {seconds:.3f}s {request_id}".format(**told)
