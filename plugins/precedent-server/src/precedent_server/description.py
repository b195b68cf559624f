"""The OpenAPI description of a server, made of the tables that check bodies and of the types that write answers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache, partial
from typing import Any, Literal, NamedTuple

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from openai.pagination import SyncPage
from openai.types import Model
from openai.types.chat import ChatCompletion
from openai.types.responses import Response
from pydantic import BaseModel, TypeAdapter

from precedent_server import chat, completions, embeddings, messages, ollama, responses, tokens
from precedent_server.bodies import Keys
from precedent_server.errors import ErrorBody
from precedent_server.serving import Serving
from precedent_server.transport import EVENTS

JSON, TEXT = "application/json", "text/plain"
SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
"""The ways to send a key."""

ANSWER, ERROR = "=answer", "=error"
OPEN = "/health"
"""The route that needs no key."""


class Health(BaseModel):
    """What `/health` answers: `degraded` names what failed and is switched off, by model."""

    status: Literal["ok", "degraded"]
    degraded: dict[str, list[str]] = {}


class Route(NamedTuple):
    """What a route takes and answers: a body (None: none), and the type of a whole answer in its `kind` of content.

    `events` is the kind of content of its streams, `error` the type of its errors.
    """

    body: Keys | None
    answer: Any
    kind: str = JSON
    streams: bool = False
    error: Any = ErrorBody
    events: str = EVENTS


_OF_OLLAMA = partial(Route, error=ollama.ErrorAnswer, events=ollama.LINES)


ROUTES: Mapping[str, Route] = {
    "/v1/chat/completions": Route(chat.KEYS, ChatCompletion, streams=True),
    "/v1/completions": Route(completions.KEYS, completions.TextCompletion, streams=True),
    "/v1/responses": Route(responses.KEYS, Response, streams=True),
    "/v1/responses/{id}": Route(None, Response | responses.DeletedResponse),
    "/v1/embeddings": Route(embeddings.KEYS, embeddings.Embeddings),
    "/v1/messages": Route(messages.KEYS, messages.Message, streams=True, error=messages.ErrorBody),
    "/v1/messages/count_tokens": Route(messages.COUNT_KEYS, messages.TokensCount, error=messages.ErrorBody),
    "/api/chat": _OF_OLLAMA(ollama.CHAT, ollama.ChatAnswer, streams=True),
    "/api/generate": _OF_OLLAMA(ollama.GENERATE, ollama.GenerateAnswer, streams=True),
    "/api/embed": _OF_OLLAMA(ollama.EMBED, ollama.EmbedAnswer),
    "/api/embeddings": _OF_OLLAMA(ollama.EMBEDDINGS, ollama.EmbeddingsAnswer),
    "/api/version": _OF_OLLAMA(None, ollama.VersionAnswer),
    "/tokenize": Route(tokens.TOKENIZE, tokens.Tokens),
    "/detokenize": Route(tokens.DETOKENIZE, tokens.Text),
    "/tokenizer_info": Route(None, tokens.TokenizerInfo),
    "/v1/models": Route(None, SyncPage[Model]),
    "/v1/models/{name}": Route(None, Model),
    "/metrics": Route(None, str, TEXT),
    OPEN: Route(None, Health),
}
"""The routes described. Others are the dashboard's: its page alone asks them, and they change with it."""

DEFINITIONS = "#/components/schemas"
_CALLED = (
    "openai__types__chat__chat_completion_message_function_tool_call_param__Function",
    "openai__types__chat__chat_completion_assistant_message_param__FunctionCall",
)
_MAY_LACK = {
    "ChatCompletionToolMessageParam": ("content", "tool_call_id"),
    "ChatCompletionMessageFunctionToolCallParam": ("id", "type"),
    **dict.fromkeys(_CALLED, ("arguments",)),
}
"""Keys that messages may lack although OpenAI's types require them."""

