"""The dashboard: a page at `/` with its files, and what the page asks for.

The page asks this server alone, and its content security policy forbids everything else. It needs no key; what it asks
for does, where keys are on: live figures, the completions of the caller's own tenant, and the last steps. Rejected
candidates of a step are words of other requests, of other tenants too: a key of one tenant alone must not read them.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping
from functools import cache, partial
from importlib.resources import files
from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from precedent.cache import SpeculationCache
from precedent.cache.records import MAX_COUNT
from precedent.errors import CacheError
from precedent.pages.colours import Palette
from precedent.pages.tree_picture import tree_svg
from precedent.runtime.plain_values import shown
from precedent_server.access import check_local
from precedent_server.bodies import fits, parsed
from precedent_server.errors import FAILED, ApiError
from precedent_server.keys import Caller
from precedent_server.microscope import SeenStep
from precedent_server.serving import Served, Serving
from precedent_server.transport import read_body

log = logging.getLogger(__name__)

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)

_OF_PAGE = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_OF_DATA = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}

_TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css"}
"""Kinds of files that the dashboard consists of; all are text."""

MOST_LISTED = 100
"""Completions in one answer."""

MOST_SKIPPED = 10_000
"""Completions that can be leafed through; a search finds older ones."""

MOST_FORGOTTEN = 1000
"""Completions that one request can forget."""

Ids = Annotated[list[Annotated[int, Field(ge=1, le=MAX_COUNT)]], Field(min_length=1, max_length=MOST_FORGOTTEN)]

LONGEST_QUERY = 1000
"""Characters of a text to search for."""

KEPT_STEPS = 32

_SHOWN = ("id", "created", "count", "hits", "accepted", "rejected", "workflow_step", "query", "text")
"""What is shown of a completion; the rest are fingerprints and ids of tokens."""


@cache
def assets() -> Mapping[str, bytes]:
    """The page's files by name, from the package."""
    folder = files("precedent_server").joinpath("dashboard")
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}


async def send_file(serving: Serving, request: Request) -> Response:
    """One of the page's files: no name is ever opened as a path."""
    if serving.keys is None:
        check_local(request, serving.access)
    name = request.path_params.get("name", "index.html")
    if name not in assets():
        raise ApiError(f"the dashboard has no file {name!r}", status=404)
    return Response(assets()[name], media_type=_TYPES[name.rpartition(".")[2]], headers=_OF_PAGE)


async def figures(serving: Serving, caller: Caller, request: Request) -> Response:
    """Metrics of every model, and the seconds since the server began."""
    models = dict[str, Any]()
    for name, served in serving.models.items():
        metrics = dataclasses.asdict(served.engine.metrics())
        del metrics["histograms"]
        steps = metrics["num_request_steps"]
        models[name] = {**metrics, "tokens_per_step": round(metrics["generation_tokens"] / steps, 3) if steps else None}
    seconds = time.monotonic() - serving.started_clock
    return _json({"seconds": seconds, "queued": serving.places.total, "models": models})


async def found_completions(serving: Serving, caller: Caller, request: Request) -> Response:
    """Completions of the caller's tenant, newest first: those whose query or text contains `query`, or all."""
    text = request.query_params.get("query", "")
    if len(text) > LONGEST_QUERY:
        raise ApiError(f"query is longer than {LONGEST_QUERY} characters", param="query")
    limit = _number(request, "limit", 20, least=1, most=MOST_LISTED)
    offset = _number(request, "offset", 0, least=0, most=MOST_SKIPPED)
    cache = _cache_of(serving, request.query_params.get("model"))
    newest: Callable[..., Any] = partial(cache.search, text) if text else cache.list
    # one more than asked for tells whether there are more
    found = await serving.prepared(partial(newest, tenant=caller.tenant, limit=offset + limit + 1))
    page = [
        {**{name: getattr(one, name) for name in _SHOWN}, "num_tokens": len(one.token_ids)}
        for one in found[offset : offset + limit]
    ]
    return _json({"completions": page, "more": len(found) > offset + limit})


async def forget(serving: Serving, caller: Caller, request: Request) -> Response:
    """Erase completions of the caller's tenant by their `ids`; those of others, and missing ones, are not counted."""
    body = await read_body(request, serving, parsed)
    if unknown := body.keys() - {"ids", "model"}:
        raise ApiError(f"{shown(min(unknown))} is not supported; known: ids, model", param=min(unknown))
    ids, model = body.get("ids"), body.get("model")
    fits(ids, Ids, "ids")
    fits(model, str | None, "model")
    erase = partial(_cache_of(serving, model).forget, tenant=caller.tenant, ids=ids)
    try:
        return _json({"forgotten": await serving.prepared(erase)})
    except CacheError as error:  # its message names files, which are none of a tenant's business
        log.exception("forgetting on behalf of tenant %r failed", caller.tenant)
        raise ApiError(
            "the cache cannot erase these completions now: it is read-only, or another process holds it; "
            "the server's log says which",
            status=409, kind=FAILED,
        ) from error  # fmt: skip


def _cache_of(serving: Serving, model: str | None) -> SpeculationCache:
    """The cache of a model, by default of the first. Raises ApiError (404) where there is none."""
    cache = serving.cache_of(model)
    if cache is None:
        named = "the server" if model is None else f"the model {model!r}"
        raise ApiError(f"{named} has no speculation cache: start the server with --cache", status=404)
    return cache


def _number(request: Request, name: str, default: int, *, least: int, most: int) -> int:
    """A whole number of the request's query. Raises ApiError."""
    given = request.query_params.get(name, str(default))
    if not (given.isascii() and given.isdigit() and len(given) <= len(str(most)) and least <= int(given) <= most):
        raise ApiError(f"{name} must be a whole number between {least} and {most}", param=name)
    return int(given)


async def last_steps(serving: Serving, caller: Caller, request: Request) -> Response:
    """The last steps of a model, newest first, each with its tree as a picture and as a list."""
    served = serving.models.loaded_as(request.query_params.get("model"))
    if served.microscope is None:
        raise ApiError("no steps are kept: start the server with --inspect", status=404)
    steps, palette = served.microscope.steps(), Palette()
    return _json({"steps": await serving.prepared(lambda: [_step(step, served, palette) for step in steps])})


def _step(step: SeenStep, served: Served, palette: Palette) -> dict[str, Any]:
    seen = step.seen

    def text(token_ids: Any) -> str:
        return str(served.engine.tokenizer.decode(list(token_ids)))

    def candidate(node: int, token: int) -> dict[str, Any]:
        """One candidate; a sample of the draft model has no estimates: it was drawn, not chosen."""
        chance = seen.path_probability(node)
        return {
            "text": text([token]),
            "parent": seen.tree.parents[node],
            "sources": list(seen.tree.sources[node]),
            "estimate": round(seen.estimates[node], 4) if node < len(seen.estimates) else None,
            "path_probability": None if chance is None else round(chance, 4),
            "accepted": node in seen.path,
        }

    return {
        "number": step.number,
        "before": text(seen.before),
        "next": text([step.next_token]),
        "num_accepted": len(seen.path),
        "expected_tokens": round(step.expected_tokens, 3),
        "picture": tree_svg(seen, text, palette),
        "nodes": [candidate(node, token) for node, token in enumerate(seen.tree.token_ids)],
    }


def _json(value: Any) -> JSONResponse:
    return JSONResponse(value, headers=_OF_DATA)
