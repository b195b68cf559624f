"""Reads recorded agent runs, one line at a time: OpenAI-format chat traces and LangSmith exports (JSONL, also .gz).

A chat trace `{"messages": [...], "tools": [...]}`, optionally with `task_id`, `group` and `order`, is a whole run. With
a `response` beside the messages it is one call and its answer; `PrecedentRecorder` writes such lines. The response may
also be a chat completion object, and the messages may be inside a `request`. A LangSmith run
`{"inputs": {"messages": ...}, "outputs": ...}` is one call as well. Calls of one `conversation_id` belong together.
"""

from __future__ import annotations

import gzip
import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from precedent.errors import PromptError
from precedent.text.tool_formats.json_text import is_json

Message = dict[str, Any]

Skip = Callable[[PromptError], None]
"""Called with the reason why a line cannot be used; without such a callback the line raises."""

TORN_MARK = " #torn"
"""Appended to a line that a crash cut off, when another writer continues the file."""


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One recorded run, or one call of it. `group` names what must be held out together (a customer, for example).

    The calls of one conversation share a number and follow one another. With `only_last` (a single call), only the last
    message is an answer. `source` names the file and the line.
    """

    number: int
    task: str
    group: str
    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...]
    only_last: bool = False
    source: str = ""


def read_trajectories(paths: Sequence[Path], skip: Skip | None = None) -> Iterator[Trajectory]:
    """Read the runs of all files, within each file in the order of their `order` fields.

    A line that is neither a chat trace nor a LangSmith run is reported to `skip`; without `skip` it raises PromptError.
    """
    number = -1
    for path in paths:
        before = None
        for record in _in_order(path, skip):
            conversation = record.get("conversation_id")
            number += conversation is None or conversation != before
            before = conversation
            yield _trajectory(number, record)


def _in_order(path: Path, skip: Skip | None) -> Iterator[dict[str, Any]]:
    """The records of a file in time order, each conversation in one piece; an unsorted file is read as a whole."""
    began: dict[str, Any] = {}  # when each conversation began
    keys = []
    for place, record in enumerate(_records(path, skip)):
        order, conversation = record.get("order", place), record.get("conversation_id")
        keys.append((order if conversation is None else began.setdefault(conversation, order), place))
    again = _records(path, None if skip is None else lambda reason: None)  # what is skipped was reported above
    if keys == sorted(keys):
        yield from again
    else:
        yield from (record for _, record in sorted(zip(keys, again, strict=True), key=lambda pair: pair[0]))


def _records(path: Path, skip: Skip | None) -> Iterator[dict[str, Any]]:
    """Read the records of a file in file order, one line at a time; reports or raises errors that name the line."""
    with _opened(path) as lines:
        for number, line in enumerate(lines, start=1):
            try:
                if line.rstrip().endswith(TORN_MARK) or (not line.endswith("\n") and not is_json(line)):
                    torn = f"{path} line {number} is torn and was left out"
                    if skip is None:
                        warnings.warn(torn, stacklevel=2)
                    else:
                        skip(PromptError(torn))
                elif line.strip():
                    yield _record(path, number, line)
            except PromptError as error:
                if skip is None:
                    raise
                skip(error)


@contextmanager
def _opened(path: Path) -> Iterator[IO[str]]:
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8") as lines:
            yield lines
    except (OSError, UnicodeDecodeError, EOFError) as error:
        raise PromptError(f"cannot read {path}: {error}") from error


def _record(path: Path, number: int, line: str) -> dict[str, Any]:
    where = f"{path} line {number}"
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise PromptError(f"{where} is not JSON: {error}") from error
    try:
        if isinstance(record.get("request"), dict):
            record = {**record["request"], **record}
        if isinstance(record.get("messages"), list):
            found = record if record.get("response") is None else _from_call(where, number, record)
        elif isinstance(record.get("inputs"), dict):
            found = _from_langsmith(where, number, record)
        else:
            raise PromptError(f"{where} is not a chat trace: it has no list `messages` and no `inputs`")
        if not isinstance(found.get("tools") or [], list):
            raise PromptError(f"{where} is not a chat trace: its `tools` are not a list")
    except (AttributeError, TypeError, LookupError) as error:  # a value of another type than these formats have
        raise PromptError(f"{where} is not a chat trace: {type(error).__name__}: {error}") from error
    return {**found, "source": where}


def _from_call(where: str, number: int, record: dict[str, Any]) -> dict[str, Any]:
    answer = record["response"]
    if isinstance(answer, dict) and answer.get("choices"):
        answer = answer["choices"][0].get("message")
    if not isinstance(answer, dict):
        raise PromptError(f"{where} has a `response` that is neither a message nor a chat completion")
    messages = [*record["messages"], {**answer, "role": "assistant"}]
    task = record.get("task_id") or record.get("conversation_id") or record.get("id")
    return {**record, "messages": messages, "task_id": number if task is None else task, "only_last": True}


def _from_langsmith(where: str, number: int, record: dict[str, Any]) -> dict[str, Any]:
    """Convert a chat-model run to a trace that ends with the answer.

    Its conversation is the thread if one is named, else the trace; LangSmith's own `session_id` names a whole project.
    """
    messages = record["inputs"].get("messages") or []
    if messages and isinstance(messages[0], list):  # LangChain logs a batch of conversations
        messages = messages[0]
    answer = _langsmith_answer(record.get("outputs") or {})
    if not messages or answer is None:
        raise PromptError(f"{where} is a LangSmith run without messages or without an answer")
    extra = record.get("extra") or {}
    metadata = extra.get("metadata") or {}
    named = [metadata.get(key) for key in ("thread_id", "conversation_id", "session_id")]
    conversation = next((str(name) for name in (*named, record.get("trace_id"), record.get("id")) if name), None)
    return {
        "messages": [_plain_message(message) for message in (*messages, answer)],
        "tools": (extra.get("invocation_params") or {}).get("tools") or [],
        "task_id": number if conversation is None else conversation,
        "conversation_id": conversation,
        "only_last": True,
    }


def _langsmith_answer(outputs: dict[str, Any]) -> Message | None:
    found = outputs.get("generations")
    while isinstance(found, list) and found:
        found = found[0]
    if isinstance(found, dict):
        answer: Message | None = found.get("message")
        return answer
    listed = outputs.get("messages")
    last = listed[-1] if isinstance(listed, list) and listed else None
    return next((one for one in (outputs.get("message"), outputs.get("output"), last) if isinstance(one, dict)), None)


_ROLES = {"human": "user", "ai": "assistant", "system": "system", "tool": "tool", "function": "tool"}


def _plain_message(message: Message) -> Message:
    fields = message.get("kwargs") or message.get("data") or message
    kind = str(fields.get("role") or fields.get("type") or str((message.get("id") or [""])[-1]))
    kind = kind.lower().removesuffix("chunk").removesuffix("message")
    plain = {
        "role": _ROLES.get(kind, kind),
        "content": fields.get("content") or "",
        "tool_calls": [_plain_call(call) for call in fields.get("tool_calls") or ()],
    }
    return plain if fields.get("tool_call_id") is None else {**plain, "tool_call_id": fields["tool_call_id"]}


def _plain_call(call: dict[str, Any]) -> dict[str, Any]:
    if "name" not in call:
        return call
    function = {"name": call["name"], "arguments": json.dumps(call.get("args", {}))}
    return {"type": "function", "id": call.get("id"), "function": function}


def trajectory_of(path: Path, number: int, line: str) -> Trajectory:
    """Read the run or call in one line. Raises PromptError, naming the line, if it is not a trace."""
    return _trajectory(number, _record(path, number, line))


def _trajectory(number: int, record: dict[str, Any]) -> Trajectory:
    task = str(record.get("task_id", number))
    return Trajectory(
        number,
        task,
        str(record.get("group") or task),
        tuple(record["messages"]),
        tuple(record.get("tools") or ()),
        bool(record.get("only_last")),
        str(record["source"]),
    )
