"""Reads chat traces in OpenAI format (JSON lines, optionally .gz), one line at a time."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from precedent.errors import PromptError

LONGEST_SYSTEM_TEXT = 600
"""Characters kept of a system message: policies of real traces are longer than a small model's patience."""


@dataclass(frozen=True, slots=True)
class TracePrompt:
    """The messages before one recorded assistant turn; `task` groups trials of the same task."""

    task: str
    trajectory: int
    messages: tuple[dict[str, Any], ...]


def read_trajectories(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a file. Raises PromptError naming the line that is not a chat trace."""
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _record(path, number, line)
    except (OSError, UnicodeDecodeError, EOFError) as error:
        raise PromptError(f"cannot read {path}: {error}") from error


def _record(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise PromptError(f"{path} line {number} is not JSON: {error}") from error
    if not isinstance(record, dict) or not isinstance(record.get("messages"), list):
        raise PromptError(f"{path} line {number} is no chat trace: it has no list `messages`")
    return record


def read_prompts(path: Path, *, most_trajectories: int) -> list[TracePrompt]:
    """The prompts of all assistant turns of the first trajectories; long system messages are cut."""
    prompts = []
    for trajectory, record in zip(range(most_trajectories), read_trajectories(path), strict=False):
        messages = [_plain(message) for message in record["messages"]]
        task = str(record.get("task_id", trajectory))
        for turn, message in enumerate(messages):
            if message["role"] == "assistant" and turn > 0:
                prompts.append(TracePrompt(task, trajectory, tuple(messages[:turn])))
    return prompts


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    """A message as chat templates take it: text content, tool calls in it as text."""
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
