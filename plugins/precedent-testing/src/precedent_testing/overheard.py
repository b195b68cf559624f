"""Records what LangChain was asked, before this library sees it, so that scripted engines can check every prompt.

A scripted engine would give the same answer even if a message were lost on the way. The engines of this package
therefore listen to LangChain's callbacks and raise an AssertionError that names what a prompt lacks. Requests that do
not come from LangChain are not checked.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage, BaseMessage, ChatMessage
from langchain_core.tracers.context import register_configure_hook

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BEGIN, END = "<|im_start|>", "<|im_end|>"

_IGNORED = re.compile(r'[\s"\\]')
"""White space and JSON quoting: templates trim the former, and tool formats differ in the latter."""

_ROLES_OF = {"tool": ("tool", "user")}
"""Templates put tool results into user turns or into tool turns."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a ChatML prompt; a prompt in another form is one turn without a role."""

    role: str
    text: str


@dataclass(frozen=True, slots=True)
class Said:
    """One message: its `texts` appear in one turn of the prompt, in this order. A call gives its name and arguments."""

    role: str
    texts: tuple[str, ...]


Role = TypeVar("Role", Turn, Said)

_ROLE_OF_TYPE = {"human": "user", "ai": "assistant", "function": "tool", "developer": "system"}

Asked = list[Said] | str
"""A chat model's messages, or a text model's prompt."""


class Listener(BaseCallbackHandler):
    """Records the input of every running call."""

    run_inline = True
    raise_error = True

    def __init__(self) -> None:
        self._running: dict[UUID, Asked] = {}
        self._here: ContextVar[tuple[UUID, ...]] = ContextVar("runs of this context", default=())
        self._lock = threading.RLock()  # a stream that nobody holds any more may be finalised while a prompt is checked

    def on_chat_model_start(
        self, serialized: dict[str, Any], messages: list[list[BaseMessage]], *, run_id: UUID, **kwargs: Any
    ) -> None:
        """Record a chat model's messages."""
        self._note(run_id, [one for message in messages[0] for one in _said_in(message)])

    def on_llm_start(self, serialized: dict[str, Any], prompts: list[str], *, run_id: UUID, **kwargs: Any) -> None:
        """Record a text model's prompt."""
        self._note(run_id, prompts[0])

    def on_llm_end(self, response: Any, *, run_id: UUID, **kwargs: Any) -> None:
        """Forget a finished call."""
        self._forget(run_id)

    def on_llm_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        """Forget a failed call."""
        self._forget(run_id)

    def check(self, tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int]) -> None:
        """Raise AssertionError unless the prompt holds exactly the input of a call that runs in this context."""
        with self._lock:
            asked = {run_id: self._running[run_id] for run_id in self._here.get() if run_id in self._running}
            lacks = {run_id: _lack(one, tokenizer, prompt_ids) for run_id, one in asked.items()}
            met = [run_id for run_id, lack in lacks.items() if lack is None][:1]
            for run_id in met:
                del self._running[run_id]
        if lacks and not met:
            prompt = tokenizer.decode(list(prompt_ids))
            reasons = "; or: ".join(filter(None, lacks.values()))
            raise AssertionError(f"the prompt is not what LangChain was asked: {reasons}\n{prompt}")

    def _note(self, run_id: UUID, asked: Asked) -> None:
        with self._lock:
            self._running[run_id] = asked
            self._here.set((*(one for one in self._here.get() if one in self._running), run_id))

    def _forget(self, run_id: UUID) -> None:
        with self._lock:
            self._running.pop(run_id, None)


LISTENER = Listener()
"""Listens to every chat and text model in the process; only scripted engines use it."""

register_configure_hook(ContextVar("precedent's listener", default=LISTENER), inheritable=False)


def _lack(asked: Asked, tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int]) -> str | None:
    """Describe what a prompt lacks of the input; None if it is complete."""
    if isinstance(asked, str):
        return None if list(prompt_ids) == tokenizer.encode(asked) else f"the text was {asked!r}"
    return missing(asked, turns_of(_pieces(tokenizer, prompt_ids)))


def _pieces(tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int]) -> list[str]:
    """Cut the prompt where turns begin. It is cut by ids, because a message may contain the marker as plain text."""
    begin = tokenizer.convert_tokens_to_ids(BEGIN)
    pieces: list[list[int]] = [[]]
    for token in prompt_ids:
        if token == begin:
            pieces.append([])
        pieces[-1].append(token)
    return [str(tokenizer.decode(piece)) for piece in pieces]


def _said_in(message: BaseMessage) -> Iterator[Said]:
    """What a message says: first the tool results in its content blocks, then its own text and calls."""
    blocks = [block for block in message.content if isinstance(block, Mapping)] if message.content else []
    for block in blocks:
        if block.get("type") == "tool_result":
            yield Said("tool", tuple(_texts(block.get("content") or "")))
    texts = [*_texts(message.content), *(text for call in _calls(message, blocks) for text in call)]
    if texts or not any(block.get("type") == "tool_result" for block in blocks):
        role = message.role if isinstance(message, ChatMessage) else message.type
        role = role.removesuffix("MessageChunk").lower()  # a streamed message is said as a whole one
        yield Said(_ROLE_OF_TYPE.get(role, role), tuple(texts))


