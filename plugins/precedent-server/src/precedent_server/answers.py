"""The path of every route that a model answers: its answers while they run, and the response that they become."""

from __future__ import annotations

import asyncio
import secrets
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack, aclosing, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

from openai.types.completion_usage import CompletionTokensDetails, CompletionUsage, PromptTokensDetails
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from precedent.decoding.sequence import Emission
from precedent.engine.engine import Engine
from precedent.engine.generation import Generation, GenerationResult
from precedent.errors import PrecedentError
from precedent.langchain.answers import current_span, describe_result, openai_logprobs
from precedent.sampling.logprobs import TokenLogprob
from precedent.text.answers import AnswerPieces, AnswerSyntax, CallPiece, Piece
from precedent.text.assembly import IncrementalDetokenizer, hidden_tokens, special_token_ids
from precedent.text.tool_formats import ReasoningPiece, TextPiece
from precedent_server.bodies import parsed
from precedent_server.errors import DENIED, ApiError, api_error
from precedent_server.keys import Caller
from precedent_server.serving import Route, Served, Serving
from precedent_server.settings import ServerLimits
from precedent_server.transport import (
    DONE,
    EVENTS,
    EventStream,
    error_event,
    event,
    failure,
    model_of,
    read_body,
    unless_gone,
)

PREDICTION = "prediction"
"""The drafter that proposes the request's own `prediction`."""


Sources = list[tuple[str, str]]
"""Texts, each with the name of its source. Together they are the answer as the model wrote it, markup included."""


class SourceTexts:
    """Divides the text of one answer among its tokens.

    A token is told once all it adds to the answer has come: a text that may become a stop string is held back, and
    what the stop string cuts off is no part of the answer. A token that only begins a character adds an empty text.
    Hidden special tokens are left out.
    """

    def __init__(self, syntax: AnswerSyntax) -> None:
        tokenizer, shown = syntax.tokenizer, syntax.shown_tokens
        self._detokenizer = IncrementalDetokenizer(tokenizer, shown)
        hidden = hidden_tokens(tokenizer, shown)
        self._hidden = frozenset(special_token_ids(tokenizer)) if hidden is None else hidden
        self._untold: deque[tuple[int, str]] = deque()
        self._text, self._last = "", ""

    def push(self, emission: Emission) -> Sources:
        """The tokens whose text is complete."""
        self._text += emission.text
        for token, source in zip(emission.token_ids, emission.sources, strict=True):
            length = len(self._detokenizer.push([token]))
            if length or token not in self._hidden:
                self._untold.append((length, source))
        found = Sources()
        while self._untold and self._untold[0][0] <= len(self._text):
            length, self._last = self._untold.popleft()
            found.append((self._text[:length], self._last))
            self._text = self._text[length:]
        return found

    def finish(self) -> Sources:
        """The rest of the answer: part of a token before a stop string, or the replacement of half a character."""
        rest, self._text = self._text, ""
        source = self._untold[0][1] if self._untold else self._last
        return [(rest, source)] if rest else []


class Echo(NamedTuple):
    """A prompt that is told before its answer, and its first token."""

    text: str
    first_id: int


@dataclass(slots=True)
class Answer:
    """One answer, described on the span around it. `text`, `reasoning` and `calls` grow while it is read.

    `prompt_tokens` is the length of its prompt, `num_read` the number of its tokens that were read. `syntax` is None
    for a text that is only continued. A call that `max_tokens` cuts is text in a `whole` answer.
    """

    index: int
    engine: Engine
    generation: Generation
    prompt_tokens: int
    syntax: AnswerSyntax | None = None
    whole: bool = False
    echo: Echo | None = None
    text: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    num_read: int = 0
    _pieces: AnswerPieces | None = None
    _nameless: bool = False
    _span: Any = field(default_factory=current_span)

    def __post_init__(self) -> None:
        if self.syntax is not None:
            self._pieces = AnswerPieces(self.syntax, whole=self.whole)

    async def steps(self) -> AsyncGenerator[tuple[Answer, Emission, list[Piece]], None]:
        """Each emission with the pieces that it completes, and what was held back at the end."""
        async for emission in self.generation:
            self.num_read += len(emission.token_ids)
            yield self, emission, self._read(self._pieces_of(emission.text))
        if self._pieces is not None:
            yield self, Emission(""), self._read(self._pieces.finish(cut=self.result.finish_reason == "length"))
        if self._span is not None:
            describe_result(self._span, self.engine.model_name, self.result)

    def _pieces_of(self, text: str) -> Iterable[Piece]:
        if self._pieces is not None:
            return self._pieces.push(text)
        return [TextPiece(text)] if text else []

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


