"""Agents on a chat model that answers from a function of everything it is asked, and tools that say what they did."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.tools import BaseTool, StructuredTool

Answer = Callable[[Sequence[BaseMessage]], AIMessage]


class ScriptedChat(BaseChatModel):
    """Answers by `answer(messages)`; a stream comes in pieces, each tool call in two, and `between` runs after each."""

    answer: Answer
    between: Callable[[], None] = lambda: None

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
        """The same model: the script knows the tools."""
        return self

    def _generate(
        self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **kw: Any
    ) -> ChatResult:
        return ChatResult(generations=[ChatGeneration(message=self.answer(messages).model_copy(deep=True))])

    def _stream(
        self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **kw: Any
    ) -> Iterator[ChatGenerationChunk]:
        for chunk in _chunks(self.answer(messages)):
            found = ChatGenerationChunk(message=chunk)
            if run_manager:
                run_manager.on_llm_new_token(str(chunk.content), chunk=found)
            yield found
            self.between()


def _chunks(message: AIMessage) -> Iterator[AIMessageChunk]:
    yield AIMessageChunk(content=message.content, id=message.id)
    for index, call in enumerate(message.tool_calls):
        text = json.dumps(call["args"])
        head = {"name": call["name"], "args": text[:2], "id": call["id"], "index": index, "type": "tool_call_chunk"}
        tail = {"name": None, "args": text[2:], "id": None, "index": index, "type": "tool_call_chunk"}
        for piece in (head, tail):
            yield AIMessageChunk(content="", tool_call_chunks=[piece])
    yield AIMessageChunk(content="", chunk_position="last")


def call(name: str, number: int = 1, /, **arguments: Any) -> dict[str, Any]:
    """A tool call whose id follows from its name, number and arguments."""
    text = json.dumps(arguments, sort_keys=True)
    return {"name": name, "args": arguments, "id": f"{name}-{number}-{text}", "type": "tool_call"}


def script(*turns: AIMessage | Callable[[Sequence[BaseMessage]], AIMessage]) -> Answer:
    """The turns in order: which one is next follows from how many answers the prompt holds since its last question."""

    def answer(messages: Sequence[BaseMessage]) -> AIMessage:
        given = sum(isinstance(message, AIMessage) for message in messages)
        turn = turns[min(given, len(turns) - 1)]
        return turn(messages) if callable(turn) else turn

    return answer


def calls(*made: dict[str, Any]) -> AIMessage:
    """An answer of tool calls."""
    return AIMessage("", tool_calls=list(made))


def last_result(messages: Sequence[BaseMessage]) -> str:
    """The latest tool's answer."""
    return next(str(message.content) for message in reversed(messages) if isinstance(message, ToolMessage))


class Desk:
    """A world that tools read and change: each reading says which version it saw."""

    def __init__(self) -> None:
        self.version = 0
        self.read: list[tuple[str, Any]] = []
        self.lock = threading.Lock()

    def look_up(self, order: str) -> str:
        """Look up an order."""
        with self.lock:
            self.read.append(("look_up", order))
            return json.dumps({"order": order, "version": self.version, "customer": f"C{order[1:]}"})

    def customer(self, customer: str) -> str:
        """Look up a customer."""
        with self.lock:
            self.read.append(("customer", customer))
            return json.dumps({"customer": customer, "version": self.version})

    def change(self, order: str) -> str:
        """Change an order."""
        with self.lock:
            self.version += 1
            return f"changed {order}"

    def tools(self) -> dict[str, BaseTool]:
        """The three tools by name."""
        made = (StructuredTool.from_function(one) for one in (self.look_up, self.customer, self.change))
        return {tool.name: tool for tool in made}


def transcript(messages: Sequence[BaseMessage]) -> list[Any]:
    """What a conversation says, without the ids that LangGraph draws for each message."""
    return [message.model_dump(exclude={"id"}) for message in messages]
