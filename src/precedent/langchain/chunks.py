"""Emissions of the engine as LangChain chunks: text, tool calls once they are complete, and the figures on the last."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from langchain_core.messages import AIMessageChunk
from langchain_core.messages.ai import InputTokenDetails, OutputTokenDetails, UsageMetadata
from langchain_core.messages.tool import tool_call_chunk
from langchain_core.outputs import ChatGenerationChunk

from precedent.text.tool_calls import Event, InvalidCall, ParsedCall, Text, ToolCallParser

if TYPE_CHECKING:
    from precedent.engine import Emission, GenerationResult

FIRST_INDEX_OF_V1 = 1_000_000
"""LangChain merges blocks of equal index, and for output_version "v1" it numbers text blocks from 0 by itself."""


class AnswerChunks:
    """One request's answer as chunks.

    A chunk carries text or one tool call, never both, and the last one neither: LangChain's content blocks are built
    from chunks of one kind. `parse_tools` is False where no tool is bound; the answer is text then, whatever it holds. `notes` are added to the
    response metadata.
    """

    def __init__(
        self,
        prompt_ids: Sequence[int],
        model_name: str,
        *,
        parse_tools: bool,
        output_version: str | None = None,
        notes: Mapping[str, Any] | None = None,
    ) -> None:
        self._notes = dict(notes or {})
        self._parser = ToolCallParser() if parse_tools else None
        self._prompt_key = hashlib.sha256(json.dumps(list(prompt_ids)).encode()).hexdigest()
        self._model_name = model_name
        self._num_calls = 0
        self._first_index = FIRST_INDEX_OF_V1 if output_version == "v1" else 0
        self._problems: list[str] = []

    def of(self, emission: Emission) -> Iterator[ChatGenerationChunk]:
        """The chunks that an emission completes, often one, sometimes none."""
        if not emission.text:
            return
        events = self._parser.push(emission.text) if self._parser else [Text(emission.text)]
        yield from map(self._chunk, events)

    def last(self, result: GenerationResult) -> Iterator[ChatGenerationChunk]:
        """What the parser held back, then the one chunk with usage and figures."""
        yield from map(self._chunk, self._parser.finish() if self._parser else [])
        message = AIMessageChunk(
            content="",
            usage_metadata=_usage(result),
            response_metadata=self._response_metadata(result),
            chunk_position="last",
        )
        yield ChatGenerationChunk(message=message)

    def _chunk(self, event: Event) -> ChatGenerationChunk:
        if isinstance(event, Text):
            return ChatGenerationChunk(message=AIMessageChunk(content=event.text))
        return ChatGenerationChunk(message=self._call_chunk(event))

    def _call_chunk(self, call: ParsedCall | InvalidCall) -> AIMessageChunk:
        """A whole call. LangChain repairs JSON that was cut off into a valid call; the opening tag prevents that."""
        if isinstance(call, ParsedCall):
            arguments = json.dumps(call.arguments, ensure_ascii=False)
        else:
            arguments = call.raw
            self._problems.append(call.error)
        index, self._num_calls = self._num_calls, self._num_calls + 1
        call_id = self._call_id(index, f"{call.name}{arguments}")
        chunk = tool_call_chunk(name=call.name, args=arguments, id=call_id, index=self._first_index + index)
        return AIMessageChunk(content="", tool_call_chunks=[chunk])

    def _call_id(self, index: int, content: str) -> str:
        """The same call at the same place gets the same id, so that exact caches and replays recognise it."""
        return f"call_{hashlib.sha256(f'{self._prompt_key}/{index}/{content}'.encode()).hexdigest()[:24]}"

    def _response_metadata(self, result: GenerationResult) -> dict[str, Any]:
        metadata: dict[str, Any] = {
            "model_name": self._model_name,
            "finish_reason": result.finish_reason,
            "speculation": {
                **result.stats.as_dict(),
                "tokens_per_step": round(result.stats.tokens_per_step, 3),
            },
            **self._notes,
        }
        if self._problems:
            metadata["tool_call_errors"] = list(self._problems)
        return metadata


def _usage(result: GenerationResult) -> UsageMetadata:
    """Tokens read and written; `accepted_prediction` only where all accepted tokens made it into the answer."""
    written, accepted = len(result.token_ids), result.stats.num_accepted_tokens
    usage = UsageMetadata(
        input_tokens=result.prompt_tokens,
        output_tokens=written,
        total_tokens=result.prompt_tokens + written,
        input_token_details=InputTokenDetails(cache_read=result.cached_prompt_tokens),
    )
    if accepted <= written:
        usage["output_token_details"] = cast("OutputTokenDetails", {"accepted_prediction": accepted})
    return usage
