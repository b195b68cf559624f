"""The dashboard: a page at `/` with its files, and what the page asks for.

The page asks this server alone, and its content security policy forbids everything else. It needs no key; what it asks
for does, where keys are on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib.resources import files
from typing import Any, NamedTuple

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from precedent_server.access import check_local
from precedent_server.dashboard_data import figures, forget, found_completions
from precedent_server.errors import ApiError
from precedent_server.serving import Serving
from precedent_server.steps import last_steps

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)

HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}

PAGE = "index.html"

_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
"""Kinds of files that the dashboard consists of; all are text."""


class Asset(NamedTuple):
    """A file of the page."""

    content: bytes
    media_type: str


def assets() -> Mapping[str, Asset]:
    """The page's files by name, from the package."""
    folder = files("precedent_server").joinpath("dashboard")
    found = (file for file in folder.iterdir() if file.is_file())
    return {file.name: Asset(file.read_bytes(), _TYPES["." + file.name.rpartition(".")[2]]) for file in found}


def add_dashboard(app: FastAPI, serving: Serving, add: Callable[..., None]) -> None:
    """Add the page, and by `add(path, route, method, role)` what it asks for."""
    send = partial(_file, serving, assets())
    add_get_route(app, "/", send, include_in_schema=False)
    add_get_route(app, "/assets/{name:path}", send, include_in_schema=False)
    add("/dashboard/figures", figures, "GET", "admin")
    add("/dashboard/completions", found_completions, "GET", "read-cache")
    add("/dashboard/steps", last_steps, "GET", "admin")
    add("/dashboard/forget", forget, "POST", "admin")


def add_get_route(app: FastAPI, path: str, route: Callable[..., Any], **told: Any) -> None:
    """Add a route that answers GET, and HEAD without being described twice."""
    app.add_api_route(path, route, methods=["GET"], **told)
    app.add_api_route(path, route, methods=["HEAD"], **{**told, "include_in_schema": False})


async def _file(serving: Serving, known: Mapping[str, Asset], request: Request) -> Response:
    """One of the known files: no name is ever opened as a path."""
    if serving.keys is None:
        check_local(request, serving.access)
    name = request.path_params.get("name", PAGE)
    if name not in known:
        raise ApiError(f"the dashboard has no file {name!r}", status=404)
    return Response(known[name].content, media_type=known[name].media_type, headers=HEADERS)