def logprobs_of(answer: Answer, told: Sequence[TokenLogprob]) -> dict[str, Any] | None:
    """OpenAI's log-probabilities of some tokens, None if there are none."""
    return {**openai_logprobs(told, answer.engine.tokenizer), "refusal": None} if told else None


class Writer(Protocol):
    """Writes answers in the form of one route."""

    def whole(self) -> dict[str, Any]:
        """The body of answers that were read to their ends."""

    def events(self) -> AsyncGenerator[str, None]:
        """The events of a stream, while the answers are read."""

    def failed(self, error: ApiError) -> str:
        """The event that ends a stream which failed."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request for `number` answers: `begin` begins the one of an index for a tenant, and `write` writes them all.

    Each of its `num_prompts` has as many answers in a row.

    `keys` are those of its body, `renamed` says what it calls settings that have another name here. `num_ignored` parts
    of its messages were not read. `keep_alive` is how many seconds its model should stay loaded afterwards; None leaves
    that to the server, as does a caller that does not administer it. A stream is of `media_type`. A request for no
    answers only loads its model, or unloads it if it should not stay. `num_prompt_tokens` counts the tokens of a chat's
    prompt on a model.
    """

    model: str
    number: int
    stream: bool
    begin: Callable[[Served, str, int], Answer]
    write: Callable[[list[Answer]], Writer]
    keys: Collection[str]
    renamed: Mapping[str, str] = field(default_factory=dict)
    num_ignored: int = 0
    num_prompts: int = 1
    num_prompt_tokens: Callable[[Served], int] | None = None
    keep_alive: float | None = None
    media_type: str = EVENTS