def _texts(content: Any) -> list[str]:
    if isinstance(content, str):
        return [content] if content else []
    texts = [block if isinstance(block, str) else block.get("text") for block in content]
    return [text for text in texts if isinstance(text, str) and text]


def _calls(message: BaseMessage, blocks: Sequence[Mapping[str, Any]]) -> Iterator[list[str]]:
    """Each call of an assistant's message, as its name and the values in its arguments."""
    if not isinstance(message, AIMessage):
        return
    for call in message.tool_calls:
        yield [call["name"], *_leaves(call["args"])]
    known = {call["id"] for call in message.tool_calls}
    for block in blocks:
        if block.get("type") == "tool_use" and block.get("id") not in known:
            yield [str(block.get("name", "")), *_leaves(block.get("input") or {})]


def _leaves(value: Any) -> Iterator[str]:
    """The names, strings and numbers in a call's arguments; formats write everything else differently."""
    if isinstance(value, Mapping):
        for name, one in value.items():
            yield from (str(name), *_leaves(one))
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _leaves(one)
    elif isinstance(value, str) or (isinstance(value, int | float) and not isinstance(value, bool)):
        yield str(value)


def turns_of(pieces: Iterable[str]) -> list[Turn]:
    """The closed turns of a prompt that was cut before every `BEGIN`; leaves out the turn that it opens."""
    before, *turns = (piece.removeprefix(BEGIN) for piece in pieces)
    if not turns:
        return [Turn("", before)]
    closed = [turn.rpartition(END)[0] for turn in turns if END in turn]
    return [Turn(role, text) for role, _, text in (turn.partition("\n") for turn in closed)]


def missing(said: Sequence[Said], turns: Sequence[Turn]) -> str | None:
    """Describe how the turns differ from the messages; None if they hold all of them and nothing else.

    Turns must be in the order of the messages, except system messages, which templates may move; a template may also
    add one system message. A prompt that is not ChatML is searched as a whole, in any order.
    """
    if [turn.role for turn in turns] == [""]:
        return _first_missing(said, turns)
    system, others = _split_system(turns)
    expected, _ = _split_system(said)
    if len(system) > 1 + len(expected):
        return f"no message says {system[-1].text!r}, which the prompt has as system"
    return _first_missing(expected, system or others) or _first_out_of_place(said, others)


def _split_system(all_of_them: Sequence[Role]) -> tuple[list[Role], list[Role]]:
    """Split into system items and others."""
    system = [one for one in all_of_them if one.role == "system"]
    return system, [one for one in all_of_them if one.role != "system"]


def _first_missing(said: Sequence[Said], turns: Sequence[Turn]) -> str | None:
    """The first message that no turn holds."""
    lost = (one for one in said if all(_end_in(turn, one, 0, ordered=False) is None for turn in turns))
    return next(map(_words, lost), None)


def _first_out_of_place(said: Sequence[Said], turns: Sequence[Turn]) -> str | None:
    """The first message, system messages aside, that is out of place, or the first turn that belongs to no message."""
    at, end = -1, 0
    for before, one in zip((None, *said), said, strict=False):
        if one.role == "system":
            continue
        results = before is not None and before.role == one.role == "tool"
        # if results are in user turns, those of one turn's calls share a turn
        place = _place(one, turns, at, end, stay=results and turns[at].role == "user")
        if place is None:
            return _words(one)
        at, end = place
    if at == len(turns) - 1:
        return None
    return f"no message says {turns[at + 1].text!r}, which the prompt has as {turns[at + 1].role}"


def _place(one: Said, turns: Sequence[Turn], at: int, end: int, *, stay: bool) -> tuple[int, int] | None:
    """The turn that holds a message, and where the message ends in it: the next turn, or this one if both merged."""
    here, following = (at, end), (at + 1, 0)
    for number, start in (here, following) if stay else (following, here):
        if 0 <= number < len(turns) and turns[number].role in _ROLES_OF.get(one.role, (one.role,)):
            found = _end_in(turns[number], one, start)
            if found is not None:
                return number, found
    return None


def _end_in(turn: Turn, one: Said, start: int, *, ordered: bool = True) -> int | None:
    """Where the texts of a message end within a turn, as an offset into the compared text."""
    body = _compared(turn.text)
    for text in one.texts:
        forms = (_compared(text), _compared(json.dumps(text, ensure_ascii=False)))
        found = [(body.find(form, start), len(form)) for form in forms]
        ends = [place + length for place, length in found if place >= 0]
        if not ends:
            return None
        start = min(ends) if ordered else 0
    return start


def _compared(text: str) -> str:
    """A text without the characters that templates and tool formats may change."""
    return _IGNORED.sub("", text)


def _words(one: Said) -> str:
    return f"it lacks the {one.role} message, or has it elsewhere: {' … '.join(one.texts)!r}"
