"""Draws what the lossy modes gain and lose as SVG: rejections against variation, success against tokens per step."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

WIDTH, HEIGHT, TOP, BOTTOM = 860, 380, 34, 44
COLOURS = {
    "auto": "#444444", "lossy_mentored": "#1b7f4b", "lossy_typical": "#d1495b", "lossy_top_beta": "#a06a00",
    "lossy_judge": "#30638e",
}  # fmt: skip
LETTERS_HIGH = 13
LEADER = 48


@dataclass(frozen=True, slots=True)
class Panel:
    """A plot between `left` and `right`; `most_x`, `low_y` and `most_y` are the ends of its axes."""

    left: float
    right: float
    low_x: float
    most_x: float
    low_y: float
    most_y: float

    def x(self, value: float) -> float:
        """Where a value of the horizontal axis lies."""
        return self.left + (self.right - self.left) * (value - self.low_x) / (self.most_x - self.low_x)

    def y(self, value: float) -> float:
        """Where a value of the vertical axis lies."""
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (value - self.low_y) / (self.most_y - self.low_y)

    def axes(self, x_name: str, y_name: str, x_ticks: Sequence[float], y_ticks: Sequence[float]) -> Iterator[str]:
        """Lines, numbers and names."""
        for tick in y_ticks:
            at = self.y(tick)
            yield f'<path d="M{self.left} {at:.1f} H{self.right}" stroke="#e5e5e5"/>'
            yield f'<text x="{self.left - 6}" y="{at + 4:.1f}" text-anchor="end">{tick:g}</text>'
        for tick in x_ticks:
            yield f'<text x="{self.x(tick):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{tick:g}</text>'
        yield f'<text x="{(self.left + self.right) / 2}" y="{HEIGHT - 8}" text-anchor="middle">{x_name}</text>'
        yield f'<text x="{self.left}" y="{TOP - 14}">{y_name}</text>'

    def dots(self, points: Sequence[tuple[str, float, float]]) -> Iterator[str]:
        """A dot for each (mode, x, y), and a line to its name; names do not overlap."""
        free = -1.0
        for mode, x, y in sorted(points, key=lambda point: (-point[2], -point[1])):
            across, down = self.x(x), self.y(y)
            free, end = max(free + LETTERS_HIGH, down), across + LEADER
            colour, name = colour_of(mode), html.escape(short(mode))
            yield (
                f'<path d="M{across:.1f} {down:.1f} L{end:.1f} {free:.1f}" stroke="{colour}" opacity="0.5"/>'
                f'<circle cx="{across:.1f}" cy="{down:.1f}" r="3.5" fill="{colour}"/>'
                f'<text x="{end + 3:.1f}" y="{free + 4:.1f}" fill="{colour}">{name}</text>'
            )


def lossy_svg(conversations: Sequence[dict[str, Any]], of_rows: dict[str, Any]) -> str:
    """The picture: the rows of the draft model, and greedy conversations."""
    greedy = [each for each in conversations if each["temperature"] == 0.0]
    shapes = [*_front(of_rows), *_success(greedy)]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'font-family="system-ui, sans-serif" font-size="11" role="img">'
        "<title>Left: every mode lies on the Pareto front. Right: requests solved against tokens per step.</title>"
        f'<rect width="100%" height="100%" fill="#fff"/>{"".join(shapes)}</svg>\n'
    )


def _front(of_rows: dict[str, Any]) -> Iterator[str]:
    least, points = of_rows["least_rejections"], of_rows["points"]
    most = least * 1.08
    panel = Panel(52, 370, 0.0, most, 0.0, most)
    ticks = [tick / 100 for tick in range(0, int(most * 100) + 1, max(1, int(most * 100) // 5))]
    yield from panel.axes("total variation per node", "rejections per node, temperature 1", ticks, ticks)
    yield (
        f'<path d="M{panel.x(0.0):.1f} {panel.y(least):.1f} L{panel.x(least):.1f} {panel.y(0.0):.1f}" '
        'stroke="#999" stroke-width="1.5"/>'
    )
    yield from panel.dots([(each["mode"], each["total_variation"], each["rejections"]) for each in points])


def _success(greedy: Sequence[dict[str, Any]]) -> Iterator[str]:
    speeds = [each["tokens_per_step"] for each in greedy]
    low, most = min(speeds) - 0.3, max(speeds) + 2.2
    panel = Panel(460, WIDTH - 14, low, most, 0.0, 1.0)
    steps = [tick for tick in range(1, 12) if low <= tick <= most]
    yield from panel.axes("tokens per step, greedy", "requests solved, 95 % interval", steps, (0, 0.25, 0.5, 0.75, 1))
    for each in greedy:
        at, (bottom, top) = panel.x(each["tokens_per_step"]), each["interval"]
        yield (
            f'<path d="M{at:.1f} {panel.y(bottom):.1f} V{panel.y(top):.1f}" stroke="{colour_of(each["mode"])}" '
            'stroke-width="1.5" opacity="0.5"/>'
        )
    yield from panel.dots(
        [(each["mode"], each["tokens_per_step"], each["solved"] / each["requests"]) for each in greedy]
    )


def colour_of(mode: str) -> str:
    """The colour of a mode's kind."""
    return COLOURS[mode.partition(":")[0]]


def short(mode: str) -> str:
    """A mode's name without what all share."""
    if mode == "auto":
        return "lossless"
    judges = {"name=order-desk-divergence": "divergence", "name=order-desk": "trained"}
    for name, shown in judges.items():
        mode = mode.replace(name, shown)
    return mode.removeprefix("lossy_").replace(":", " ").replace(",", ", ")
