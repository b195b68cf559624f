"""What a rendered prompt says, turn by turn, and whether it says all that it should."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

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


Role = TypeVar("Role", Turn, Said)


def turns_of(pieces: Iterable[str]) -> list[Turn]:
    """The closed turns of a prompt that was cut before every `BEGIN`; the turn that it opens is no part of them."""
    before, *turns = (piece.removeprefix(BEGIN) for piece in pieces)
    if not turns:
        return [Turn("", before)]
    closed = [turn.rpartition(END)[0] for turn in turns if END in turn]
    return [Turn(role, text) for role, _, text in (turn.partition("\n") for turn in closed)]


def missing(said: Sequence[Said], turns: Sequence[Turn]) -> str | None:
    """What the turns do not hold of the messages, in words; None where they hold all of them and no more.

    Turns come in the order of the messages; templates put system messages where they like, and may add one of their
    own. A prompt that is not ChatML is searched as a whole, in any order.
    """
    if [turn.role for turn in turns] == [""]:
        return _first_lost(said, turns)
    system, others = _parted(turns)
    told, _ = _parted(said)
    if len(system) > 1 + len(told):
        return f"nobody said {system[-1].text!r}, which it has as system"
    return _first_lost(told, system or others) or _first_in_disorder(said, others)


def _parted(all_of_them: Sequence[Role]) -> tuple[list[Role], list[Role]]:
    """Those of the system, and the others."""
    system = [one for one in all_of_them if one.role == "system"]
    return system, [one for one in all_of_them if one.role != "system"]


def _first_lost(said: Sequence[Said], turns: Sequence[Turn]) -> str | None:
    """The first message that no turn holds."""
    lost = (one for one in said if all(_end_in(turn, one, 0, ordered=False) is None for turn in turns))
    return next(map(_words, lost), None)


def _first_in_disorder(said: Sequence[Said], turns: Sequence[Turn]) -> str | None:
    """The first message, the system's aside, that does not stand in its place, or the first turn that is nobody's."""
    at, behind = -1, 0
    for before, one in zip((None, *said), said, strict=False):
        if one.role == "system":
            continue
        results = before is not None and before.role == one.role == "tool"
        # where results are a user's, those of one turn's calls share a turn
        place = _place(one, turns, at, behind, stay=results and turns[at].role == "user")
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
