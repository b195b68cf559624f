"""Errors as OpenAI's clients expect them: `{"error": {"message", "type", "param", "code"}}` and an HTTP status."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from openai.types.shared.error_object import ErrorObject
from pydantic import BaseModel

from precedent.errors import (
    CapacityError,
    ConfigError,
    ContextOverflowError,
    EngineClosedError,
    GrammarError,
    PrecedentError,
    PromptError,
    RequestCancelled,
    UnsupportedError,
)

INVALID, DENIED, BUSY, FAILED = "invalid_request_error", "permission_error", "rate_limit_error", "server_error"

_OF_THE_CALLER: tuple[tuple[type[PrecedentError], str | None], ...] = (
    (ContextOverflowError, "context_length_exceeded"),
    (CapacityError, "context_length_exceeded"),
    (UnsupportedError, "unsupported_value"),
    (GrammarError, "unsupported_value"),
    (PromptError, None),
    (ConfigError, None),
)
"""Errors that the request itself causes, each with OpenAI's code; the first that fits counts."""


class ErrorBody(BaseModel):
    """The body of every answer with an HTTP status other than 200."""

    error: ErrorObject


class ApiError(Exception):
    """An answer with an HTTP status other than 200; `request_id` is that of its request once it is written."""

    request_id: str | None = None

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.headers = status, dict(headers or {})
        self.error = ErrorObject(message=message, type=kind, param=param, code=code)

    def body(self) -> dict[str, Any]:
        """The answer's JSON."""
        return ErrorBody(error=self.error).model_dump(include={"error": {"message", "type", "param", "code"}})


def stopping() -> ApiError:
    """What a caller is told whose request comes too late, or is cut short."""
    return ApiError("the server is stopping: try again", status=503, kind=FAILED, headers={"Retry-After": "5"})


def api_error(error: BaseException, keys: Iterable[str] = (), renamed: Mapping[str, str] | None = None) -> ApiError:
    """What a caller is told about an error; `keys` are those of the request, one of which may be to blame.

    `renamed` says what the request calls a setting that has another name here; its `prompt` is the prompt. Of errors
    that are not Precedent's own a caller is told nothing: they are in the log.
    """
    if isinstance(error, ApiError):
        return error
    for kind, code in _OF_THE_CALLER:
        if isinstance(error, kind):
            names = {**{key: key for key in keys}, **(renamed or {})}
            of_prompt = names.get("prompt") if isinstance(error, PromptError) else None
            blamed = re.match(r"\w+", str(error))  # the setting that the message begins with
            return ApiError(str(error), param=names.get(blamed[0] if blamed else "") or of_prompt, code=code)
    if isinstance(error, EngineClosedError | RequestCancelled):
        return stopping()
    return ApiError("the server failed to answer this request; its log says why", status=500, kind=FAILED)
