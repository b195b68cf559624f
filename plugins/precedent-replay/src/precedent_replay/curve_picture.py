"""Plots tokens per step against verified nodes per step as SVG, one line per contender."""

from __future__ import annotations

import html
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 760, 440, 52, 20, 190, 44
LETTERS_HIGH = 15
_OURS = ("#1b7f4b", "#52b788", "#95d5b2", "#2d6a4f")
_BASELINES = ("#d1495b", "#edae49", "#8d5a97", "#00798c", "#30638e", "#7f5539", "#6c757d", "#e07a5f")

Row = Mapping[str, Any]


def curve_svg(rows: Sequence[Row]) -> str:
    """Draw the `drafters` rows of a replay, without ablations."""
    kept = [row for row in rows if not row["without"]]
    most_nodes = max([row["draft_tokens_per_step"] for row in kept] + [1.0]) * 1.05
    most_tokens = max([row["tokens_per_step"] for row in kept] + [2.0]) * 1.08
    lines: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in kept:
        lines[row["name"].split(" @")[0], row["curve"]].append(row)
    colours = {True: iter(_BASELINES * len(kept)), False: iter(_OURS * len(kept))}
    drawn = [
        _Line(
            f"{name} ({curve})" if curve not in ("", "flat") else name,
            sorted(
                (_x(row["draft_tokens_per_step"], most_nodes), _y(row["tokens_per_step"], most_tokens)) for row in of
            ),
            next(colours[of[0]["baseline"]]),
            of[0]["baseline"],
        )
        for (name, curve), of in lines.items()
    ]
    shapes = [_axes(most_nodes, most_tokens), *(line.svg for line in drawn), *_names(drawn)]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'font-family="system-ui, sans-serif" font-size="12"><rect width="100%" height="100%" fill="#fff"/>'
        f"{''.join(shapes)}</svg>"
    )


@dataclass(frozen=True, slots=True)
class _Line:
    """One contender at all its budgets, in order of nodes."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: str
    baseline: bool

    @property
    def svg(self) -> str:
        dash = ' stroke-dasharray="5 3"' if self.baseline else ""
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in self.points)
        dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{self.colour}"/>' for x, y in self.points)
        return f'<polyline points="{points}" fill="none" stroke="{self.colour}" stroke-width="2"{dash}/>{dots}'


def _names(lines: Sequence[_Line]) -> Iterator[str]:
    """The names beside the picture, at the height where their lines end but without overlap."""
    left, free = WIDTH - RIGHT + 14, 0.0
    for line in sorted(lines, key=lambda line: line.points[-1][1]):
        x, y = line.points[-1]
        free = max(free + LETTERS_HIGH, y)
        yield (
            f'<path d="M{x + 5:.1f} {y:.1f} L{left - 4} {free:.1f}" stroke="{line.colour}" stroke-width="0.5" '
            f'opacity="0.6"/><text x="{left}" y="{free + 4:.1f}" fill="{line.colour}">{html.escape(line.name)}</text>'
        )


def _x(nodes: float, most: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * nodes / most


def _y(tokens: float, most: float) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (tokens - 1.0) / max(most - 1.0, 1e-9)


def _axes(most_nodes: float, most_tokens: float) -> str:
    parts = []
    for tokens in range(1, int(most_tokens) + 1):
        at = _y(tokens, most_tokens)
        parts.append(f'<path d="M{LEFT} {at:.1f} H{WIDTH - RIGHT}" stroke="#e5e5e5"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{tokens}</text>')
    step = max(1, round(most_nodes / 8))
    for nodes in range(0, int(most_nodes) + 1, step):
        at = _x(nodes, most_nodes)
        parts.append(f'<text x="{at:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{nodes}</text>')
    parts.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">nodes per step</text>')
    parts.append(f'<text x="{LEFT}" y="{TOP - 6}" text-anchor="start">tokens per step</text>')
    return "".join(parts)
