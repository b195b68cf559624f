"""What the dashboard asks for: live figures, and the completions of the caller's own tenant."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from precedent.cache import Completion, SpeculationCache
from precedent.cache.records import MAX_COUNT
from precedent.errors import CacheError
from precedent.runtime.plain_values import is_whole, shown
from precedent_server.bodies import parsed
from precedent_server.errors import FAILED, ApiError
from precedent_server.keys import Caller
from precedent_server.serving import Served, Serving
from precedent_server.transport import read_body

log = logging.getLogger(__name__)

MOST_LISTED = 100
"""Completions in one answer."""

MOST_SKIPPED = 10_000
"""Completions that can be leafed through; a search finds older ones."""

MOST_FORGOTTEN = 1000
"""Completions that one request can forget."""

LONGEST_QUERY = 1000
"""Characters of a text to search for."""

_SHOWN = ("id", "created", "count", "hits", "accepted", "rejected", "workflow_step", "query", "text")
"""What is shown of a completion; the rest are fingerprints and ids of tokens."""

_HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}


async def figures(serving: Serving, caller: Caller, request: Request) -> Response:
    """Metrics of every model, and the seconds since the server began."""
    models = {name: _figures(served) for name, served in serving.models.items()}
    return _json({"seconds": serving.seconds, "queued": serving.places.num_taken, "models": models})


def _figures(served: Served) -> dict[str, Any]:
    found = served.engine.metrics()
    steps = found.num_request_steps
    return {
        **{name: value for name, value in dataclasses.asdict(found).items() if name != "histograms"},
        "tokens_per_step": round(found.generation_tokens / steps, 3) if steps else None,
    }


async def found_completions(serving: Serving, caller: Caller, request: Request) -> Response:
    """Completions of the caller's tenant, newest first: those whose query or text contains `query`, or all."""
    text = request.query_params.get("query", "")
    if len(text) > LONGEST_QUERY:
        raise ApiError(f"query is longer than {LONGEST_QUERY} characters", param="query")
    limit = _number(request, "limit", 20, least=1, most=MOST_LISTED)
    offset = _number(request, "offset", 0, least=0, most=MOST_SKIPPED)
    cache = _cache_of(serving, request.query_params.get("model"))
    # one more than asked for tells whether there are more
    found = await serving.prepared(partial(_newest, cache, caller.tenant, text, offset + limit + 1))
    page = found[offset : offset + limit]
    return _json({"completions": list(map(_shown, page)), "more": len(found) > offset + limit})


def _newest(cache: SpeculationCache, tenant: str, text: str, number: int) -> Sequence[Completion]:
    if text:
        return cache.search(text, tenant=tenant, limit=number)
    return cache.list(tenant=tenant, limit=number)


def _shown(one: Completion) -> dict[str, Any]:
    return {**{name: getattr(one, name) for name in _SHOWN}, "num_tokens": len(one.token_ids)}


async def forget(serving: Serving, caller: Caller, request: Request) -> Response:
    """Erase completions of the caller's tenant by their `ids`; those of others, and missing ones, are not counted."""
    body = await read_body(request, serving, parsed)
    if unknown := body.keys() - {"ids", "model"}:
        raise ApiError(f"{shown(min(unknown))} is not supported; known: ids, model", param=min(unknown))
    ids, model = body.get("ids"), body.get("model")
    if not isinstance(ids, list) or not 1 <= len(ids) <= MOST_FORGOTTEN or not all(map(_is_id, ids)):
        raise ApiError(f"ids must be a list of 1 to {MOST_FORGOTTEN} ids of completions", param="ids")
    if model is not None and not isinstance(model, str):
        raise ApiError("model must be a name", param="model")
    cache = _cache_of(serving, model)
    number = await serving.prepared(partial(_forgotten, cache, caller.tenant, ids))
    return _json({"forgotten": number})


def _is_id(value: Any) -> bool:
    return is_whole(value) and 0 < value <= MAX_COUNT


def _forgotten(cache: SpeculationCache, tenant: str, ids: Sequence[int]) -> int:
    try:
        return cache.forget(tenant=tenant, ids=ids)
    except CacheError as error:  # its message names files, which are none of a tenant's business
        log.exception("forgetting on behalf of tenant %r failed", tenant)
        raise ApiError(
            "the cache cannot erase these completions now: it is read-only, or another process holds it; "
            "the server's log says which",
            status=409, kind=FAILED,
        ) from error  # fmt: skip


def _cache_of(serving: Serving, model: str | None) -> SpeculationCache:
    """The cache of a model, by default of the first. Raises ApiError (404) where there is none."""
    served = serving.model(next(iter(serving.models)) if model is None else model)
    if served.engine.cache is None:
        raise ApiError(f"the model {served.name!r} has no speculation cache: start the server with --cache", status=404)
    return served.engine.cache


def _number(request: Request, name: str, default: int, *, least: int, most: int) -> int:
    """A whole number of the request's query. Raises ApiError."""
    given = request.query_params.get(name, str(default))
    if not (given.isascii() and given.isdigit() and len(given) <= len(str(most)) and least <= int(given) <= most):
        raise ApiError(f"{name} must be a whole number between {least} and {most}", param=name)
    return int(given)


def _json(value: Any) -> JSONResponse:
    return JSONResponse(value, headers=_HEADERS)
