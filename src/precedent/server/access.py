"""Who asks: the key in a request's header says tenant and role. Without keys only this machine may ask.

The tenant never comes from a body, a query or another header.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from starlette.requests import HTTPConnection

from precedent.server.errors import DENIED, ApiError
from precedent.server.keys import Caller, KeyFile

LOOPBACK = ("127.0.0.1", "localhost", "::1")

ANYONE = Caller(name="local", tenant="default", role="admin")
"""Who asks a server without keys: somebody on this machine."""


def caller_of(request: HTTPConnection, keys: KeyFile | None, role: str = "use") -> Caller:
    """Who asks. Raises ApiError: 401 without a valid key, 403 for a role that may not."""
    if keys is None:
        check_local(request)
        return ANYONE
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    caller = keys.caller(key.strip()) if scheme.lower() == "bearer" and key.strip() else None
    if caller is None:
        raise ApiError(
            "this server needs an API key: send the header 'Authorization: Bearer KEY'",
            status=401, kind="authentication_error", code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"},
        )  # fmt: skip
    if not caller.may(role):
        raise ApiError(f"this key has the role {caller.role!r}, and {role!r} is needed", status=403, kind=DENIED)
    return caller


def check_local(request: HTTPConnection) -> None:
    """Raise ApiError (403) unless host and origin are this machine's.

    A page from elsewhere can make a browser call this server under a name that it has pointed at this machine (DNS
    rebinding); the browser then sends that name.
    """
    host, origin = request.headers.get("host", ""), request.headers.get("origin")
    if _name(host) not in LOOPBACK or (origin is not None and urlsplit(origin).netloc != host):
        raise ApiError("without API keys only this machine is served, by its own name", status=403, kind=DENIED)


def _name(host: str) -> str | None:
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None
