"""`POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from precedent.errors import PrecedentError
from precedent.langchain.chat_model import RunningAnswer
from precedent_server.answers import Answer, interleaved, read_all
from precedent_server.bodies import parsed
from precedent_server.chat_answer import ChatChunks, whole
from precedent_server.chat_request import ChatRequest, chat_request
from precedent_server.errors import api_error
from precedent_server.keys import Caller
from precedent_server.serving import Served, Serving
from precedent_server.transport import DONE, EventStream, error_event, failure, read_body, unless_gone


async def chat_completions(serving: Serving, caller: Caller, request: Request) -> Response:
    """Answer one request, whole or as a stream."""
    asked = await read_body(request, serving, partial(_asked, serving))
    serving.num_ignored += asked.num_ignored
    served = serving.model(asked.model)
    with ExitStack() as held:
        held.enter_context(serving.places.taken(caller.name, asked.num_choices))
        answers = await unless_gone(request, serving.limits, begun(serving, served, asked, caller, held))
        if asked.stream:
            return EventStream(_events(answers, asked, held.pop_all()), serving.limits, serving.places, error_event)
        await unless_gone(request, serving.limits, read_all(answers))
        return JSONResponse(await serving.prepared(partial(whole, answers, asked.model)))


def _asked(serving: Serving, raw: bytes) -> ChatRequest:
    body = parsed(raw)
    try:
        return chat_request(body, serving.limits)
    except PrecedentError as error:
        raise api_error(error, body, {"prompt": "messages"}) from error


async def begun(serving: Serving, served: Served, asked: ChatRequest, caller: Caller, held: ExitStack) -> list[Answer]:
    """Start every answer; `held` cancels them when it is closed."""
    answers = list[Answer]()
    for index in range(asked.num_choices):
        settings = served.settings_of(asked.settings_of(index), serving.limits.default_max_tokens)
        begin = partial(_begin, served, asked, {**settings, "tenant": caller.tenant})
        one = await serving.prepared(begin, lambda begun: begun.generation.cancel())
        held.callback(one.generation.cancel)
        answers.append(Answer.of(index, one, whole=not asked.stream))
    return answers


def _begin(served: Served, asked: ChatRequest, settings: dict[str, Any]) -> RunningAnswer:
    try:
        return served.chat.begin(asked.messages, settings)
    except PrecedentError as error:
        raise api_error(error, asked.keys, asked.renamed) from error


async def _events(answers: Sequence[Answer], asked: ChatRequest, held: ExitStack) -> AsyncGenerator[str, None]:
    """The events of a stream; an error is the last of them."""
    chunks = ChatChunks(answers, asked.model, include_usage=asked.include_usage, include_sources=asked.include_sources)
    with held:
        try:
            yield "".join(chunks.first())
            async for answer, emission, pieces in interleaved(answers):
                if pieces:
                    yield "".join(chunks.of(answer, emission, pieces))
                else:
                    chunks.of(answer, emission, pieces)
            yield "".join(chunks.last()) + DONE
        except Exception as error:
            yield error_event(failure(error))
