"""The drafter of premade responses and of tool calls with a known form: useful before anything is cached.

A template becomes a few texts: one for each set of values that the prompt offers for its holes, and one with the holes
left open. These are then followed like any known text: a value that the model writes differently is a gap, and the
first tokens of the literal after it lead back into the text.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from precedent.drafters.base import Drafter
from precedent.drafters.matching.known_texts import UNKNOWN, KnownText, KnownTextSession
from precedent.drafters.matching.vote_tree import VotePrior
from precedent.drafters.request import Request
from precedent.text.codec import TokenizerCodec
from precedent.text.templates import Hole, Template, Templates

RECENT_TOKENS = 1024
"""Tokens at the end of the prompt that are searched for values."""

MAX_VALUES = 4
"""Most values proposed for a hole; twice as many of its listed choices."""

MAX_TEXTS = 128
"""Most texts per request; with many templates each gets fewer values."""

MAX_TOKENS = 65_536
"""Tokens of a request's texts together, beyond which no further template is filled in."""

_MAX_KEPT = 1024

_PROBES = ("a", "7", "Q")
"""Possible neighbours of a literal: tokens that differ between these probes merge with a neighbour."""

_RANK_COST, _OPEN_COST, _TRUST = 0.5, 1.0, 0.7

# Chosen by hand: a tool call that has begun keeps its form, and every request calibrates the estimates further.
_PRIOR = VotePrior(offset=-1.2, odds=1.3, length=1.2, number=0.0, similarity=0.0)

Chosen = tuple[str | None, ...]
"""A text for each hole of a template, None if it stays open."""


