"""Parses a rendered prompt into turns, and checks that it contains all it should."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

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
    body = compared(turn.text)
    for text in one.texts:
        forms = (compared(text), compared(json.dumps(text, ensure_ascii=False)))
        found = [(body.find(form, start), len(form)) for form in forms]
        ends = [place + length for place, length in found if place >= 0]
        if not ends:
            return None
        start = min(ends) if ordered else 0
    return start


def compared(text: str) -> str:
    """A text without the characters that templates and tool formats may change."""
    return _IGNORED.sub("", text)


def _words(one: Said) -> str:
    return f"it lacks the {one.role} message, or has it elsewhere: {' … '.join(one.texts)!r}"
