"""Tables in Markdown, and the roofline as an SVG."""

from __future__ import annotations

from collections.abc import Sequence
from math import log10
from typing import Any

COLOURS = {1: "#4c78a8", 8: "#72b7b2", 16: "#54a24b", 32: "#f58518", 64: "#e45756"}
LEFT, TOP, WIDTH, HEIGHT = 70, 20, 520, 300


def markdown(results: dict[str, Any]) -> str:
    """One table per part; what was not measured says why."""
    machine = results["machine"]
    lines = [
        f"{machine['device']}, torch {machine['torch']}, {machine['shape']}; a copy on the device moves "
        f"{machine['copy_bytes_per_second'] / 1e9:.0f} GB/s, a matrix product makes "
        f"{machine['matrix_flop_per_second'] / 1e12:.1f} TFLOP/s.",
    ]
    for part in results["parts"]:
        lines += ["", f"### {part['title']}", "", *table(part["rows"])]
        lines += [f"Not measured: {part['stopped']}."] if part["stopped"] else []
    return "\n".join([*lines, ""])


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A Markdown table of all columns that occur."""
    columns = list(dict.fromkeys(column for row in rows for column in row if column not in ("flop", "bytes")))
    if not columns:
        return []
    head = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return [*head, *("| " + " | ".join(_shown(row.get(column, "")) for column in columns) + " |" for row in rows), ""]


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "/")


def roofline(machine: dict[str, Any], steps: Sequence[dict[str, Any]]) -> str:
    """Steps by operations per byte and operations per second, below what memory and matrix units allow."""
    bandwidth, rate = machine["copy_bytes_per_second"], machine["matrix_flop_per_second"]
    points = [(row["flop"] / row["bytes"], row["flop"] / row["graph_ms"] * 1e3, row) for row in steps]
    xs, ys = [x for x, _, _ in points], [y for _, y, _ in points]
    span = _Span(min(xs) / 2, max(*xs, rate / bandwidth) * 2, min(ys) / 2, rate * 2)
    ridge = rate / bandwidth
    roof = " ".join(span.at(x, y) for x, y in ((span.x0, bandwidth * span.x0), (ridge, rate), (span.x1, rate)))
    pieces = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 400" font-family="sans-serif" font-size="13">',
        f'<polyline points="{roof}" fill="none" stroke="#333" stroke-width="2"/>',
        f'<text x="{LEFT}" y="{TOP + HEIGHT + 40}">operations per byte of weights, keys and values</text>',
        f'<text x="{LEFT}" y="14">TFLOP/s (both axes logarithmic); the line is the measured roof</text>',
    ]
    for x, y, row in points:
        place = span.at(x, y).split(",")
        pieces.append(
            f'<circle cx="{place[0]}" cy="{place[1]}" r="5" fill="{COLOURS.get(row["tokens"], "#888")}">'
            f"<title>{row['tokens']} tokens behind {row['length']}: {row['graph_ms']:.2f} ms, "
            f"{row['times_the_floor']:.2f} times the floor</title></circle>"
        )
    for number, (tokens, colour) in enumerate(COLOURS.items()):
        x = LEFT + 100 * number
        pieces.append(f'<rect x="{x}" y="{TOP + HEIGHT + 52}" width="12" height="12" fill="{colour}"/>')
        pieces.append(f'<text x="{x + 18}" y="{TOP + HEIGHT + 63}">{tokens} tokens</text>')
    return "\n".join([*pieces, "</svg>", ""])


class _Span:
    """Places in the picture, both axes logarithmic."""

    def __init__(self, x0: float, x1: float, y0: float, y1: float) -> None:
        self.x0, self.x1, self.y0, self.y1 = x0, x1, y0, y1

    def at(self, x: float, y: float) -> str:
        """The place of a point, as SVG writes it."""
        across = log10(max(x, self.x0) / self.x0) / log10(self.x1 / self.x0)
        up = log10(max(y, self.y0) / self.y0) / log10(self.y1 / self.y0)
        return f"{LEFT + WIDTH * across:.1f},{TOP + HEIGHT * (1 - up):.1f}"
