"""Draws a candidate tree as SVG: boxes of tokens, coloured by source, with the accepted path in bold."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

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


@dataclass(slots=True)
class _Box:
    """A run of nodes without a fork, of one source, all accepted or all rejected."""

    nodes: list[int]
    below: list[_Box] = field(default_factory=list)
    left: float = 0.0
    row: float = 0.0
    label: str = ""

    @property
    def right(self) -> float:
        return self.left + max(len(self.label), 2) * LETTER + 12


def tree_svg(seen: SeenTree, decode: Decode, palette: Palette) -> str:
    """Draw the tree as one SVG document; `decode` turns token ids into text."""
    root = _Box([ROOT], _boxes(seen, ROOT), MARGIN, label="…" + _visible(decode(seen.before[-CONTEXT_TOKENS:])))
    _label(root.below, seen, decode)
    rows = _place(root, 0)
    width = max(NARROWEST, *(box.right + MARGIN for box in _all(root)))
    height = MARGIN * 2 + rows * ROW + 44
    lines = sorted(_lines(root, seen), key=lambda line: STRONG in line)  # accepted lines lie on top
    shapes = [*lines, *(_drawn(box, seen, palette) for box in _all(root)), _legend(seen, height - 30, palette)]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}" font-family="ui-monospace, monospace" font-size="12">'
        f'<rect width="100%" height="100%" fill="#fff"/>{"".join(shapes)}</svg>'
    )


def _boxes(seen: SeenTree, above: int) -> list[_Box]:
    """The runs that begin below a node, likeliest first."""
    boxes = []
    for node in sorted(_children(seen, above), key=lambda node: -(seen.path_probability(node) or 0.0)):
        run = [node]
        while len(next_ones := _children(seen, run[-1])) == 1 and _alike(seen, run[-1], next_ones[0]):
            run.append(next_ones[0])
        boxes.append(_Box(run, _boxes(seen, run[-1])))
    return boxes


def _children(seen: SeenTree, above: int) -> list[int]:
    return [node for node, parent in enumerate(seen.tree.parents) if parent == above]


def _alike(seen: SeenTree, one: int, other: int) -> bool:
    same_source = seen.tree.sources[one][0] == seen.tree.sources[other][0]
    return same_source and (one in seen.path) == (other in seen.path)


def _label(boxes: Sequence[_Box], seen: SeenTree, decode: Decode) -> None:
    for box in boxes:
        text = _visible(decode([seen.tree.token_ids[node] for node in box.nodes]))
        box.label = text if len(text) <= LONGEST_LABEL else f"{text[:LONGEST_LABEL]}…"
        _label(box.below, seen, decode)


def _visible(text: str) -> str:
    return text.replace(" ", "·").replace("\n", "⏎")


def _place(box: _Box, row: int) -> int:
    """Place the box and everything below it, starting at `row`; returns the first free row."""
    first = row
    for child in box.below:
        child.left = box.right + GAP
        row = _place(child, row)
    box.row = box.below[0].row if box.below else first
    return max(row, first + 1)


def _all(box: _Box) -> Iterator[_Box]:
    yield box
    for child in box.below:
        yield from _all(child)


def _middle(box: _Box) -> float:
    return MARGIN + box.row * ROW + BOX / 2


def _lines(box: _Box, seen: SeenTree) -> Iterator[str]:
    for child in box.below:
        strong = child.nodes[0] in seen.path
        bend = child.left - GAP / 2
        yield (
            f'<path d="M{box.right:.1f} {_middle(box):.1f} H{bend:.1f} V{_middle(child):.1f} H{child.left:.1f}" '
            f'fill="none" {STRONG if strong else WEAK}/>'
        )
        yield from _lines(child, seen)


def _drawn(box: _Box, seen: SeenTree, palette: Palette) -> str:
    """Draw the box, its text, and below it the probability that the whole path to its end is accepted."""
    node = box.nodes[-1]
    strong = node == ROOT or node in seen.path
    colour = "#fff" if node == ROOT else palette.of(seen.tree.sources[node][0]).page
    top = _middle(box) - BOX / 2
    chance = seen.path_probability(node)
    told = "" if node == ROOT or chance is None else f"{chance:.2f}"
    return (
        f'<rect x="{box.left:.1f}" y="{top:.1f}" width="{box.right - box.left:.1f}" height="{BOX}" rx="4" '
        f'fill="{colour}" {STRONG if strong else WEAK}/>'
        f'<text x="{box.left + 6:.1f}" y="{top + 15:.1f}" fill="#222">{html.escape(box.label)}</text>'
        f'<text x="{box.right - 2:.1f}" y="{top + BOX + 10:.1f}" font-size="9" fill="#777" '
        f'text-anchor="end">{told}</text>'
    )


def _legend(seen: SeenTree, baseline: float, palette: Palette) -> str:
    parts, left = [], float(MARGIN)
    for source, colour in palette.legend(names[0] for names in seen.tree.sources):
        parts.append(f'<rect x="{left:.0f}" y="{baseline - 10:.0f}" width="12" height="12" fill="{colour.page}"/>')
        parts.append(f'<text x="{left + 17:.0f}" y="{baseline:.0f}">{html.escape(source)}</text>')
        left += 34 + len(source) * LETTER
    said = f"bold: accepted, {len(seen.path)} of {len(seen.tree)} nodes; small: probability expected of the whole path"
    return "".join(parts) + f'<text x="{MARGIN}" y="{baseline + 20:.0f}" fill="#555">{said}</text>'
