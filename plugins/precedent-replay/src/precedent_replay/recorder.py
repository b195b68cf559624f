"""`PrecedentRecorder`: a callback that logs the calls of any chat model, for `precedent replay`."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, LLMResult

from precedent.errors import ConfigError
from precedent.runtime.process import Lock
from precedent.runtime.recent import Recent
from precedent.text.traces import TORN_MARK
from precedent_run_ahead.recording import Plain, plain_messages, plain_tools

_log = logging.getLogger(__name__)

Redact = Callable[[str], str]

REMEMBERED = 10_000
"""Most open calls, running chains and conversations to remember; the oldest are forgotten first."""

CONVERSATION_KEYS = ("thread_id", "conversation_id", "session_id")
"""Keys of a run's metadata that may name its conversation."""


@dataclass(frozen=True, slots=True)
class _Call:
    """A call that has started and not ended."""

    messages: Sequence[BaseMessage]
    parameters: Mapping[str, Any]
    metadata: Mapping[str, Any]
    root: UUID | None
    started: float = field(default_factory=monotonic)


class PrecedentRecorder(BaseCallbackHandler):
    """Writes every finished call of any LangChain chat model as one line of an OpenAI-format log.

    Use `callbacks=[PrecedentRecorder("log.jsonl")]`, then `precedent replay log.jsonl`. `redact` is applied to every
    text and to every call's arguments before they are written; a call for which it fails is not written. `group_by` is
    the key of the runs' metadata that names the group of a conversation, such as a customer. No error is raised into
    the chain: errors are logged once per kind and counted in `num_lost`. Raises ConfigError if the file cannot be
    opened.

    >>> from langchain_core.language_models import FakeListChatModel
    >>> with PrecedentRecorder("log.jsonl") as recorder:
    ...     answer = FakeListChatModel(responses=["At nine."]).invoke("When do you open?", {"callbacks": [recorder]})
    >>> recorder.num_recorded
    1
    """

    def __init__(
        self, path: str | os.PathLike[str], *, redact: Redact | None = None, group_by: str | None = None
    ) -> None:
        self.path = Path(path).expanduser()
        self.num_recorded = 0
        self.num_lost = 0
        self._redact, self._group_by = redact, group_by
        self._lock = Lock()
        self._calls: Recent[UUID, _Call] = Recent(REMEMBERED)
        self._roots: Recent[UUID, UUID] = Recent(REMEMBERED)
        self._conversations: Recent[UUID | bytes, str] = Recent(REMEMBERED)
        self._failures: set[str] = set()
        self._torn = False
        self._file: int | None = _opened(self.path)

    def __deepcopy__(self, memo: object) -> PrecedentRecorder:
        """Return itself: LangChain copies configurations, and all copies write to one file."""
        return self

    def __reduce__(self) -> tuple[Callable[..., PrecedentRecorder], tuple[Path]]:
        """Pickle the settings; the copy appends to the same file."""
        return partial(type(self), redact=self._redact, group_by=self._group_by), (self.path,)

    def __enter__(self) -> PrecedentRecorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; calls that end later are not recorded."""
        with self._lock:
            if self._file is not None:
                os.close(self._file)
            self._file = None

    def on_chain_start(
        self,
        serialized: dict[str, Any],
        inputs: dict[str, Any],
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        **kwargs: Any,
    ) -> None:
        """Remember the agent run that this run belongs to: all calls of one agent run form one conversation."""
        with self._lock:
            self._roots[run_id] = self._roots.get(parent_run_id, parent_run_id) if parent_run_id else run_id

    def on_chat_model_start(
        self,
        serialized: dict[str, Any],
        messages: list[list[BaseMessage]],
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        tags: list[str] | None = None,
        metadata: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Keep the call's input until its answer arrives."""
        with self._lock:
            root = self._roots.get(parent_run_id, parent_run_id) if parent_run_id else None
            parameters = kwargs.get("invocation_params") or {}
            self._calls[run_id] = _Call(tuple(messages[0]), parameters, metadata or {}, root)

    def on_llm_end(self, response: LLMResult, *, run_id: UUID, **kwargs: Any) -> None:
        """Write the call; a streamed answer arrives here complete."""
        with self._lock:
            call = self._calls.pop(run_id, None)
        if call is None:
            return
        try:
            self._record(call, response, run_id)
        except Exception as error:
            self._lose(error)

    def on_llm_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        """Forget a call that failed or was cancelled: it has no answer to record."""
        with self._lock:
            self._calls.pop(run_id, None)

    def _record(self, call: _Call, response: LLMResult, run_id: UUID) -> None:
        answer = _answer_of(response)
        if answer is None:
            return
        messages, (said,) = plain_messages(call.messages), plain_messages([answer])
        conversation = self._conversation(call, [*messages, said], run_id)
        if self._redact is not None:
            messages = [_redacted(message, self._redact) for message in messages]
            said = _redacted(said, self._redact)
        record = {
            "id": str(run_id),
            "conversation_id": conversation,
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "seconds": round(monotonic() - call.started, 3),
            "model": _model_name(answer, call.parameters, call.metadata),
            "group": call.metadata.get(self._group_by) if self._group_by else None,
            "workflow_step": call.metadata.get("langgraph_node"),
            "messages": messages,
            "tools": plain_tools(call.parameters),
            "response": said,
            "usage": _token_usage(answer),
        }
        self._write({key: value for key, value in record.items() if value is not None})

    def _conversation(self, call: _Call, talk: Sequence[Plain], run_id: UUID) -> str:
        """The conversation named by the call's metadata, else that of its agent run, else the one that it continues."""
        digests = _prefix_digests(talk)
        with self._lock:
            known = self._conversations
            earlier = [digest for digest, said in zip(digests[:-1], talk, strict=False) if said["role"] == "assistant"]
            named = next((call.metadata[key] for key in CONVERSATION_KEYS if call.metadata.get(key)), None)
            found = named or (known.get(call.root) if call.root else None)
            found = found or next((known[digest] for digest in reversed(earlier) if digest in known), None)
            conversation = str(found or run_id)
            known[digests[-1]] = conversation
            if call.root:
                known[call.root] = conversation
        return conversation

    def _write(self, record: Mapping[str, Any]) -> None:
        """Append one line in a single write; if the previous write was incomplete, first mark its line as torn."""
        line = (json.dumps(record, ensure_ascii=False, default=str) + "\n").encode("utf-8", "replace")
        with self._lock:
            if self._file is None:
                raise OSError(f"{self.path} is closed")
            whole = (TORN_MARK.encode() + b"\n" if self._torn else b"") + line
            self._torn = True
            if os.write(self._file, whole) < len(whole):
                raise OSError(f"only part of a line was written to {self.path}: is the disk full?")
            self._torn = False
            self.num_recorded += 1

    def _lose(self, error: Exception) -> None:
        kind = type(error).__name__
        with self._lock:
            self.num_lost += 1
            if kind in self._failures:
                return
            self._failures.add(kind)
        _log.warning(
            "a call was not recorded in %s (%s: %s); further errors of this kind are not logged", self.path, kind, error
        )


