"""Chat models for the order desk that answer without a language model: as the expert does, or always the same."""

from __future__ import annotations

import json
import random
import re
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.runnables import RunnableBinding
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import Field

from precedent_demo import SYSTEM_PROMPT, OrderDesk, Request
from precedent_demo.logs import expert_messages

HERMES_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


class ScriptedModel(BaseChatModel):
    """Answers by `behaviour(messages)`; calls in Hermes format become tool calls, as in a real chat model."""

    behaviour: Any
    seen: list[list[str]] = Field(default_factory=list)

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def bind_tools(self, tools: Any, **options: Any) -> RunnableBinding[Any, AIMessage]:
        return RunnableBinding(bound=self, kwargs={"tools": [convert_to_openai_tool(tool) for tool in tools]})

    def _generate(self, messages: list[BaseMessage], *args: Any, **options: Any) -> ChatResult:
        self.seen.append([message.text for message in messages])
        text = self.behaviour(messages)
        calls = [json.loads(body) for body in HERMES_CALL.findall(text)]
        made = [{"name": c["name"], "args": c["arguments"], "id": f"{len(messages)}-{i}"} for i, c in enumerate(calls)]
        usage = {"input_tokens": 1, "output_tokens": len(text), "total_tokens": 1 + len(text)}
        message = AIMessage(HERMES_CALL.sub("", text).strip(), tool_calls=made, usage_metadata=usage)
        return ChatResult(generations=[ChatGeneration(message=message)])


ROLES = {"human": "user", "ai": "assistant", "tool": "tool"}


def expert_model(request: Request, desk: OrderDesk) -> ScriptedModel:
    """A chat model that says what the expert says behind these very messages, and nothing behind any others."""
    turns = expert_messages(request, desk, random.Random(0))

    def behaviour(messages: list[BaseMessage]) -> str:
        system, *heard = messages
        assert system.text == SYSTEM_PROMPT
        assert [(ROLES[m.type], m.text) for m in heard] == [(m["role"], m["content"]) for m in turns[: len(heard)]]
        turn = turns[len(heard)]
        assert turn["role"] == "assistant"
        calls = [json.dumps(call["function"]) for call in turn.get("tool_calls", [])]
        return str(turn["content"]) + "".join(f"<tool_call>{call}</tool_call>" for call in calls)

    return ScriptedModel(behaviour=behaviour)


def saying(text: str) -> ScriptedModel:
    return ScriptedModel(behaviour=lambda messages: text)
