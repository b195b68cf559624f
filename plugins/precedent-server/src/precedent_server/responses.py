"""`POST /v1/responses`: a whole conversation in, its next items out; nothing is kept between requests."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import ExitStack
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from precedent.errors import PrecedentError
from precedent_server.answers import Answer, interleaved, read_all
from precedent_server.bodies import parsed
from precedent_server.chat import begun
from precedent_server.chat_request import ChatRequest
from precedent_server.errors import api_error
from precedent_server.keys import Caller
from precedent_server.responses_answer import ResponseWriter
from precedent_server.responses_request import responses_request
from precedent_server.serving import Serving
from precedent_server.transport import EventStream, failure, read_body, unless_gone


async def responses(serving: Serving, caller: Caller, request: Request) -> Response:
    """Answer one request, whole or as a stream of events."""
    body, asked = await read_body(request, serving, partial(_asked, serving))
    serving.num_ignored += asked.num_ignored
    served = serving.model(asked.model)
    with ExitStack() as held:
        held.enter_context(serving.places.taken(caller.name))
        (answer,) = await unless_gone(request, serving.limits, begun(serving, served, asked, caller, held))
        writer = ResponseWriter(answer, body)
        if asked.stream:
            return EventStream(_events(answer, writer, held.pop_all()), serving.limits, serving.places, writer.failed)
        await unless_gone(request, serving.limits, read_all([answer]))
        return JSONResponse(await serving.prepared(writer.whole))


def _asked(serving: Serving, raw: bytes) -> tuple[dict[str, Any], ChatRequest]:
    body = {name: value for name, value in parsed(raw).items() if value is not None}
    try:
        return body, responses_request(body, serving.limits)
    except PrecedentError as error:
        raise api_error(error, body, {"prompt": "input"}) from error


async def _events(answer: Answer, writer: ResponseWriter, held: ExitStack) -> AsyncGenerator[str, None]:
    with held:
        try:
            yield writer.first()
            async for _, emission, pieces in interleaved([answer]):
                if written := writer.of(emission, pieces):
                    yield written
            yield writer.last()
        except Exception as error:
            yield writer.failed(failure(error))