class TemplateDrafter(Drafter):
    """Proposes a request's templates and its own, with values from the prompt.

    `templates` apply to all requests: texts with `{holes}`, or a `Templates`. Raises ConfigError for one that cannot be
    parsed.
    """

    name = "template"
    begins_early = True

    def __init__(self, codec: TokenizerCodec, templates: Iterable[str | Template] = ()) -> None:
        self._codec, self._templates = codec, Templates(templates)
        self._own = lru_cache(maxsize=_MAX_KEPT)(self._own_ids)  # templates only: values are private to a request

    def begin(self, request: Request) -> KnownTextSession:
        """Fill in the templates for this prompt: a few milliseconds for a dozen tools."""
        templates = tuple(dict.fromkeys((*request.templates, *self._templates)))
        texts = self._texts(templates, request) if templates else []
        return KnownTextSession(self.name, request, texts, _PRIOR, _TRUST)

    def close(self) -> None:
        """Forget the encoded templates."""
        self._own.cache_clear()

    def _texts(self, templates: Sequence[Template], request: Request) -> list[KnownText]:
        values = PromptValues(self._codec.decode(request.prompt_ids[-RECENT_TOKENS:]))
        most = max(1, min(MAX_VALUES, MAX_TEXTS // len(templates) - 1))
        end = self._codec.end_token_id
        ending = (end,) if end is not None and end in request.end_token_ids else ()
        texts, size = list[KnownText](), 0
        for template in templates:
            for text in self._texts_of(template, values, most, ending):
                texts.append(text)
                size += len(text.token_ids)
            if size > MAX_TOKENS:
                break
        return texts

    def _texts_of(
        self, template: Template, values: PromptValues, most: int, ending: tuple[int, ...]
    ) -> Iterator[KnownText]:
        """A template's filled-in texts, which together weigh as much as one text."""
        written = _written_out(template, values, most)
        total = math.log(sum(math.exp(-cost) for _, cost in written))
        for chosen, cost in written:
            token_ids, guessed = self._tokens(template, chosen)
            if token_ids:
                yield KnownText(
                    (*token_ids, *ending), -cost - total, int(template.is_call), (*guessed, *(False for _ in ending))
                )

    def _tokens(self, template: Template, chosen: Chosen) -> tuple[list[int], list[bool]]:
        """The token ids of a template with these texts in its holes, and marks for those that come from a hole."""
        own = self._own(template)
        first, *others = own if all(text is None for text in chosen) else self._ids(_runs(template, chosen))
        token_ids = [*first, *(token for ids in others for token in (UNKNOWN, *ids))]
        return token_ids, _not_among(token_ids, own)

    def _own_ids(self, template: Template) -> list[tuple[int, ...]]:
        return self._ids(_runs(template, None))

    def _ids(self, runs: Sequence[str]) -> list[tuple[int, ...]]:
        """The token ids of each text between gaps, without tokens that could merge with a gap's content."""
        return [self._kept(run, number == 0, number == len(runs) - 1) for number, run in enumerate(runs)]

    def _kept(self, text: str, first: bool, last: bool) -> tuple[int, ...]:
        """The token ids that do not depend on what precedes the text (unless `first`) or follows it (unless `last`)."""
        left, right = ("",) if first else _PROBES, ("",) if last else _PROBES
        whole = self._codec.encode(f"{left[0]}{text}{right[0]}")
        others = [self._codec.encode(f"{left[0]}{text}{probe}") for probe in right[1:]]
        end = min((_shared(whole, other) for other in others), default=len(whole))
        others = [self._codec.encode(f"{probe}{text}{right[0]}") for probe in left[1:]]
        kept = min((_shared(whole[::-1], other[::-1]) for other in others), default=len(whole))
        return tuple(whole[len(whole) - kept : end])


def _written_out(template: Template, values: PromptValues, most: int) -> list[tuple[Chosen, float]]:
    """Sets of texts for the holes, each with a cost in log weight: values of equal rank together, then none at all."""
    options = [hole.choices[: 2 * MAX_VALUES] or values.of(hole, most) for hole in template.holes]
    ranks = range(max((len(option) for option in options), default=0))
    written: list[tuple[Chosen, float]] = [
        (tuple(option[rank % len(option)] if option else None for option in options), _RANK_COST * rank)
        for rank in ranks
    ]
    if not options or not all(hole.choices for hole in template.holes):
        written.append((tuple(None for _ in options), _OPEN_COST if written else 0.0))
    return written


def _runs(template: Template, chosen: Chosen | None) -> list[str]:
    """The texts between open holes; the first and the last may be empty."""
    runs, holes = [""], iter(chosen or (None,) * len(template.holes))
    for part in template.parts:
        text = part if isinstance(part, str) else next(holes)
        if text is None:
            runs.append("")
        else:
            runs[-1] += text
    return runs


def _shared(left: Sequence[int], right: Sequence[int]) -> int:
    differing = (i for i, (one, other) in enumerate(zip(left, right, strict=False)) if one != other)
    return next(differing, min(len(left), len(right)))


def _not_among(token_ids: Sequence[int], literals: Sequence[tuple[int, ...]]) -> list[bool]:
    """Marks the tokens that belong to none of the literals, which occur in this order."""
    marks, start = [True] * len(token_ids), 0
    for literal in literals:
        places = range(start, len(token_ids)) if literal else ()
        found = next((at for at in places if tuple(token_ids[at : at + len(literal)]) == literal), None)
        if found is not None:
            start = found + len(literal)
            marks[found:start] = [False] * len(literal)
    return marks


# Values from the prompt: an id the user named, an address in a tool's result; the latest come first

_PAIR = re.compile(r'"([\w-]+)"\s*:\s*("(?:[^"\\\n]|\\.)*"|-?\d+(?:\.\d+)?)')
_EMAIL = re.compile(r"\b[\w.+-]+@[\w-]+(?:\.[\w-]+)+")
_IDENTIFIER = re.compile(r"(?<![\w@.-])#?([A-Za-z]*[-_]?\d[\w-]*)")
_NUMBER = re.compile(r"(?<![\w.-])-?\d+(?:\.\d+)?(?![\w-])")
_QUOTED = re.compile(r"['\u2018\u201c]([^'\"\u2018-\u201d\n]{2,80})['\u2019\u201d]")

MAX_CHARACTERS = 500
"""Longer values are not proposed."""

_ABOUT_IDENTIFIERS = re.compile(r"(^|_)(id|number|no|code|key|ref|reference|order|zip)s?$", re.IGNORECASE)
_ABOUT_EMAILS = re.compile(r"mail", re.IGNORECASE)


class _Found(NamedTuple):
    position: int
    value: str


class PromptValues:
    """The values in a text, recognised by their JSON key or by their form; searched on demand."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._pairs: list[tuple[str, _Found]] | None = None
        self._by_pattern: dict[re.Pattern[str], list[_Found]] = {}

    def of(self, hole: Hole, most: int) -> list[str]:
        """At most `most` values that fit a hole, the latest first, each as written there."""
        found = sorted((*self._by_key(hole), *self._by_looks(hole)), reverse=True)
        fitting = (_WRITTEN[hole.kind](one.value) for one in found)
        return list(dict.fromkeys(value for value in fitting if 0 < len(value) <= MAX_CHARACTERS))[:most]

    def _by_key(self, hole: Hole) -> Iterator[_Found]:
        """JSON values under the hole's name, or under a key that is a suffix of it or ends in it."""
        if self._pairs is None:
            matches = _PAIR.finditer(self._text)
            self._pairs = [(match[1].lower(), _Found(match.end(), _read(match[2]))) for match in matches]
        return (found for key, found in self._pairs if _alike(key, hole.name.lower()))

    def _by_looks(self, hole: Hole) -> list[_Found]:
        """Values in the form that the hole's kind and name suggest: a number, an email address, an identifier."""
        if hole.kind == "number":
            pattern = _NUMBER
        elif _ABOUT_EMAILS.search(hole.name):
            pattern = _EMAIL
        else:
            pattern = _IDENTIFIER if _ABOUT_IDENTIFIERS.search(hole.name) else _QUOTED
        if pattern not in self._by_pattern:  # searched once, however many holes there are
            found = pattern.finditer(self._text)
            self._by_pattern[pattern] = [_Found(match.end(), match[pattern.groups]) for match in found]
        return self._by_pattern[pattern]


def _alike(key: str, name: str) -> bool:
    return key == name or name.endswith(f"_{key}") or key.endswith(f"_{name}")


def _read(literal: str) -> str:
    """The text of a JSON string or number; a broken string without its quotes."""
    try:
        return str(json.loads(literal)) if literal.startswith('"') else literal
    except ValueError:
        return literal.strip('"')


def _number(value: str) -> str:
    return value if _NUMBER.fullmatch(value) else ""


def _string_body(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)[1:-1]


_WRITTEN: dict[str, Callable[[str], str]] = {
    "text": str.strip,
    "string": _string_body,
    "number": _number,
    "json": lambda value: _number(value) or f'"{_string_body(value)}"',
}
"""How a value is written in a hole of each kind; "" where it does not fit."""
