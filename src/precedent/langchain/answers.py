"""A running request as LangChain sees it: chunks of text, reasoning and tool calls, then usage, statistics and a span.

OpenTelemetry is never imported: an application that has a span has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from langchain_core.messages import AIMessageChunk
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.messages.tool import tool_call_chunk
from langchain_core.outputs import ChatGenerationChunk

from precedent.decoding.stats import TARGET
from precedent.langchain.arguments import SAMPLING
from precedent.sampling.logprobs import TokenLogprob
from precedent.text.answers import AnswerPieces, CallPiece, Piece
from precedent.text.assembly import UNFINISHED
from precedent.text.tool_formats import ReasoningPiece, TextPiece
from precedent.text.tool_formats.json_text import ARGUMENTS, WHOLE, seal_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from precedent.config import SamplingParams
    from precedent.engine.engine import Emission, Engine, Generation, GenerationResult

PROVIDER = "precedent"
"""Our provider name; LangChain has no special handling for it."""

Span: TypeAlias = Any
"""An OpenTelemetry span."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered prompt, with the arguments of `Engine.submit` that come from it.

    Chats have a `syntax` (`AnswerSyntax`), which reads the answer, and `notes` on what the grammar does not enforce.
    """

    token_ids: Sequence[int]
    arguments: Mapping[str, Any]
    syntax: Any = None
    notes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Running:
    """A submitted request, and the span on which it is described."""

    engine: Engine
    generation: Generation
    prompt: Prompt
    model_name: str
    span: Span | None

    def result(self) -> GenerationResult:
        """Wait for the result, and describe it on the span."""
        result = self.generation.result()
        if self.span is not None:
            describe_result(self.span, self.model_name, result)
        return result


class AnswerChunks:
    """One request's answer as chunks; they merge into the same message however the tokens arrived.

    LangChain builds content blocks from chunks of one kind, so each chunk carries text, reasoning or a piece of one
    tool call; the last carries none of them. The first piece of a call has its name and id, the others its arguments.
    With `in_blocks` the content is numbered blocks in the order of the answer (output version v1), which LangChain
    itself would number only while streaming. With `whole` each call comes when it has ended, so that a call which
    `max_tokens` cut can be text.
    """

    def __init__(self, running: Running, *, in_blocks: bool, whole: bool) -> None:
        self._running, self._in_blocks = running, in_blocks
        self._pieces = AnswerPieces(running.prompt.syntax, whole=whole)
        self._arguments = ""
        self._block_number, self._open_block = -1, (None, None)

    def of(self, emission: Emission) -> Iterator[ChatGenerationChunk]:
        """The chunks that an emission completes; there may be none."""
        yield from map(self._chunk_of, self._pieces.push(emission.text))

    def last(self, result: GenerationResult) -> Iterator[ChatGenerationChunk]:
        """The rest that the parser held back, then one chunk with usage and statistics."""
        yield from map(self._chunk_of, self._pieces.finish(cut=result.finish_reason == "length"))
        speculation = {**result.stats.as_dict(), "tokens_per_step": round(result.stats.tokens_per_step, 3)}
        metadata: dict[str, Any] = {
            "model_name": self._running.model_name,
            "model_provider": PROVIDER,
            "finish_reason": result.finish_reason,
            "speculation": speculation,
            **self._running.prompt.notes,
        }
        if self._pieces.problems:
            metadata["tool_call_errors"] = list(self._pieces.problems)
        if result.logprobs:
            metadata["logprobs"] = openai_logprobs(result.logprobs, self._running.engine.tokenizer)
        usage = _usage(result, self._pieces.reasoning_ranges(result.token_ids))
        yield self._chunk(response_metadata=metadata, usage_metadata=usage, chunk_position="last")

    def _chunk_of(self, piece: Piece) -> ChatGenerationChunk:
        if isinstance(piece, TextPiece):
            return self._chunk(content=piece.text)
        if isinstance(piece, ReasoningPiece):
            return self._chunk(additional_kwargs={"reasoning_content": piece.text})
        if piece.call_id is not None:
            self._arguments = ""
            call = tool_call_chunk(name=piece.name, args="", id=piece.call_id, index=piece.index)
        else:
            self._arguments += piece.arguments
            call = tool_call_chunk(args=piece.arguments + self._seal(piece), index=piece.index)
        return self._chunk(tool_call_chunks=[call])

    def _chunk(self, *, content: str = "", **fields: Any) -> ChatGenerationChunk:
        message = AIMessageChunk(content=content, **fields)
        if self._in_blocks:
            blocks: list[Any] = [{**block, "index": self._index_of(block)} for block in message.content_blocks]
            metadata = {**message.response_metadata, "output_version": "v1"}
            message = message.model_copy(update={"content": blocks, "response_metadata": metadata})
        return ChatGenerationChunk(message=message)

    def _index_of(self, block: Mapping[str, Any]) -> int:
        kind: Any = block["type"], block.get("index")  # pieces of one kind or one call in a row are one block
        if kind != self._open_block:
            self._block_number, self._open_block = self._block_number + 1, kind
        return self._block_number

    def _seal(self, piece: CallPiece) -> str:
        """What marks a call that cannot be parsed, so that LangChain does not repair it into a valid one."""
        if not piece.broken or (piece.whole and not piece.arguments.lstrip().startswith(("{", "[", '"'))):
            return ""
        return seal_of(self._arguments, WHOLE if piece.whole else ARGUMENTS)


def _usage(result: GenerationResult, thinking: Sequence[range]) -> UsageMetadata:
    """Input and output tokens; the details count `reasoning`, and `accepted_prediction` outside of reasoning.

    The details are disjoint, because LangChain's tests require their sum to stay within the output. Accepted tokens are
    reported only if all of them are part of the answer.
    """
    written, accepted = len(result.token_ids), result.stats.num_accepted_tokens
    details: Any = {"reasoning": sum(map(len, thinking))} if thinking else {}
    if accepted <= written:
        lost = sum(result.sources[place] != TARGET for places in thinking for place in places)
        details["accepted_prediction"] = max(0, accepted - lost)
    usage = UsageMetadata(
        input_tokens=result.prompt_tokens,
        output_tokens=written,
        total_tokens=result.prompt_tokens + written,
        input_token_details=InputTokenDetails(cache_read=result.cached_prompt_tokens),
    )
    if details:
        usage["output_token_details"] = details
    return usage


def openai_logprobs(logprobs: Sequence[TokenLogprob], tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """`{"content": [{"token", "bytes", "logprob", "top_logprobs"}, …]}`, one per token, including the end."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        text = str(tokenizer.decode([token_id]))
        return {"token": text, "bytes": None if UNFINISHED in text else list(text.encode()), "logprob": logprob}

    content = [
        {**entry(one.token_id, one.logprob), "top_logprobs": [entry(*likely) for likely in one.top]} for one in logprobs
    ]
    return {"content": content}


