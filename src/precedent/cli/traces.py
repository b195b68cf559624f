"""Reads chat traces in OpenAI format (JSON Lines, optionally .gz) line by line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from precedent.text.traces import records

LONGEST_SYSTEM_TEXT = 600
"""Characters kept of a system message: real policies are too long for a small model."""


@dataclass(frozen=True, slots=True)
class TracePrompt:
    """The messages before one recorded assistant turn; `task` is shared by all trajectories of one task."""

    task: str
    trajectory: int
    messages: tuple[dict[str, Any], ...]

    @property
    def turn(self) -> int:
        """Number of messages before this turn in its trajectory."""
        return len(self.messages)


def read_prompts(path: Path, *, most_trajectories: int) -> list[TracePrompt]:
    """The prompts of all assistant turns in the first trajectories, with long system messages cut."""
    prompts = []
    for trajectory, (task, messages) in enumerate(read_conversations(path, most_trajectories=most_trajectories)):
        for turn, message in enumerate(messages):
            if message["role"] == "assistant" and turn > 0:
                prompts.append(TracePrompt(task, trajectory, tuple(messages[:turn])))
    return prompts


def read_conversations(path: Path, *, most_trajectories: int) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Task and messages of the first trajectories, ready for chat templates, with long system messages cut."""
    for trajectory, record in zip(range(most_trajectories), records(path), strict=False):
        yield str(record.get("task_id", trajectory)), [_plain(message) for message in record["messages"]]


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    """A message that any chat template accepts: plain text content, with tool calls written into it."""
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = "".join(part.get("text", "") for part in content if isinstance(part, dict))
    if message["role"] == "system":
        content = content[:LONGEST_SYSTEM_TEXT]
    content += "".join(f"\n<tool_call>\n{_call_text(call)}\n</tool_call>" for call in message.get("tool_calls") or ())
    role = message["role"] if message["role"] in ("system", "user", "assistant") else "user"
    return {"role": role, "content": content}


def _call_text(call: dict[str, Any]) -> str:
    function = call.get("function", call)
    return json.dumps({"name": function.get("name"), "arguments": function.get("arguments")})
