"""The server's routes as an ASGI application."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from fastapi import FastAPI
from openai.types import Model
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Match
from starlette.types import Scope

from precedent import __version__
from precedent.langchain.profile import profile_of_engine
from precedent_server import ollama
from precedent_server.access import caller_of
from precedent_server.access_log import HEADER, AccessLog
from precedent_server.chat import chat_completions
from precedent_server.completions import completions
from precedent_server.dashboard import figures, forget, found_completions, last_steps, send_file
from precedent_server.description import description
from precedent_server.embeddings import embeddings
from precedent_server.errors import FAILED, ApiError, api_error, stopping
from precedent_server.keys import Caller
from precedent_server.messages import VERSION_HEADER, count_tokens, error_body, messages, model_info
from precedent_server.models import Entry
from precedent_server.ollama_models import running_models, show, tags
from precedent_server.prometheus import CONTENT_TYPE, for_key
from precedent_server.responses import delete_response, responses, stored_response
from precedent_server.serving import Route, Serving
from precedent_server.tokens import detokenize, tokenize, tokenizer_info

log = logging.getLogger(__name__)

ErrorForm = Callable[[ApiError], dict[str, Any]]
MetricsText = Callable[[], Awaitable[str]]

CLIENT_LEFT = 499
"""What the access log shows for a client that went away before its answer (nginx's number)."""


def server_app(serving: Serving, metrics: MetricsText | None = None) -> FastAPI:
    """The application of what is served; its caller closes both. `metrics` is what `/metrics` says instead of its own.

    A server that is one of several replicas says those of all.
    """
    app = FastAPI(title="Precedent", version=__version__, openapi_url=None)
    app.add_middleware(AccessLog, failed=_told, answered=partial(_answered, serving))
    if origins := serving.access.cors_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=origins, allow_methods=["GET", "POST", "DELETE"], allow_headers=["*"],
            expose_headers=[HEADER],
        )  # fmt: skip
    for kind in (ApiError, HTTPException, ClientDisconnect):
        app.add_exception_handler(kind, _told)
    for path, method, route, role in _ROUTES:
        _add(app, path, method, _guarded(serving, route, role), route.__doc__)
    _add(
        app, "/metrics", "GET", _guarded(serving, partial(_metrics, metrics or serving.metrics_text)), _metrics.__doc__
    )
    _add(app, "/openapi.json", "GET", _guarded(serving, partial(_description, app)), _description.__doc__)
    _add(app, "/health", "GET", partial(_health, serving), _health.__doc__)
    for path in ("/", "/assets/{name:path}"):
        _add(app, path, "GET", partial(send_file, serving), send_file.__doc__)
    return app


def _add(app: FastAPI, path: str, method: str, route: Callable[[Request], Any], doc: str | None) -> None:
    """Add a route; one that answers GET answers HEAD as well, without being described twice."""
    app.add_api_route(path, route, methods=[method], response_model=None, name=path, description=doc)
    if method == "GET":
        app.add_api_route(path, route, methods=["HEAD"], response_model=None, include_in_schema=False)


def _guarded(serving: Serving, route: Route, role: str = "use") -> Callable[[Request], Awaitable[Response]]:
    """A route that needs a key of this role, where keys are on."""

    async def answer(request: Request) -> Response:
        caller = caller_of(request, serving.keys, role, serving.access)
        request.state.key_name, request.state.caller = caller.name, caller
        try:
            return await route(serving, caller, request)
        except asyncio.CancelledError:
            if serving.closed:  # the request outlasts the time that a stopping server gives
                raise stopping() from None
            raise

    return answer


async def _told(request: Request, error: Exception) -> Response:
    """Any error in the form of the route's dialect; on a route of several, in the client's."""
    if isinstance(error, ClientDisconnect):
        return Response(status_code=CLIENT_LEFT)
    if isinstance(error, HTTPException):
        message = f"{error.detail}: {request.method} {request.url.path}"
        allowed = {"Allow": _allowed(request)} if error.status_code == 405 else {}
        error = ApiError(message, status=error.status_code, headers={**(error.headers or {}), **allowed})
    told = api_error(error)
    if told.status >= 500 and not isinstance(error, ApiError):
        log.error("request %s failed", getattr(request.state, "request_id", "?"), exc_info=error)
    told.request_id = getattr(request.state, "request_id", None)
    form = _error_form(request.url.path, error_body if VERSION_HEADER in request.headers else ApiError.body)
    return JSONResponse(form(told), status_code=told.status, headers=told.headers)


def _error_form(path: str, usual: ErrorForm = ApiError.body) -> ErrorForm:
    return next((form for prefix, form in _ERROR_FORMS.items() if path.startswith(prefix)), usual)


def _allowed(request: Request) -> str:
    """The methods of a path, of which several routes answer one each."""
    found = [route for route in request.app.routes if route.matches(request.scope)[0] is Match.PARTIAL]
    described = [route for route in found if getattr(route, "include_in_schema", False)]
    return ", ".join(sorted(method for route in described for method in route.methods))


def _answered(serving: Serving, scope: Scope, status: int) -> Mapping[str, str]:
    """Count a request of a key by its status; returns the headers that tell the key's limits."""
    caller, path = scope["state"].get("caller"), scope["path"]
    if caller is None:
        return {}
    serving.usage.of(caller)[f"{status // 100}xx"] += 1
    of_openai = path.startswith("/v1/") and _error_form(path) is ApiError.body
    return serving.rates.headers(caller) if of_openai else {}


