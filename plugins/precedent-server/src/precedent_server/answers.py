"""The answers to one request while they run, and the response that they become, whole or as a stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from openai.types.completion_usage import CompletionTokensDetails, CompletionUsage, PromptTokensDetails
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from precedent.decoding.sequence import Emission
from precedent.engine.engine import Engine
from precedent.engine.generation import Generation, GenerationResult
from precedent.langchain.logprobs import openai_logprobs
from precedent.langchain.telemetry import current_span, describe_result
from precedent.sampling.logprobs import TokenLogprob
from precedent.text.answers import AnswerPieces, AnswerSyntax, CallPiece, Piece
from precedent.text.tool_formats import ReasoningPiece, TextPiece
from precedent_server.errors import ApiError
from precedent_server.keys import Caller
from precedent_server.serving import Serving
from precedent_server.transport import EventStream, failure, unless_gone

PREDICTION = "prediction"
"""The drafter that proposes the request's own `prediction`."""


@dataclass(slots=True)
class Answer:
    """One answer, described on the span around it. `text`, `reasoning` and `calls` grow while it is read.

    `syntax` is None for a text that is only continued. A call that `max_tokens` cuts is text in a `whole` answer.
    """

    index: int
    engine: Engine
    generation: Generation
    syntax: AnswerSyntax | None = None
    whole: bool = False
    text: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    _pieces: AnswerPieces | None = None
    _nameless: bool = False
    _span: Any = field(default_factory=current_span)

    def __post_init__(self) -> None:
        if self.syntax is not None:
            self._pieces = AnswerPieces(self.syntax, whole=self.whole)

    async def steps(self) -> AsyncGenerator[tuple[Answer, Emission, list[Piece]], None]:
        """Each emission with the pieces that it completes, and what was held back at the end."""
        async for emission in self.generation:
            yield self, emission, self._read([] if self._pieces is None else self._pieces.push(emission.text))
        if self._pieces is not None:
            yield self, Emission(""), self._read(self._pieces.finish(cut=self.result.finish_reason == "length"))
        if self._span is not None:
            describe_result(self._span, self.engine.model_name, self.result)

    def _read(self, pieces: Any) -> list[Piece]:
        return [read for piece in pieces if (read := self._noted(piece)) is not None]

    def _noted(self, piece: Piece) -> Piece | None:
        """The piece, added to what was read; a call without a name has no place in OpenAI's form and is text."""
        if isinstance(piece, CallPiece) and piece.call_id is not None:
            self._nameless = piece.name is None
            if self._nameless:
                return None
            function = {"name": piece.name, "arguments": ""}
            self.calls.append({"id": piece.call_id, "type": "function", "function": function})
        elif isinstance(piece, CallPiece) and not self._nameless:
            self.calls[-1]["function"]["arguments"] += piece.arguments
        elif isinstance(piece, ReasoningPiece):
            self.reasoning += piece.text
        else:
            piece = piece if isinstance(piece, TextPiece) else TextPiece(piece.arguments)
            self.text += piece.text
        return piece

    @property
    def result(self) -> GenerationResult:
        """The engine's result, once all steps were read."""
        return self.generation.result()

    @property
    def finish_reason(self) -> str:
        """OpenAI's word for why it ended."""
        reason = self.result.finish_reason
        return "tool_calls" if self.calls and reason == "stop" else reason

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of reasoning, once all steps were read."""
        return 0 if self._pieces is None else sum(map(len, self._pieces.reasoning_ranges(self.result.token_ids)))

    def logprobs(self, told: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        """OpenAI's log-probabilities of some tokens, None if there are none."""
        return {**openai_logprobs(told, self.engine.tokenizer), "refusal": None} if told else None


class Writer(Protocol):
    """Writes answers in the form of one route."""

    def whole(self) -> dict[str, Any]:
        """The body of answers that were read to their ends."""

    def events(self) -> AsyncGenerator[str, None]:
        """The events of a stream, while the answers are read."""

    def failed(self, error: ApiError) -> str:
        """The event that ends a stream which failed."""


