"""Turns the engine's emissions into LangChain chunks: text, reasoning, pieces of tool calls, and finally statistics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from langchain_core.messages import AIMessageChunk
from langchain_core.messages.ai import InputTokenDetails, OutputTokenDetails, UsageMetadata
from langchain_core.messages.tool import tool_call_chunk
from langchain_core.outputs import ChatGenerationChunk

from precedent.decoding.stats import TARGET
from precedent.langchain.telemetry import PROVIDER, Span, describe_result
from precedent.sampling.logprobs import TokenLogprob
from precedent.text.answers import AnswerPieces, CallPiece, Piece
from precedent.text.assembly import UNFINISHED
from precedent.text.tool_formats import ReasoningPiece, TextPiece
from precedent.text.tool_formats.json_text import ARGUMENTS, WHOLE, seal_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from precedent.engine.engine import Emission, GenerationResult
    from precedent.text.answers import AnswerSyntax


class AnswerChunks:
    """One request's answer as chunks; they merge into the same message however the tokens arrived.

    LangChain builds content blocks from chunks of one kind, so each chunk carries text, reasoning or a piece of one
    tool call; the last carries none of them. The first piece of a call has its name and id, the others its arguments.
    With `in_blocks` the content is numbered blocks in the order of the answer (output version v1), which LangChain
    itself would number only while streaming. `notes` are added to the response metadata. With `whole` each call comes
    when it has ended, so that a call which `max_tokens` cut can be text. The result is described on `span`.
    """

    def __init__(
        self,
        syntax: AnswerSyntax,
        model_name: str,
        tokenizer: PreTrainedTokenizerBase,
        *,
        in_blocks: bool = False,
        notes: Mapping[str, Any] | None = None,
        whole: bool = False,
        span: Span | None = None,
    ) -> None:
        self._pieces, self._model_name, self._tokenizer = AnswerPieces(syntax, whole=whole), model_name, tokenizer
        self._in_blocks, self._notes, self._span = in_blocks, dict(notes or {}), span
        self._arguments = ""
        self._block_number, self._open_block = -1, (None, None)

    def of(self, emission: Emission) -> Iterator[ChatGenerationChunk]:
        """The chunks that an emission completes; there may be none."""
        yield from self._chunks(self._pieces.push(emission.text))

    def last(self, result: GenerationResult) -> Iterator[ChatGenerationChunk]:
        """The rest that the parser held back, then one chunk with usage and statistics."""
        yield from self._chunks(self._pieces.finish(cut=result.finish_reason == "length"))
        if self._span is not None:
            describe_result(self._span, self._model_name, result)
        message = AIMessageChunk(
            content="",
            usage_metadata=_usage(result, self._pieces.reasoning_ranges(result.token_ids)),
            response_metadata=self._response_metadata(result),
            chunk_position="last",
        )
        yield self._chunk(message)

    def _chunks(self, pieces: Iterable[Piece]) -> Iterator[ChatGenerationChunk]:
        for piece in pieces:
            yield self._chunk(self._message(piece))

    def _chunk(self, message: AIMessageChunk) -> ChatGenerationChunk:
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

    def _message(self, piece: Piece) -> AIMessageChunk:
        if isinstance(piece, TextPiece):
            return AIMessageChunk(content=piece.text)
        if isinstance(piece, ReasoningPiece):
            return AIMessageChunk(content="", additional_kwargs={"reasoning_content": piece.text})
        if piece.call_id is not None:
            self._arguments = ""
            chunk = tool_call_chunk(name=piece.name, args="", id=piece.call_id, index=piece.index)
        else:
            self._arguments += piece.arguments
            chunk = tool_call_chunk(args=piece.arguments + self._seal(piece), index=piece.index)
        return AIMessageChunk(content="", tool_call_chunks=[chunk])

    def _seal(self, piece: CallPiece) -> str:
        """What marks a call that cannot be parsed, so that LangChain does not repair it into a valid one."""
        if not piece.broken or (piece.whole and not piece.arguments.lstrip().startswith(("{", "[", '"'))):
            return ""
        return seal_of(self._arguments, WHOLE if piece.whole else ARGUMENTS)

    def _response_metadata(self, result: GenerationResult) -> dict[str, Any]:
        speculation = {**result.stats.as_dict(), "tokens_per_step": round(result.stats.tokens_per_step, 3)}
        metadata: dict[str, Any] = {
            "model_name": self._model_name,
            "model_provider": PROVIDER,
            "finish_reason": result.finish_reason,
            "speculation": speculation,
            **self._notes,
        }
        if self._pieces.problems:
            metadata["tool_call_errors"] = list(self._pieces.problems)
        if result.logprobs:
            metadata["logprobs"] = openai_logprobs(result.logprobs, self._tokenizer)
        return metadata


def _usage(result: GenerationResult, thinking: Sequence[range]) -> UsageMetadata:
    """Input and output tokens; the details count `reasoning`, and `accepted_prediction` outside of reasoning.

    The details are disjoint, because LangChain's tests require their sum to stay within the output. Accepted tokens are
    reported only if all of them are part of the answer.
    """
    written, accepted = len(result.token_ids), result.stats.num_accepted_tokens
    details: dict[str, int] = {}
    if thinking:
        details["reasoning"] = sum(map(len, thinking))
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
        usage["output_token_details"] = cast("OutputTokenDetails", details)
    return usage


def openai_logprobs(logprobs: Sequence[TokenLogprob], tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """`{"content": [{"token", "bytes", "logprob", "top_logprobs"}, …]}`, one per token, including the end."""
    content = [
        {
            **_entry(tokenizer, one.token_id, one.logprob),
            "top_logprobs": [_entry(tokenizer, *likely) for likely in one.top],
        }
        for one in logprobs
    ]
    return {"content": content}


def _entry(tokenizer: PreTrainedTokenizerBase, token_id: int, logprob: float) -> dict[str, Any]:
    text = str(tokenizer.decode([token_id]))
    return {"token": text, "bytes": None if UNFINISHED in text else list(text.encode()), "logprob": logprob}
