"""Whose request it is, as the proxy sees it: from the API key alone, never from what a client says of itself."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

from starlette.requests import HTTPConnection
from starlette.types import Scope

from precedent_server.access import caller_of
from precedent_server.errors import ApiError
from precedent_server.keys import KeyFile


def tenant_of(scope: Scope, keys: KeyFile | None) -> str | None:
    """The tenant of a request; None for one that will be refused, which any replica can do."""
    try:
        return caller_of(HTTPConnection(scope), keys).tenant
    except ApiError:
        return None


def scope_of(args: Sequence[Any]) -> Scope | None:
    """The ASGI scope of what Ray's proxy hands to a replica; None for calls that are no HTTP requests."""
    if len(args) != 1 or not isinstance(args[0], bytes):
        return None
    request = pickle.loads(args[0])  # written by the proxy in whose process this runs; no client can write it
    scope: Scope | None = getattr(request, "asgi_scope", None)
    return scope if scope is not None and scope.get("type") == "http" else None