async def reply(
    serving: Serving, caller: Caller, request: Request, *,
    number: int, begin: Callable[[int], Answer], write: Callable[[list[Answer]], Writer], stream: bool,
) -> Response:  # fmt: skip
    """Begin so many answers, each by its index, and answer with what `write` makes of them.

    They hold places until they have ended, and end if the client leaves. Raises ApiError.
    """
    with ExitStack() as held:
        held.enter_context(serving.taken(caller.name, number))
        answers = list[Answer]()
        for index in range(number):
            begun = serving.prepared(partial(begin, index), lambda answer: answer.generation.cancel())
            answers.append(await unless_gone(request, serving.limits, begun))
            held.callback(answers[-1].generation.cancel)
        writer = write(answers)
        if stream:
            return EventStream(serving, _events(writer, held.pop_all()), writer.failed)
        await unless_gone(request, serving.limits, _read_all(answers))
        return JSONResponse(await serving.prepared(writer.whole))


async def _read_all(answers: Sequence[Answer]) -> None:
    async for _ in steps_of(answers):
        pass


async def _events(writer: Writer, held: ExitStack) -> AsyncGenerator[str, None]:
    """The events of a stream; an error is the last of them."""
    with held:
        try:
            async with aclosing(writer.events()) as events:
                async for event in events:
                    yield event
        except Exception as error:
            yield writer.failed(failure(error))


async def steps_of(answers: Sequence[Answer]) -> AsyncIterator[tuple[Answer, Emission, list[Piece]]]:
    """The steps of all answers in the order in which they come; the first error ends all, leaving early closes all."""
    if len(answers) == 1:  # no queue between a stream and its only reader
        async with aclosing(answers[0].steps()) as only:
            async for step in only:
                yield step
        return
    steps: asyncio.Queue[Any] = asyncio.Queue()
    reading = asyncio.create_task(_queue_all(answers, steps))
    try:
        while (found := await steps.get()) is not None:
            yield found
        await reading
    finally:
        reading.cancel()


async def _queue_all(answers: Sequence[Answer], steps: asyncio.Queue[Any]) -> None:
    async def queue(answer: Answer) -> None:
        async with aclosing(answer.steps()) as each:
            async for step in each:
                steps.put_nowait(step)

    try:
        async with asyncio.TaskGroup() as group:
            for answer in answers:
                group.create_task(queue(answer))
    except BaseExceptionGroup as error:
        raise error.exceptions[0] from None
    finally:
        steps.put_nowait(None)


def usage_of(answers: Sequence[Answer], num_prompts: int = 1) -> CompletionUsage:
    """The usage of a request's answers; each of its prompts counts once.

    Accepted and rejected prediction tokens are those of `prediction` alone. Rejected ones are not billed: they are no
    part of `completion_tokens`, which OpenAI would add them to.
    """
    results = [answer.result for answer in answers]
    prompt = sum(result.prompt_tokens for result in results[:: len(results) // num_prompts])
    written = sum(len(result.token_ids) for result in results)
    accepted = sum(result.stats.accepted_by_source[PREDICTION] for result in results)
    drafted = sum(result.stats.drafted_by_source[PREDICTION] for result in results)
    return CompletionUsage(
        prompt_tokens=prompt,
        completion_tokens=written,
        total_tokens=prompt + written,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=results[0].cached_prompt_tokens),
        completion_tokens_details=CompletionTokensDetails(
            reasoning_tokens=sum(answer.num_reasoning_tokens for answer in answers),
            accepted_prediction_tokens=accepted,
            rejected_prediction_tokens=max(0, drafted - accepted),
        ),
    )


def speculation_of(answers: Sequence[Answer]) -> Any:
    """What speculation did: one entry, or a list for several answers."""
    stats = [answer.result.stats for answer in answers]
    told = [{**one.as_dict(), "tokens_per_step": round(one.tokens_per_step, 3)} for one in stats]
    return told[0] if len(told) == 1 else told
