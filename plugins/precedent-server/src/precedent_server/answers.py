"""The answers to one request while they run: pieces as they come, and what is left when they end."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from precedent.engine.generation import Emission, GenerationResult
from precedent.langchain.chat_model import RunningAnswer
from precedent.langchain.logprobs import openai_logprobs
from precedent.langchain.telemetry import Span, current_span, describe_result
from precedent.sampling.logprobs import TokenLogprob
from precedent.text.answers import AnswerPieces, CallPiece, Piece
from precedent.text.tool_formats import ReasoningPiece, TextPiece
from precedent_server.merging import merged


@dataclass(slots=True)
class Answer:
    """One answer. `text`, `reasoning` and `calls` grow while it is read."""

    index: int
    begun: RunningAnswer
    pieces: AnswerPieces
    text: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    _nameless: bool = False
    _span: Span | None = None

    @classmethod
    def of(cls, index: int, begun: RunningAnswer, *, whole: bool) -> Answer:
        """The answer of a request that was just begun, described on the span around it; `whole` if it is not streamed.

        A call that `max_tokens` cuts is text in a whole answer.
        """
        return cls(index, begun, AnswerPieces(begun.syntax, whole=whole), _span=current_span())

    async def steps(self) -> AsyncGenerator[tuple[Answer, Emission, list[Piece]], None]:
        """Each emission with the pieces that it completes, and what was held back at the end."""
        async for emission in self.begun.generation:
            yield self, emission, self._read(self.pieces.push(emission.text))
        cut = self.result.finish_reason == "length"
        yield self, Emission(""), self._read(self.pieces.finish(cut=cut))
        if self._span is not None:
            describe_result(self._span, self.begun.engine.model_name, self.result)

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
        return self.begun.generation.result()

    @property
    def finish_reason(self) -> str:
        """OpenAI's word for why it ended."""
        reason = self.result.finish_reason
        return "tool_calls" if self.calls and reason == "stop" else reason

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of reasoning, once all steps were read."""
        return sum(map(len, self.pieces.reasoning_ranges(self.result.token_ids)))

    def logprobs(self, told: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        """OpenAI's log-probabilities of some tokens, None if there are none."""
        if not told:
            return None
        return {**openai_logprobs(told, self.begun.engine.tokenizer), "refusal": None}


async def read_all(answers: Sequence[Answer]) -> None:
    """Read every answer to its end; the first error ends all."""
    async for _ in interleaved(answers):
        pass


def interleaved(answers: Sequence[Answer]) -> AsyncIterator[tuple[Answer, Emission, list[Piece]]]:
    """The steps of several answers in the order in which they come."""
    return merged([answer.steps() for answer in answers])