_UNREAD_PART = {"type": "object", "properties": {"type": {"not": {"enum": ["text", None]}}}, "required": ["type"]}
_PARTS = {
    "type": "array",
    "items": {"anyOf": [{"$ref": f"{DEFINITIONS}/ChatCompletionContentPartTextParam"}, _UNREAD_PART, {"type": "null"}]},
}
_ALSO: Mapping[str, Mapping[str, Any]] = {
    "ChatCompletionAssistantMessageParam": {
        "audio": {},
        "content": {"anyOf": [{"type": "string"}, _PARTS, {"type": "null"}]},
    },
    "ChatCompletionToolMessageParam": {"role": {"enum": ["tool", "function"]}},
    **{key: {"arguments": {"type": ["string", "object", "null"]}} for key in _CALLED},
}
"""Keys of messages that may be more than OpenAI's types say: what is not read, and what clients make of arguments."""


def description(app: FastAPI, serving: Serving) -> dict[str, Any]:
    """The description of what is served here."""
    told = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    schemas, definitions = _schemas()
    told["paths"] = {path: told["paths"][path] for path in ROUTES}
    told["components"] = {"schemas": definitions}
    for path, methods in told["paths"].items():
        for operation in methods.values():
            operation.update(_operation(path, schemas, serving.models.names))
            if serving.keys is not None and path != OPEN:
                operation["security"] = [{name: []} for name in SCHEMES]
    if serving.keys is not None:
        told["components"]["securitySchemes"] = SCHEMES
    return told


@cache
def _schemas() -> tuple[Mapping[Any, Any], dict[str, Any]]:
    """The schemas by path and key (ANSWER and ERROR for what is answered), and their shared definitions."""
    types: dict[tuple[str, str], Any] = {}
    for path, route in ROUTES.items():
        types |= {(path, ANSWER): route.answer, (path, ERROR): route.error}
        types |= {(path, name): kind for name, kind in (route.body.kinds.items() if route.body else ())}
    wanted = [(place, "validation", TypeAdapter(kind)) for place, kind in types.items()]
    found, shared = TypeAdapter.json_schemas(wanted, ref_template=f"{DEFINITIONS}/{{model}}")  # type: ignore[arg-type]
    definitions = {name: _as_read(name, schema) for name, schema in shared.get("$defs", {}).items()}
    return {place: schema for (place, _), schema in found.items()}, definitions


def _as_read(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    """A shared definition as requests are read: what need not be given may be null, at any depth."""
    if "properties" not in schema:
        return schema
    required = [key for key in schema.get("required", ()) if key not in _MAY_LACK.get(name, ())]
    properties = {key: one if key in required else _or_null(one) for key, one in schema["properties"].items()}
    return {**schema, "required": required, "properties": {**properties, **_ALSO.get(name, {})}}


def _operation(path: str, schemas: Mapping[Any, Any], models: list[str] | None) -> dict[str, Any]:
    route = ROUTES[path]
    contents = {route.kind: {"schema": schemas[path, ANSWER]}}
    contents |= {route.events: {}} if route.streams else {}  # OpenAPI 3.1 has no words for single events
    refused = {"content": {JSON: {"schema": schemas[path, ERROR]}}}
    told: dict[str, Any] = {
        "responses": {
            "200": {"description": "The answer.", "content": contents},
            "4XX": {"description": "A request that is refused.", **refused},
            "503": {"description": "The server is stopping, or fails.", **refused},
            "504": {"description": "The answer took too long.", **refused},
        }
    }
    if names := re.findall(r"{(\w+)}", path):
        text = {"schema": {"type": "string"}}
        told["parameters"] = [{"name": name, "in": "path", "required": True, **text} for name in names]
    if (keys := route.body) is not None:
        properties = {name: _or_null(schemas[path, name]) for name in keys.kinds}
        if not keys.ignores_others:
            neutral = {name: values for name, values in keys.neutral.items() if name not in keys.known}
            properties |= {name: {"enum": [*values, None]} for name, values in neutral.items()}
        properties |= {name: schemas[path, name] for name in keys.required}
        properties["model"] = {"type": "string"} | ({"enum": models} if models else {})
        body = {"type": "object", "properties": properties, "required": list(keys.required)}
        told["requestBody"] = {
            "required": True,
            "content": {JSON: {"schema": {**body, "additionalProperties": keys.ignores_others}}},
        }
    return told


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema that takes null as well: a key that is null is one that is not given."""
    null = {"type": "null"}
    return schema if schema in ({}, null) or null in schema.get("anyOf", ()) else {"anyOf": [schema, null]}
