"""Writes answers as OpenAI's chat completions, whole or as a stream of chunks."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

from openai.types.chat import ChatCompletion, ChatCompletionChunk

from precedent.engine.generation import Emission
from precedent.sampling.logprobs import TokenLogprob
from precedent.text.answers import CallPiece, Piece
from precedent.text.tool_formats import ReasoningPiece
from precedent_server.answers import Answer
from precedent_server.sources import Sources, SourceTexts
from precedent_server.transport import event
from precedent_server.usage import speculation_of, usage_of


def whole(answers: Sequence[Answer], model: str) -> dict[str, Any]:
    """The completion of answers that were read to their ends."""
    results = [answer.result for answer in answers]
    completion = ChatCompletion.model_validate(
        {
            "id": _new_id(),
            "object": "chat.completion",
            "created": int(time.time()),
            "model": model,
            "choices": [_choice(answer) for answer in answers],
            "usage": usage_of(results, sum(answer.num_reasoning_tokens for answer in answers)),
            "speculation": speculation_of(results),
        }
    )
    return completion.model_dump(mode="json", exclude_unset=True)


def _choice(answer: Answer) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.text or None, "refusal": None}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.calls:
        message["tool_calls"] = answer.calls
    elif answer.text == "":
        message["content"] = ""
    return {
        "index": answer.index,
        "message": message,
        "finish_reason": answer.finish_reason,
        "logprobs": answer.logprobs(answer.result.logprobs),
    }


class ChatChunks:
    """The chunks of one streamed completion, as texts of events.

    With `include_sources` each chunk has `sources`: the answer's tokens so far that no chunk before it told.
    """

    def __init__(
        self, answers: Sequence[Answer], model: str, *, include_usage: bool, include_sources: bool = False
    ) -> None:
        self._answers, self._include_usage = answers, include_usage
        self._head = {"id": _new_id(), "object": "chat.completion.chunk", "created": int(time.time()), "model": model}
        self._untold: dict[int, list[TokenLogprob]] = {answer.index: [] for answer in answers}
        self._sources = {answer.index: SourceTexts(answer.begun.syntax) for answer in answers if include_sources}
        self._untold_sources: dict[int, Sources] = {index: [] for index in self._sources}

    def first(self) -> list[str]:
        """A chunk for each answer that says who speaks."""
        return [self._of(answer.index, {"role": "assistant", "content": ""}) for answer in self._answers]

    def of(self, answer: Answer, emission: Emission, pieces: Sequence[Piece]) -> list[str]:
        """The chunks of one step: each piece is one, and the first tells log-probabilities and sources so far."""
        self._untold[answer.index] += emission.logprobs
        if self._sources:
            self._untold_sources[answer.index] += self._sources[answer.index].push(emission)
        return [self._of(answer.index, _delta(piece), self._told(answer)) for piece in pieces if not _ends(piece)]

    def last(self) -> list[str]:
        """The chunks that end every answer, then the usage."""
        results = [answer.result for answer in self._answers]
        for index, sources in self._sources.items():
            self._untold_sources[index] += sources.finish()
        ends = [
            self._of(answer.index, {}, self._told(answer), answer.finish_reason, speculation_of([answer.result]))
            for answer in self._answers
        ]
        if not self._include_usage:
            return ends
        usage = usage_of(results, sum(answer.num_reasoning_tokens for answer in self._answers))
        return [*ends, self._written({"choices": [], "usage": usage, "speculation": speculation_of(results)})]

    def _told(self, answer: Answer) -> dict[str, Any] | None:
        told = answer.logprobs(self._untold[answer.index])
        self._untold[answer.index] = []
        return told

    def _of(
        self,
        index: int,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        finish_reason: str | None = None,
        speculation: Any = None,
    ) -> str:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        told = {} if speculation is None else {"speculation": speculation}
        usage = {"usage": None} if self._include_usage else {}
        return self._written({"choices": [choice], **usage, **told}, self._sources_of(index))

    def _sources_of(self, index: int) -> Sources:
        told = self._untold_sources.get(index, [])
        self._untold_sources[index] = []
        return told

    def _written(self, rest: dict[str, Any], sources: Sequence[tuple[str, str]] = ()) -> str:
        told = {"sources": sources} if self._sources else {}
        chunk = ChatCompletionChunk.model_validate({**self._head, **rest, **told})
        return event(chunk.model_dump_json(exclude_unset=True))


def _delta(piece: Piece) -> dict[str, Any]:
    if isinstance(piece, ReasoningPiece):
        return {"reasoning_content": piece.text}
    if not isinstance(piece, CallPiece):
        return {"content": piece.text}
    if piece.call_id is None:
        return {"tool_calls": [{"index": piece.index, "function": {"arguments": piece.arguments}}]}
    function = {"name": piece.name, "arguments": ""}
    return {"tool_calls": [{"index": piece.index, "id": piece.call_id, "type": "function", "function": function}]}


def _ends(piece: Piece) -> bool:
    """Whether a piece only says that the answer's end cut its call."""
    return isinstance(piece, CallPiece) and piece.cut


def _new_id() -> str:
    return f"chatcmpl-{secrets.token_hex(12)}"
