"""Gives every request an id, and writes one line about it: never contents, never keys."""

from __future__ import annotations

import json
import logging
import re
import secrets
import sys
from collections.abc import Awaitable, Callable, Mapping
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

log = logging.getLogger("precedent.access")

HEADER, ANTHROPICS = "X-Request-ID", "request-id"
"""The header of a request's id, and the one in which Anthropic's clients look for it."""

_PLAIN = re.compile(r"[\w.:-]{1,64}")


class AccessLog:
    """ASGI middleware; a client's own `X-Request-ID` is kept if it is short and plain.

    An exception that no route handles becomes the response that `failed` makes of it, so that it has an id and a line
    as well. `answered` is told the status of each request, and returns headers for its answer. Redirects name no host,
    as two slashes at the start of a path would: the one in a request is whatever its client wrote.
    """

    def __init__(
        self,
        app: ASGIApp,
        failed: Callable[[Request, Exception], Awaitable[Response]],
        answered: Callable[[Scope, int], Mapping[str, str]],
    ) -> None:
        self._app, self._failed, self._answered = app, failed, answered

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and note how it ended."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(HEADER.lower().encode(), b"").decode("latin-1")
        request_id = given if _PLAIN.fullmatch(given) else f"req-{secrets.token_hex(12)}"
        scope.setdefault("state", {})["request_id"] = request_id
        started, status = perf_counter(), 0

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers[HEADER] = headers[ANTHROPICS] = request_id
                headers.update(self._answered(scope, status))
                if "location" in headers:
                    _, _, path, query, _ = urlsplit(headers["location"])
                    headers["location"] = urlunsplit(("", "", f"/{path.lstrip('/')}", query, ""))
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except Exception as error:
            if status:  # too late for another answer
                raise
            response = await self._failed(Request(scope, receive), error)
            await response(scope, receive, noted)
        finally:
            log.info("request", extra={"request": _line(scope, status, perf_counter() - started)})


def _line(scope: Scope, status: int, seconds: float) -> dict[str, Any]:
    state, client = scope.get("state", {}), scope.get("client")
    return {
        "request_id": state.get("request_id"),
        "method": scope["method"],
        "path": scope["path"],
        "status": status,
        "seconds": round(seconds, 4),
        "key": state.get("key_name"),
        "client": client[0] if client else None,
    }


def write_logs(as_json: bool) -> None:
    """Write a line per request to stderr, as text or JSON.

    Unless logging is set up, also errors, warnings and which models are loaded and unloaded.
    """
    access, root = (logging.StreamHandler(sys.stderr) for _ in range(2))
    access.setFormatter(AccessFormatter(as_json))
    root.setFormatter(_EscapedFormatter())
    log.handlers, log.propagate = [access], False
    log.setLevel(logging.INFO)
    if not logging.root.handlers:
        logging.root.addHandler(root)
        logging.getLogger("precedent_server").setLevel(logging.INFO)


def _escaped(text: str) -> str:
    """A text on one line: control characters, line ends of every kind and invisible ones are written as escapes."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


class AccessFormatter(logging.Formatter):
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
        return _escaped("{time} {key} {method} {path} {status} {seconds:.3f}s {request_id}".format(**told))


class _EscapedFormatter(logging.Formatter):
    """Records in which a client's text can forge no other: its control characters are escaped.

    A message is one line. Lines of a traceback are indented, so that none looks like the beginning of a record.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:
        return _escaped(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        return "\n".join(f"  {_escaped(line)}" for line in super().formatException(ei).split("\n"))
