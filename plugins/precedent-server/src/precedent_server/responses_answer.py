"""Writes an answer as OpenAI's Response: its items, and the events of its stream."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from openai.types.responses import Response

from precedent.engine.generation import Emission
from precedent.sampling.logprobs import TokenLogprob
from precedent.text.answers import CallPiece, Piece
from precedent.text.tool_formats import ReasoningPiece
from precedent_server.answers import Answer
from precedent_server.errors import ApiError
from precedent_server.usage import speculation_of, usage_of


class ResponseWriter:
    """One response as it is written; `events` of a stream, or `whole` at the end."""

    def __init__(self, answer: Answer, body: Mapping[str, Any]) -> None:
        self._answer, self._body = answer, body
        self._id, self._created = f"resp_{secrets.token_hex(16)}", int(time.time())
        self._items: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._in_whole_call = False
        self._number = -1
        self._untold: list[TokenLogprob] = []

    def whole(self) -> dict[str, Any]:
        """The response of an answer that was read to its end."""
        answer = self._answer
        if answer.reasoning:
            self._begin_item("reasoning")["content"] = [{"type": "reasoning_text", "text": answer.reasoning}]
        if answer.text or not answer.calls:
            self._begin_item("message")["content"] = [self._text_part(answer.text, answer.result.logprobs)]
        for call in answer.calls:
            self._begin_item("function_call").update(call_id=call["id"], **call["function"])
        for item in self._items:
            item["status"] = "completed"
        if self._items[-1]["type"] != "function_call":  # calls of a whole answer are complete
            self._items[-1]["status"] = self._status
        return self._response(self._status)

    # The stream

    def first(self) -> str:
        """The events that begin a stream."""
        begun = self._response("in_progress")
        return self._event("response.created", response=begun) + self._event("response.in_progress", response=begun)

    def of(self, emission: Emission, pieces: list[Piece]) -> str:
        """The events of one step."""
        self._untold += emission.logprobs
        return "".join(event for piece in pieces for event in self._piece(piece))

    def last(self) -> str:
        """The events that end a stream."""
        if not self._items:
            closing = "".join(self._begin("message")) + "".join(self._close(self._status))
        else:
            closing = "".join(self._close("completed" if self._in_whole_call else self._status))
        ended = "response.completed" if self._status == "completed" else "response.incomplete"
        return closing + self._event(ended, response=self._response(self._status))

    def failed(self, error: ApiError) -> str:
        """The event that ends a stream which failed."""
        told = error.body()["error"]
        return self._event("error", **{name: told[name] for name in ("code", "message", "param")})

    def _piece(self, piece: Piece) -> Iterator[str]:
        if isinstance(piece, CallPiece):
            yield from self._call(piece)
            return
        kind = "reasoning" if isinstance(piece, ReasoningPiece) else "message"
        if self._open is None or self._open["type"] != kind:
            yield from self._close()
            yield from self._begin(kind)
            self._in_whole_call = False
        assert self._open is not None
        self._open["content"][0]["text"] += piece.text
        if kind == "reasoning":
            yield self._in_item("response.reasoning_text.delta", content_index=0, delta=piece.text)
        else:
            told = self._logprobs(self._untold)
            self._untold.clear()
            self._open["content"][0]["logprobs"] += told
            yield self._in_item("response.output_text.delta", content_index=0, delta=piece.text, logprobs=told)

    def _call(self, piece: CallPiece) -> Iterator[str]:
        if piece.call_id is not None:
            yield from self._close()
            self._open, self._in_whole_call = self._begin_item("function_call"), True
            self._open.update(call_id=piece.call_id, name=piece.name, arguments="")
            yield self._event("response.output_item.added", output_index=len(self._items) - 1, item=self._open)
            return
        assert self._open is not None
        if piece.cut:
            self._in_whole_call = False
            return
        self._open["arguments"] += piece.arguments
        yield self._in_item("response.function_call_arguments.delta", delta=piece.arguments)

    def _begin(self, kind: str) -> Iterator[str]:
        """Begin an item of text."""
        self._open = self._begin_item(kind)
        yield self._event("response.output_item.added", output_index=len(self._items) - 1, item=self._open)
        part = self._text_part("") if kind == "message" else {"type": "reasoning_text", "text": ""}
        self._open["content"] = [part]
        if kind == "message":
            yield self._in_item("response.content_part.added", content_index=0, part=part)

    def _close(self, status: str = "completed") -> Iterator[str]:
        """End the item that is open."""
        if self._open is None:
            return
        item = self._open
        item["status"] = status
        if item["type"] == "function_call":
            arguments, name = item["arguments"], item["name"]
            yield self._in_item("response.function_call_arguments.done", arguments=arguments, name=name)
        elif item["type"] == "message":
            part = item["content"][0]
            told = {"text": part["text"], "logprobs": part["logprobs"]}
            yield self._in_item("response.output_text.done", content_index=0, **told)
            yield self._in_item("response.content_part.done", content_index=0, part=part)
        else:
            text = item["content"][0]["text"]
            yield self._in_item("response.reasoning_text.done", content_index=0, text=text)
        yield self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)
        self._open = None

    # The parts

    def _begin_item(self, kind: str) -> dict[str, Any]:
        prefix = {"message": "msg", "function_call": "fc", "reasoning": "rs"}[kind]
        item: dict[str, Any] = {"id": f"{prefix}_{secrets.token_hex(16)}", "type": kind, "status": "in_progress"}
        if kind == "message":
            item |= {"role": "assistant", "content": []}
        elif kind == "reasoning":
            item |= {"summary": [], "content": []}
        self._items.append(item)
        return item

    def _text_part(self, text: str, logprobs: Any = ()) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self._logprobs(logprobs)}

    def _logprobs(self, told: Sequence[TokenLogprob]) -> list[Any]:
        found = self._answer.logprobs(told)
        return [] if found is None else list(found["content"])

    @property
    def _status(self) -> str:
        return "incomplete" if self._answer.finish_reason == "length" else "completed"

    def _response(self, status: str) -> dict[str, Any]:
        body = self._body
        told: dict[str, Any] = {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "model": body["model"],
            "output": self._items,
            "parallel_tool_calls": body.get("parallel_tool_calls", True),
            "tool_choice": body.get("tool_choice", "auto"),
            "tools": body.get("tools", []),
            "instructions": body.get("instructions"),
            "max_output_tokens": body.get("max_output_tokens"),
            "temperature": body.get("temperature", 1.0),
            "top_p": body.get("top_p", 1.0),
            "text": body.get("text", {"format": {"type": "text"}}),
            "metadata": body.get("metadata") or {},
            "store": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "usage": None if status == "in_progress" else self._usage(),
        }
        if status != "in_progress":
            told["speculation"] = speculation_of([self._answer.result])
        return Response.construct(**told).model_dump(mode="json", exclude_unset=True, warnings=False)

    def _usage(self) -> dict[str, Any]:
        found = usage_of([self._answer.result])
        cached = self._answer.result.cached_prompt_tokens
        return {
            "input_tokens": found.prompt_tokens,
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": found.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self._answer.num_reasoning_tokens},
            "total_tokens": found.total_tokens,
        }

    def _in_item(self, kind: str, **told: Any) -> str:
        return self._event(kind, item_id=self._items[-1]["id"], output_index=len(self._items) - 1, **told)

    def _event(self, kind: str, **told: Any) -> str:
        self._number += 1
        data = {"type": kind, "sequence_number": self._number, **told}
        return f"event: {kind}\ndata: {json.dumps(data, ensure_ascii=False)}\n\n"
