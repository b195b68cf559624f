"""Who asks: the key in a request's header says tenant and role. Without keys only this machine may ask.

`AccessRules` name further hosts and origins. The tenant never comes from a body, a query or another header.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.requests import HTTPConnection

from precedent.errors import ConfigError
from precedent_server.errors import DENIED, ApiError
from precedent_server.keys import Caller, KeyFile

LOOPBACK = ("127.0.0.1", "localhost", "::1")

ANYONE = Caller(name="local", tenant="default", role="admin")
"""Who asks a server without keys: somebody on this machine."""

ANY = "*"


@dataclass(frozen=True, slots=True)
class AccessRules:
    """The names by which clients may call the server, and the origins whose pages may use it; "*" is every one.

    Without `allowed_hosts` a server with keys answers to every name, and one without keys to this machine's alone.
    Raises ConfigError for a host that is not a name or an address, and for an origin that is not scheme://host[:port].
    """

    allowed_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for host in self.allowed_hosts:
            if host != ANY and (_name(host) is None or "/" in host):
                raise ConfigError(f"--allowed-hosts {host!r} must be a host's name, as in api.example.org")
        for origin in self.cors_origins:
            parts = urlsplit(origin)
            if origin != ANY and (not parts.scheme or f"{parts.scheme}://{parts.netloc}" != origin):
                raise ConfigError(f"--cors-origins {origin!r} must be an origin, as in https://app.example.org:8080")

    def allow_host(self, host: str | None) -> bool:
        """Whether the name is one of this machine, or listed."""
        return host in LOOPBACK or ANY in self.allowed_hosts or host in map(_name, self.allowed_hosts)


NO_RULES = AccessRules()


def caller_of(
    request: HTTPConnection, keys: KeyFile | None, role: str = "use", rules: AccessRules = NO_RULES
) -> Caller:
    """Who asks. Raises ApiError: 401 without a valid key, 403 for a role that may not or a host that is not allowed."""
    if keys is None:
        check_local(request, rules)
        return ANYONE
    if rules.allowed_hosts and not rules.allow_host(_name(request.headers.get("host", ""))):
        raise ApiError("the server does not answer to this host name; see --allowed-hosts", status=403, kind=DENIED)
    caller = next(filter(None, map(keys.caller, _keys_in(request))), None)
    if caller is None:
        raise ApiError(
            "this server needs an API key: send the header 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
            status=401, kind="authentication_error", code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"},
        )  # fmt: skip
    if not caller.may(role):
        raise ApiError(f"this key has the role {caller.role!r}, and {role!r} is needed", status=403, kind=DENIED)
    return caller


def _keys_in(request: HTTPConnection) -> Iterator[str]:
    """The keys that a request brings; a client may have one for another server as well."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    for found in (key if scheme.lower() == "bearer" else "", request.headers.get("x-api-key", "")):
        if found.strip():
            yield found.strip()


def check_local(request: HTTPConnection, rules: AccessRules = NO_RULES) -> None:
    """Raise ApiError (403) unless host and origin are this machine's, or allowed.

    A page from elsewhere can make a browser call this server under a name that it has pointed at this machine (DNS
    rebinding); the browser then sends that name.
    """
    host, origin = request.headers.get("host", ""), request.headers.get("origin")
    own_page = origin is None or urlsplit(origin).netloc == host or origin in rules.cors_origins
    if not rules.allow_host(_name(host)) or not own_page:
        raise ApiError(
            "without API keys only this machine is served, by its own name; see --allowed-hosts and --cors-origins",
            status=403, kind=DENIED,
        )  # fmt: skip


def _name(host: str) -> str | None:
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None
