"""The one table of colours by which terminal, demo page and replay page tell where a token came from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple


class Colour(NamedTuple):
    """The background on a page, the style on a terminal (as rich names it), and what the source is."""

    page: str
    terminal: str
    meaning: str


SOURCES = {
    "target": Colour("#e9e9e9", "default", "the model's own choice, one at the end of each forward pass"),
    "recall": Colour("#a7dfbb", "green", "earlier completions in the semantic cache"),
    "prompt": Colour("#b3d9ff", "cyan", "the conversation so far"),
    "template": Colour("#fff1a8", "yellow", "the forms of the agent's tool calls"),
    "draft-model": Colour("#ffc999", "magenta", "the draft model"),
    "prediction": Colour("#ffc2e8", "bright_magenta", "the caller's own guess"),
    "grammar": Colour("#cfc4ff", "bright_blue", "what the grammar leaves no alternative to"),
}
"""In the order of a legend."""

OTHERS = (
    Colour("#bfe8e8", "bright_cyan", "another drafter"),
    Colour("#f2b8b5", "red", "another drafter"),
    Colour("#dce8a6", "bright_yellow", "another drafter"),
)
"""For drafters of other packages, in the order in which they first appear."""


@dataclass(slots=True)
class Palette:
    """Colours of sources, those of other packages included; one palette for what is shown together."""

    _others: dict[str, Colour] = field(default_factory=dict)

    def of(self, source: str) -> Colour:
        """The colour of a source, always the same."""
        if source in SOURCES:
            return SOURCES[source]
        return self._others.setdefault(source, OTHERS[len(self._others) % len(OTHERS)])

    def legend(self, sources: Iterable[str]) -> list[tuple[str, Colour]]:
        """The sources that occur, each once, in the table's order, others behind."""
        seen = dict.fromkeys(sources)
        known = [name for name in SOURCES if name in seen]
        return [(name, self.of(name)) for name in (*known, *(name for name in seen if name not in SOURCES))]