async def _models(serving: Serving, caller: Caller, request: Request) -> Response:
    """The models served, to a client of Anthropic's dialect in its form."""
    entries = [(name, entry) for entry in serving.models.entries for name in entry.names]
    if VERSION_HEADER in request.headers:
        found = [model_info(name, _context_length(entry), serving.started) for name, entry in entries]
        ends = {"first_id": found[0]["id"], "last_id": found[-1]["id"]} if found else {}
        return JSONResponse({"data": found, "has_more": False, **ends})
    described = [_described(name, entry, serving) for name, entry in entries]
    return JSONResponse({"object": "list", "data": described})


async def _model(serving: Serving, caller: Caller, request: Request) -> Response:
    """One model, in the same forms."""
    name = request.path_params["name"]
    entry = await serving.models.find(name)
    try:
        if VERSION_HEADER in request.headers:
            return JSONResponse(model_info(name, _context_length(entry), serving.started))
        return JSONResponse(_described(name, entry, serving))
    finally:
        serving.models.forget_unused(entry)


def _context_length(entry: Entry) -> int | None:
    return None if entry.instance is None else entry.instance.engine.context_length


def _described(name: str, entry: Entry, serving: Serving) -> dict[str, Any]:
    """OpenAI's description of a model, and what clients want to know before they ask it; more of one that is loaded."""
    told = Model(id=name, created=serving.started, object="model", owned_by="precedent").model_dump(mode="json")
    told |= {"aliases": [other for other in entry.names if other != name], "loaded": entry.instance is not None}
    if entry.instance is None:
        return told
    engine = entry.instance.engine
    profile = profile_of_engine(engine)
    return told | {
        "max_model_len": engine.context_length,
        "capabilities": {
            "tools": profile.get("tool_calling", False),
            "structured_output": profile.get("structured_output", False),
            "reasoning": profile.get("reasoning_output", False),
            "embeddings": engine.cache is not None,
        },
    }


async def _metrics(text: MetricsText, serving: Serving, caller: Caller, request: Request) -> Response:
    """Metrics of all models in Prometheus's text format; of keys only the caller's own, unless it administers."""
    told = await text()
    return PlainTextResponse(told if caller.may("admin") else for_key(told, caller.name), media_type=CONTENT_TYPE)


async def _description(app: FastAPI, serving: Serving, caller: Caller, request: Request) -> Response:
    """What every route takes and answers, as OpenAPI."""
    return JSONResponse(await serving.prepared(partial(description, app, serving)))


async def _health(serving: Serving, request: Request) -> Response:
    """Whether requests are served: 200, or 503 with the reason.

    What failed and is switched off is named under `degraded`, by model: answers are the same without it, only slower.
    """
    if serving.closed:
        raise ApiError("the server is stopping", status=503, kind=FAILED)
    found = {name: served.engine.health(serving.limits.stalled_seconds) for name, served in serving.models.items()}
    for name, health in found.items():
        if health.failing:
            raise ApiError(f"{name}: {health.failing}", status=503, kind=FAILED)
    degraded = {name: list(health.degraded) for name, health in found.items() if health.degraded}
    for name, faults in serving.models.faults.items():
        degraded[name] = [*degraded.get(name, ()), *faults]
    return JSONResponse({"status": "degraded", "degraded": degraded} if degraded else {"status": "ok"})


_ROUTES: tuple[tuple[str, str, Route, str], ...] = (
    ("/v1/chat/completions", "POST", chat_completions, "use"),
    ("/v1/completions", "POST", completions, "use"),
    ("/v1/responses", "POST", responses, "use"),
    ("/v1/responses/{id}", "GET", stored_response, "use"),
    ("/v1/responses/{id}", "DELETE", delete_response, "use"),
    ("/v1/embeddings", "POST", embeddings, "use"),
    ("/tokenize", "POST", tokenize, "use"),
    ("/detokenize", "POST", detokenize, "use"),
    ("/tokenizer_info", "GET", tokenizer_info, "use"),
    ("/v1/messages", "POST", messages, "use"),
    ("/v1/messages/count_tokens", "POST", count_tokens, "use"),
    ("/v1/models", "GET", _models, "use"),
    ("/v1/models/{name:path}", "GET", _model, "use"),
    ("/api/chat", "POST", ollama.chat, "use"),
    ("/api/generate", "POST", ollama.generate, "use"),
    ("/api/embed", "POST", ollama.embed, "use"),
    ("/api/embeddings", "POST", ollama.embeddings, "use"),
    ("/api/tags", "GET", tags, "use"),
    ("/api/ps", "GET", running_models, "use"),
    ("/api/show", "POST", show, "use"),
    ("/api/version", "GET", ollama.version, "use"),
    *((path, method, ollama.refusing(path, instead), "use") for path, (method, instead) in ollama.ELSEWHERE.items()),
    ("/dashboard/figures", "GET", figures, "admin"),
    ("/dashboard/completions", "GET", found_completions, "read-cache"),
    ("/dashboard/steps", "GET", last_steps, "admin"),
    ("/dashboard/forget", "POST", forget, "admin"),
)
"""Path, method, what answers, and the role that its caller needs."""

_ERROR_FORMS: Mapping[str, ErrorForm] = {"/api/": ollama.error_body, "/v1/messages": error_body}
"""How an error reads on paths that begin so, of dialects other than OpenAI's."""
