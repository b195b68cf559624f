"""Hears what the model says while it writes: a tool call whose arguments are complete can start at once."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessageChunk

from precedent_run_ahead.actions.calls import Call
from precedent_run_ahead.actions.live import read

STREAM = "stream"


class Hearing(BaseCallbackHandler):
    """Calls `complete` with each tool call of the answer as soon as its arguments are a whole JSON object.

    Hears the agent's model alone: a model that starts while it is asked is one that it asks itself. A model that
    streams to somebody else is heard as well; `Listening` makes it stream.
    """

    run_inline = True

    def __init__(self, complete: Callable[[Call], None]) -> None:
        self._complete = complete
        self._heard: UUID | None = None
        self._names: dict[tuple[UUID, Any], str] = {}
        self._written: dict[tuple[UUID, Any], str] = {}
        self._told: set[tuple[UUID, Any]] = set()

    def on_chat_model_start(self, serialized: Any, messages: Any, *, run_id: UUID, **kwargs: Any) -> None:
        """Begin to hear the model, unless another is being heard."""
        self._heard = self._heard or run_id

    def on_llm_end(self, response: Any, *, run_id: UUID, **kwargs: Any) -> None:
        """Stop hearing the model."""
        self._heard = None if self._heard == run_id else self._heard

    def on_llm_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        """Stop hearing a model that failed: it may be asked again, or another in its place."""
        self._heard = None if self._heard == run_id else self._heard

    def on_llm_new_token(self, token: Any, *, chunk: Any = None, run_id: UUID, **kwargs: Any) -> None:
        """Add what the chunk says of the answer's calls."""
        message = getattr(chunk, "message", None) if run_id == self._heard else None
        for piece in message.tool_call_chunks if isinstance(message, AIMessageChunk) else ():
            place = run_id, piece.get("index")
            self._names[place] = self._names.get(place, "") + (piece.get("name") or "")
            self._written[place] = self._written.get(place, "") + (piece.get("args") or "")
            self._tell(place)

    def _tell(self, place: tuple[UUID, Any]) -> None:
        arguments = read(self._written[place])
        if place[1] is None or place in self._told or not self._names[place] or not isinstance(arguments, dict):
            return
        self._told.add(place)
        self._complete(Call(self._names[place], arguments))


class Listening(Hearing):
    """A `Hearing` for which LangChain streams the model's answer, as it does for `astream_events`."""

    def tap_output_aiter(self, run_id: UUID, output: AsyncIterator[Any]) -> AsyncIterator[Any]:
        """Part of what LangChain knows such handlers by; the output passes."""
        return output

    def tap_output_iter(self, run_id: UUID, output: Iterator[Any]) -> Iterator[Any]:
        """The same for a synchronous stream."""
        return output