# OpenTelemetry's conventions for generative AI


def current_span() -> Span | None:
    """The current span; None if none is recording."""
    trace: Any = sys.modules.get("opentelemetry.trace")
    span: Span = trace.get_current_span() if trace else None
    return span if span is not None and span.is_recording() else None


def describe_request(span: Span, operation: str, model_name: str, sampling: SamplingParams) -> None:
    """Set the request's attributes on the span; `operation` is "chat" or "text_completion"."""
    told = {name: getattr(sampling, name) for name in SAMPLING if name not in ("logit_bias", "stop_token_ids")}
    attributes = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": model_name,
        **{f"gen_ai.request.{name}": value for name, value in told.items() if value is not None},
        "gen_ai.request.stop_sequences": list(sampling.stop),
    }
    span.set_attributes(attributes)


def describe_result(span: Span, model_name: str, result: GenerationResult) -> None:
    """Set the usage and speculation attributes of a finished call on the span."""
    of_speculation = ("mode", "num_steps", "num_drafts", "num_draft_tokens", "num_accepted_tokens")
    attributes = {
        "gen_ai.response.model": model_name,
        "gen_ai.response.finish_reasons": [result.finish_reason],
        "gen_ai.usage.input_tokens": result.prompt_tokens,
        "gen_ai.usage.output_tokens": len(result.token_ids),
        "gen_ai.usage.cache_read.input_tokens": result.cached_prompt_tokens,
        **{f"precedent.speculation.{name}": getattr(result.stats, name) for name in of_speculation},
    }
    span.set_attributes(attributes)
