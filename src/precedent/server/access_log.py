"""Gives every request an id, and writes one line about it: never contents, never keys."""

from __future__ import annotations

import logging
import re
import secrets
from time import perf_counter
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

log = logging.getLogger("precedent.access")

HEADER = "X-Request-ID"
_PLAIN = re.compile(r"[\w.:-]{1,64}")


class AccessLog:
    """ASGI middleware; a client's own `X-Request-ID` is kept if it is short and plain."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

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
                MutableHeaders(scope=message)[HEADER] = request_id
            await send(message)

        try:
            await self._app(scope, receive, noted)
        finally:
            log.info("request", extra={"request": _line(scope, status, perf_counter() - started)})


def _line(scope: Scope, status: int, seconds: float) -> dict[str, Any]:
    state = scope.get("state", {})
    client = scope.get("client")
    return {
        "request_id": state.get("request_id"),
        "method": scope["method"],
        "path": scope["path"],
        "status": status,
        "seconds": round(seconds, 4),
        "key": state.get("key_name"),
        "client": client[0] if client else None,
    }
