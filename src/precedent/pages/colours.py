"""The colours that show where a token came from, shared by terminal, demo page and replay page."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple


class Colour(NamedTuple):
    """The background on a page, the terminal style (in rich's names), and a description of the source."""

    page: str
    terminal: str
    meaning: str


SOURCES = {
    "target": Colour("#e9e9e9", "default", "the model's own token, one at the end of each forward pass"),
    "recall": Colour("#a7dfbb", "green", "earlier completions in the semantic cache"),
    "prompt": Colour("#b3d9ff", "cyan", "the conversation so far"),
    "template": Colour("#fff1a8", "yellow", "the forms of the agent's tool calls"),
    "draft-model": Colour("#ffc999", "magenta", "the draft model"),
    "prediction": Colour("#ffc2e8", "bright_magenta", "the caller's own guess"),
    "grammar": Colour("#cfc4ff", "bright_blue", "tokens that the grammar forces"),
}
"""Sources in legend order."""

OTHERS = (
    Colour("#f5b7a0", "blue", "another drafter"),
    Colour("#dcc7a8", "bright_green", "another drafter"),
    Colour("#f7d9a8", "bright_red", "another drafter"),
    Colour("#bfe8e8", "bright_cyan", "another drafter"),
    Colour("#f2b8b5", "red", "another drafter"),
    Colour("#dce8a6", "bright_yellow", "another drafter"),
)
"""For drafters of other packages, in order of first appearance."""


@dataclass(slots=True)
class Palette:
    """Assigns colours to sources, those of other packages included; share one palette for what is shown together."""

    _others: dict[str, Colour] = field(default_factory=dict)

    def of(self, source: str) -> Colour:
        """The colour of a source; the palette always gives the same one."""
        if source in SOURCES:
            return SOURCES[source]
        return self._others.setdefault(source, OTHERS[len(self._others) % len(OTHERS)])

    def legend(self, sources: Iterable[str]) -> list[tuple[str, Colour]]:
        """The sources that occur, each once, in the table's order, followed by all others."""
        seen = dict.fromkeys(sources)
        known = [name for name in SOURCES if name in seen]
        return [(name, self.of(name)) for name in (*known, *(name for name in seen if name not in SOURCES))]
