"""Reads recorded agent runs, one line at a time: OpenAI-format chat traces and LangSmith exports (JSONL, also .gz).

A chat trace is `{"messages": [...], "tools": [...]}`, with `task_id`, `group` and `order` where there are any. A
LangSmith run is `{"inputs": {"messages": ...}, "outputs": ...}`: a trajectory whose last message is the only answer.
"""

from __future__ import annotations

import gzip
import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from precedent.errors import PromptError

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One recorded run. `group` holds together what must not be told apart (a customer), else it is the task."""

    number: int
    task: str
    group: str
    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...]
    only_last: bool = False


def read_trajectories(paths: Sequence[Path]) -> Iterator[Trajectory]:
    """The runs of all files, in the order of their `order` fields within each file.

    Raises PromptError naming the file and line that is neither a chat trace nor a LangSmith run.
    """
    number = 0
    for path in paths:
        for record in _in_order(path):
            yield _trajectory(number, record)
            number += 1


def _in_order(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a file in time order; one that is not sorted is sorted on disk."""
    orders = [record.get("order", position) for position, record in enumerate(_records(path))]
    if orders == sorted(orders):
        yield from _records(path)
        return
    with tempfile.TemporaryFile("w+", encoding="utf-8") as spool:
        places = []
        for record in _records(path):
            places.append(spool.tell())
            spool.write(json.dumps(record) + "\n")
        for _, place in sorted(zip(orders, places, strict=True)):
            spool.seek(place)
            yield json.loads(spool.readline())


def _records(path: Path) -> Iterator[dict[str, Any]]:
    with _opened(path) as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield _record(path, number, line)


@contextmanager
def _opened(path: Path) -> Iterator[IO[str]]:
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8") as lines:
            yield lines
    except (OSError, UnicodeDecodeError, EOFError) as error:
        raise PromptError(f"cannot read {path}: {error}") from error


def _record(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise PromptError(f"{path} line {number} is not JSON: {error}") from error
    if isinstance(record, dict) and isinstance(record.get("messages"), list):
        return record
    if isinstance(record, dict) and isinstance(record.get("inputs"), dict):
        return _from_langsmith(path, number, record)
    raise PromptError(f"{path} line {number} is no chat trace: it has no list `messages` and no `inputs`")


def _from_langsmith(path: Path, number: int, record: dict[str, Any]) -> dict[str, Any]:
    """A chat-model run as a trace whose last message is the answer."""
    messages = record["inputs"].get("messages") or []
    if messages and isinstance(messages[0], list):  # LangChain logs a batch of conversations
        messages = messages[0]
    answer = _langsmith_answer(record.get("outputs") or {})
    if not messages or answer is None:
        raise PromptError(f"{path} line {number} is a LangSmith run without messages or without an answer")
    tools = ((record.get("extra") or {}).get("invocation_params") or {}).get("tools") or []
    return {
        "messages": [_plain_message(message) for message in (*messages, answer)],
        "tools": tools,
        "task_id": record.get("session_id") or record.get("trace_id") or record.get("id") or number,
        "only_last": True,
    }


def _langsmith_answer(outputs: dict[str, Any]) -> Message | None:
    generations = outputs.get("generations")
    while isinstance(generations, list) and generations:
        generations = generations[0]
    if isinstance(generations, dict):
        found: Message | None = generations.get("message")
        return found
    for key in ("message", "output"):
        if isinstance(outputs.get(key), dict):
            return dict(outputs[key])
    listed = outputs.get("messages")
    return dict(listed[-1]) if isinstance(listed, list) and listed else None


_ROLES = {"human": "user", "ai": "assistant", "system": "system", "tool": "tool", "function": "tool"}


def _plain_message(message: Message) -> Message:
    """A serialised LangChain message, or an OpenAI one, in OpenAI's form."""
    fields = message.get("kwargs") or message.get("data") or message
    kind = str(fields.get("role") or fields.get("type") or str((message.get("id") or [""])[-1]))
    kind = kind.lower().removesuffix("chunk").removesuffix("message")
    calls = [
        {"function": {"name": call["name"], "arguments": json.dumps(call.get("args", {}))}} if "name" in call else call
        for call in fields.get("tool_calls") or ()
    ]
    return {"role": _ROLES.get(kind, kind), "content": fields.get("content") or "", "tool_calls": calls}


def _trajectory(number: int, record: dict[str, Any]) -> Trajectory:
    task = str(record.get("task_id", number))
    return Trajectory(
        number,
        task,
        str(record.get("group") or task),
        tuple(record["messages"]),
        tuple(record.get("tools") or ()),
        bool(record.get("only_last")),
    )
