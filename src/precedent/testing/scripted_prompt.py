"""What a rendered prompt says, turn by turn, and whether it says all that it should."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

BEGIN, END = "<|im_start|>", "<|im_end|>"

_IGNORED = re.compile(r'[\s"\\]')
"""White space, and how JSON quotes a text: templates trim the one, and tool formats differ in the other."""

_ROLES_OF = {"tool": ("tool", "user")}
"""Templates put tool results into turns of a user or of their own."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a ChatML prompt; a prompt in another form is one turn without a role."""

    role: str
    text: str


@dataclass(frozen=True, slots=True)
class Said:
    """One message: its `texts` stand in one turn of the prompt, in this order. A call is its name and its arguments."""

    role: str
    texts: tuple[str, ...]


def turns_of(pieces: Iterable[str]) -> list[Turn]:
    """The closed turns of a prompt that was cut before every `BEGIN`; the turn that it opens is no part of them."""
    before, *turns = (piece.removeprefix(BEGIN) for piece in pieces)
    if not turns:
        return [Turn("", before)]
    closed = [turn.rpartition(END)[0] for turn in turns if END in turn]
    return [Turn(role, text) for role, _, text in (turn.partition("\n") for turn in closed)]


def missing(said: Sequence[Said], turns: Sequence[Turn]) -> str | None:
    """What the turns do not hold of the messages, in the order of both, in words; None where they hold all and no more.

    The template's own system turn may precede. A prompt that is not ChatML is searched as a whole, in any order.
    """
    if [turn.role for turn in turns] == [""]:
        return next((_words(one) for one in said if _end_in(turns[0], one, 0, ordered=False) is None), None)
    at, behind = -1, 0
    if turns and turns[0].role == "system" and (not said or said[0].role != "system"):
        at, behind = 0, len(turns[0].text)
    for before, one in zip((None, *said), said, strict=False):
        results = before is not None and before.role == one.role == "tool"  # those of one turn's calls share a turn
        place = _place(one, turns, at, behind, stay=results)
        if place is None:
            return _words(one)
        at, behind = place
    return None if at == len(turns) - 1 else f"nobody said {turns[at + 1].text!r}, which it has as {turns[at + 1].role}"


def _place(one: Said, turns: Sequence[Turn], at: int, behind: int, *, stay: bool) -> tuple[int, int] | None:
    """The turn that holds a message, and where it ends there: the next one, or this one where turns were merged."""
    here, following = (at, behind), (at + 1, 0)
    for number, start in (here, following) if stay else (following, here):
        if 0 <= number < len(turns) and turns[number].role in _ROLES_OF.get(one.role, (one.role,)):
            end = _end_in(turns[number], one, start)
            if end is not None:
                return number, end
    return None


def _end_in(turn: Turn, one: Said, start: int, *, ordered: bool = True) -> int | None:
    """Where the texts of a message end within a turn, counted in what is compared."""
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
    """A text without what templates and tool formats may change of it."""
    return _IGNORED.sub("", text)


def _words(one: Said) -> str:
    return f"it lacks what was said as {one.role}, or has it elsewhere: {' … '.join(one.texts)!r}"