def answering(read: Callable[[dict[str, Any], ServerLimits], Asked], prompt: str) -> Route:
    """A route that reads a body with `read`, begins its answers, and answers with what their writer makes of them.

    They hold places until they have ended, and end if the client leaves. `prompt` is the key of the body's prompt.
    """

    async def answer(serving: Serving, caller: Caller, request: Request) -> Response:
        """Answer one request, whole or as a stream."""

        def asked_in(raw: bytes) -> Asked:
            body = parsed(raw)
            try:
                return read(body, serving.limits)
            except PrecedentError as error:
                raise api_error(error, body, {"prompt": prompt}) from error

        def begun(index: int) -> Answer:
            try:
                return asked.begin(served, caller.tenant, index)
            except PrecedentError as error:
                raise api_error(error, asked.keys, asked.renamed) from error

        serving.rates.take_request(caller)
        asked = await read_body(request, serving, asked_in)
        serving.num_ignored += asked.num_ignored
        with ExitStack() as held:
            held.enter_context(serving.taken(caller.name, max(1, asked.number)))
            administers = caller.may("admin")  # all callers share a model: others may neither unload nor pin it
            if asked.number or asked.keep_alive != 0:
                keep_alive = asked.keep_alive if administers else None
                lease = held.enter_context(serving.models.lease(asked.model, keep_alive))
                served = await model_of(request, serving, lease)
            elif administers:
                await serving.models.unload(asked.model)
            else:
                raise ApiError("only a key of the role 'admin' may unload a model", status=403, kind=DENIED)
            answers = list[Answer]()
            held.callback(_count, serving, caller, answers)
            for index in range(asked.number):
                beginning = serving.prepared(partial(begun, index), lambda unused: unused.generation.cancel())
                answers.append(await unless_gone(request, serving.limits, beginning))
                held.callback(answers[-1].generation.cancel)
                if index % (asked.number // asked.num_prompts) == 0:
                    serving.take_prompt(caller, answers[-1].prompt_tokens)
            writer = asked.write(answers)
            if asked.stream:
                return EventStream(serving, _events(writer), writer.failed, asked.media_type, held=held.pop_all())
            await unless_gone(request, serving.limits, _read_all(answers))
            return await serving.prepared(lambda: JSONResponse(writer.whole()))  # written there: it may be long

    return answer


def _count(serving: Serving, caller: Caller, answers: Sequence[Answer]) -> None:
    """Count what the answers of a request used, those that were cut off as well."""
    used = Counter[str]()
    for answer in answers:
        used["completion_tokens"] += answer.num_read
        if answer.num_read and answer.generation.done:
            with suppress(PrecedentError):  # it was cancelled, or failed
                used.update(_used_by(answer.result))
    serving.rates.take_answer(caller, used["completion_tokens"])
    serving.usage.of(caller).update(used)


def _used_by(result: GenerationResult) -> dict[str, int]:
    return {
        "cached_prompt_tokens": result.cached_prompt_tokens,
        "draft_tokens": result.stats.num_draft_tokens,
        "accepted_tokens": result.stats.num_accepted_tokens,
    }


class ChunkWriter(ABC):
    """Writes answers as OpenAI's completions or chunks; its heirs say what a choice is.

    A chunk tells the log-probabilities and sources of tokens that none before it told.
    """

    prefix: str
    whole_body: type[BaseModel]
    chunk_body: type[BaseModel]
    kinds: tuple[str, str]
    """OpenAI's words for a whole body and for a chunk."""

    def __init__(self, said: Mapping[str, Any], answers: Sequence[Answer], num_prompts: int = 1) -> None:
        self.answers, self._num_prompts, options = answers, num_prompts, said.get("stream_options", {})
        self._head = {"id": f"{self.prefix}-{secrets.token_hex(12)}", "created": int(time.time())}
        self._head["model"] = said["model"]
        self._no_usage = {"usage": None} if options.get("include_usage") is True else {}
        self._untold: dict[int, list[TokenLogprob]] = {answer.index: [] for answer in answers}
        shown = {answer.index: answer.syntax for answer in answers if options.get("include_sources") is True}
        self._sources = {index: SourceTexts(syntax) for index, syntax in shown.items() if syntax is not None}
        self._untold_sources: dict[int, Sources] = {answer.index: [] for answer in answers}

    @abstractmethod
    def choice(self, answer: Answer) -> dict[str, Any]:
        """A whole answer."""

    @abstractmethod
    def beginning(self, answer: Answer) -> dict[str, Any] | None:
        """What the first chunk of an answer says; None without one."""

    @abstractmethod
    def part(self, piece: Piece | None) -> dict[str, Any]:
        """What a chunk says of a piece of an answer; None at its end."""

    def logprobs(self, answer: Answer, told: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        """OpenAI's log-probabilities of some tokens, None if there are none."""
        return logprobs_of(answer, told)

    def whole(self) -> dict[str, Any]:
        """The body of answers that were read to their ends."""
        told = {**self._head, "object": self.kinds[0], "choices": list(map(self.choice, self.answers))}
        return self.whole_body.model_validate(told | self._figures()).model_dump(mode="json", exclude_unset=True)

    async def events(self) -> AsyncGenerator[str, None]:
        """The chunks of a stream: beginnings, pieces, ends, and the usage."""
        begun = ((answer, self.beginning(answer)) for answer in self.answers)
        if first := "".join(self._chunk(answer, part) for answer, part in begun if part is not None):
            yield first
        async for answer, emission, pieces in steps_of(self.answers):
            self._untold[answer.index] += emission.logprobs
            if self._sources:
                self._untold_sources[answer.index] += self._sources[answer.index].push(emission)
            told = [piece for piece in pieces if not (isinstance(piece, CallPiece) and piece.cut)]
            if written := "".join(self._chunk(answer, self.part(piece)) for piece in told):
                yield written
        for index, sources in self._sources.items():
            self._untold_sources[index] += sources.finish()
        ends = "".join(
            self._chunk(answer, self.part(None), answer.finish_reason, speculation=speculation_of([answer]))
            for answer in self.answers
        )
        yield ends + (self._written([], [], **self._figures()) if self._no_usage else "") + DONE

    def failed(self, error: ApiError) -> str:
        """The event that ends a stream which failed."""
        return error_event(error)

    def _figures(self) -> dict[str, Any]:
        return {"usage": usage_of(self.answers, self._num_prompts), "speculation": speculation_of(self.answers)}

    def _chunk(self, answer: Answer, part: dict[str, Any], finish_reason: str | None = None, **more: Any) -> str:
        index = answer.index
        logprobs, self._untold[index] = self.logprobs(answer, self._untold[index]), []
        sources, self._untold_sources[index] = self._untold_sources[index], []
        choice = {"index": index, **part, "logprobs": logprobs, "finish_reason": finish_reason}
        return self._written([choice], sources, **self._no_usage, **more)

    def _written(self, choices: list[Any], sources: Sources, **more: Any) -> str:
        more |= {"sources": sources} if self._sources else {}
        told = {**self._head, "object": self.kinds[1], "choices": choices, **more}
        return event(self.chunk_body.model_construct(**told).model_dump_json(exclude_unset=True, warnings=False))


async def _read_all(answers: Sequence[Answer]) -> None:
    async for _ in steps_of(answers):
        pass


async def _events(writer: Writer) -> AsyncGenerator[str, None]:
    """The events of a stream; an error is the last of them."""
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