def _opened(path: Path) -> int:
    """Open the log for appending, readable by its owner only; mark a last line that a crash left incomplete."""
    try:
        file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o600)
        if os.lseek(file, 0, os.SEEK_END):
            os.lseek(file, -1, os.SEEK_END)
            if os.read(file, 1) != b"\n":
                os.write(file, TORN_MARK.encode() + b"\n")
    except OSError as error:
        raise ConfigError(f"cannot write the log {path}: {error.strerror or error}") from error
    return file


def _answer_of(result: LLMResult) -> AIMessage | None:
    """The message that a call returned; None if there is none."""
    for generation in result.generations[0] if result.generations else ():
        if isinstance(generation, ChatGeneration) and isinstance(generation.message, AIMessage):
            return generation.message
    return None


def _model_name(answer: AIMessage, parameters: Mapping[str, Any], metadata: Mapping[str, Any]) -> str | None:
    """The model's name from the provider's answer, else from the request."""
    said = answer.response_metadata
    asked = parameters.get("model") or parameters.get("model_name") or metadata.get("ls_model_name")
    found = said.get("model_name") or said.get("model") or asked
    return str(found) if found else None


def _token_usage(answer: AIMessage) -> dict[str, int] | None:
    """Token counts under OpenAI's names; None if the model reported none."""
    usage = answer.usage_metadata
    if usage is None:
        return None
    return {
        "prompt_tokens": usage["input_tokens"],
        "completion_tokens": usage["output_tokens"],
        "total_tokens": usage["total_tokens"],
    }


def _prefix_digests(messages: Sequence[Plain]) -> list[bytes]:
    """For each message, a digest of the conversation up to and including it."""
    digests, running = [], hashlib.blake2b(digest_size=16)
    for message in messages:
        functions = [call["function"] for call in message.get("tool_calls") or ()]
        said = (message["role"], message["content"], [(one["name"], one["arguments"]) for one in functions])
        running.update(json.dumps(said, sort_keys=True, default=str).encode())
        digests.append(running.digest())
    return digests


def _redacted(message: Plain, redact: Redact) -> Plain:
    """The message with every text and every call's arguments passed through `redact`."""
    changed = {**message, "content": _each_text(message["content"], redact)}
    if message.get("tool_calls"):
        changed["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _each_text(call["function"]["arguments"], redact)}}
            for call in message["tool_calls"]
        ]
    return changed


def _each_text(value: Any, redact: Redact) -> Any:
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, list):
        return [_each_text(part, redact) for part in value]
    if isinstance(value, Mapping):
        return {key: part if key == "type" else _each_text(part, redact) for key, part in value.items()}
    return value
