"""Draws a candidate tree as SVG: boxes of tokens, coloured by source, with the accepted path in bold."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from precedent.pages.colours import Palette
from precedent.tree import ROOT, CandidateTree

LETTER, ROW, BOX, GAP, MARGIN = 7.3, 36, 22, 26, 14
NARROWEST = 620.0
LONGEST_LABEL = 60
STRONG, WEAK = 'stroke="#222" stroke-width="2"', 'stroke="#bbb" stroke-width="1"'
CONTEXT_TOKENS = 8

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class SeenTree:
    """One step: the tree, its accepted path, the tokens before it, and the estimates.

    `estimates` are the probabilities that the first nodes are accepted once their parents are, `[num_estimated]`;
    samples, which come after them, have none.
    """

    tree: CandidateTree
    path: tuple[int, ...]
    before: tuple[int, ...]
    estimates: tuple[float, ...]

    def path_probability(self, node: int) -> float | None:
        """The probability expected of the whole path to a node; None if a sample lies on it."""
        chance = 1.0
        while node != ROOT:
            if node >= len(self.estimates):
                return None
            chance *= self.estimates[node]
            node = self.tree.parents[node]
        return chance

    @property
    def interest(self) -> float:
        """How interesting the picture is: branches, several sources, a long but partial path; 0 for a bad picture."""
        children = [parent for parent in self.tree.parents if parent != ROOT]
        forks = len(children) - len(set(children))
        sources = len({self.tree.sources[node][0] for node in self.path})
        if not self.before or not 8 <= len(self.tree) <= 48 or len(self.path) < 3:
            return 0.0
        return 2.0 * min(forks, 5) + min(len(self.path), 12) + 4.0 * sources


def tree_svg(seen: SeenTree, decode: Decode, palette: Palette) -> str:
    """Draw the tree as one SVG document; `decode` turns token ids into text."""
    picture = _Picture(seen, decode, palette)
    before = "…" + _visible(decode(seen.before[-CONTEXT_TOKENS:]))
    rows = picture.draw([ROOT], before, MARGIN, 0)
    width, height = max(NARROWEST, picture.right + MARGIN), MARGIN * 2 + rows * ROW + 44
    lines = sorted(picture.lines, key=lambda line: STRONG in line)  # accepted lines lie on top
    shapes = "".join([*lines, *picture.boxes, _legend(seen, height - 30, palette)])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}" font-family="ui-monospace, monospace" font-size="12">'
        f'<rect width="100%" height="100%" fill="#fff"/>{shapes}</svg>'
    )


class _Picture:
    """Boxes and the lines between them; each box is a run of nodes without a fork, of one source and one fate."""

    def __init__(self, seen: SeenTree, decode: Decode, palette: Palette) -> None:
        self.lines, self.boxes, self.right = list[str](), list[str](), 0.0
        self._seen, self._decode, self._palette = seen, decode, palette

    def draw(self, run: Sequence[int], label: str, left: float, row: int) -> int:
        """Draw the box of a run in a row and everything below it, likeliest first; returns the first free row."""
        right, middle = left + max(len(label), 2) * LETTER + 12, MARGIN + row * ROW + BOX / 2
        self.right = max(self.right, right)
        self.boxes.append(self._box(run[-1], label, left, right, middle - BOX / 2))
        first = row
        for node in sorted(self._children(run[-1]), key=lambda node: -(self._seen.path_probability(node) or 0.0)):
            end, bend = MARGIN + row * ROW + BOX / 2, right + GAP / 2
            self.lines.append(
                f'<path d="M{right:.1f} {middle:.1f} H{bend:.1f} V{end:.1f} H{right + GAP:.1f}" '
                f'fill="none" {STRONG if node in self._seen.path else WEAK}/>'
            )
            below = self._run_from(node)
            text = _visible(self._decode([self._seen.tree.token_ids[one] for one in below]))
            short = text if len(text) <= LONGEST_LABEL else f"{text[:LONGEST_LABEL]}…"
            row = self.draw(below, short, right + GAP, row)
        return max(row, first + 1)

    def _children(self, above: int) -> list[int]:
        return [node for node, parent in enumerate(self._seen.tree.parents) if parent == above]

    def _run_from(self, node: int) -> list[int]:
        run, fate = [node], self._fate(node)
        while len(below := self._children(run[-1])) == 1 and self._fate(below[0]) == fate:
            run.append(below[0])
        return run

    def _fate(self, node: int) -> tuple[str, bool]:
        return self._seen.tree.sources[node][0], node in self._seen.path

    def _box(self, node: int, label: str, left: float, right: float, top: float) -> str:
        """A box with its text, and below it the probability that the whole path to its end is accepted."""
        strong = node == ROOT or node in self._seen.path
        colour = "#fff" if node == ROOT else self._palette.of(self._seen.tree.sources[node][0]).page
        chance = None if node == ROOT else self._seen.path_probability(node)
        told = "" if chance is None else f"{chance:.2f}"
        return (
            f'<rect x="{left:.1f}" y="{top:.1f}" width="{right - left:.1f}" height="{BOX}" rx="4" '
            f'fill="{colour}" {STRONG if strong else WEAK}/>'
            f'<text x="{left + 6:.1f}" y="{top + 15:.1f}" fill="#222">{html.escape(label)}</text>'
            f'<text x="{right - 2:.1f}" y="{top + BOX + 10:.1f}" font-size="9" fill="#777" '
            f'text-anchor="end">{told}</text>'
        )


def _visible(text: str) -> str:
    return text.replace(" ", "·").replace("\n", "⏎")


def _legend(seen: SeenTree, baseline: float, palette: Palette) -> str:
    parts, left = [], float(MARGIN)
    for source, colour in palette.legend(names[0] for names in seen.tree.sources):
        parts.append(f'<rect x="{left:.0f}" y="{baseline - 10:.0f}" width="12" height="12" fill="{colour.page}"/>')
        parts.append(f'<text x="{left + 17:.0f}" y="{baseline:.0f}">{html.escape(source)}</text>')
        left += 34 + len(source) * LETTER
    said = f"bold: accepted, {len(seen.path)} of {len(seen.tree)} nodes; small: probability expected of the whole path"
    return "".join(parts) + f'<text x="{MARGIN}" y="{baseline + 20:.0f}" fill="#555">{said}</text>'
