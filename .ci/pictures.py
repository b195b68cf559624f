"""Draws the pictures in `docs/images` that show figures (for `.ci/figures.py`), and the tree of a real step.

    python .ci/pictures.py    # serves the order desk and draws its most telling tree, which varies with measured times

Each picture has its own light background, so that it can be read on dark pages as well.
"""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
INK, GREY, PAPER, GRID = "#1a202c", "#4a5568", "#ffffff", "#e2e8f0"
OURS, THEIRS, PROMPT = "#2f855a", "#a0aec0", "#2b6cb0"
PARTS = ("#e0a93b", "#4c78a8", "#72b7b2", "#54a24b", "#bab0ac", "#f58518", "#e45756", "#b279a2")
WARMING, LOOKED_AT, WIDEST = 12, 12, 1400
"""Requests that fill the cache, and requests whose steps are looked at; the widest tree in pixels."""


def text(x: float, y: float, words: str, *, anchor: str = "start", size: int = 13, fill: str = INK) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{fill}">'
        f"{html.escape(words)}</text>"
    )


def box(x: float, y: float, width: float, height: float, fill: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{fill}"/>'


def picture(width: int, height: int, title: str, parts: Iterator[str]) -> str:
    """Return a whole SVG document."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="system-ui, sans-serif">\n<title>{html.escape(title)}</title>\n'
        f'<rect width="{width}" height="{height}" rx="8" fill="{PAPER}"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def legend(x: float, y: float, entries: Sequence[tuple[str, str]]) -> Iterator[str]:
    for name, colour in entries:
        yield box(x, y - 11, 13, 13, colour)
        yield text(x + 20, y, name)
        x += 44 + 7 * len(name)


# Steps by their rows, against llama.cpp


def rows(measured: dict[str, Any]) -> str:
    """Draw the milliseconds of a step by its rows, of our kernels and of llama.cpp."""
    panels = {"smollm2": "SmolLM2-135M, its Q4_1 file", "1b": "1B shape, Q4_K_M"}

    def parts() -> Iterator[str]:
        yield text(24, 32, "Milliseconds of a step by the number of tokens that it checks", size=16)
        yield from legend(24, 60, [("Precedent", OURS), ("llama.cpp, same file", THEIRS)])
        for place, (name, label) in enumerate(panels.items()):
            yield from bars(24 + 440 * place, label, measured["figures"][name]["rows"])
        yield text(450, 362, "tokens checked in one step", anchor="middle", fill=GREY)
        yield text(24, 386, place_of(measured), size=11, fill=GREY)

    return picture(900, 404, "Milliseconds of a step over 1 to 32 tokens, Precedent and llama.cpp", parts())


def place_of(measured: dict[str, Any]) -> str:
    """Say where and when figures were measured."""
    machine = measured["machine"]
    load = f", load {machine['load_before']:g}"
    return f"{machine['processor']} ({machine['instructions']}), {machine['cores']} cores{load}, {measured['date']}"


def bars(left: float, label: str, steps: Sequence[dict[str, float]]) -> Iterator[str]:
    """Draw one panel of pairs of bars."""
    bottom, wide = 320.0, 28.0
    scale = 200 / max(step["llama.cpp"] for step in steps)
    yield text(left, 96, label, fill=GREY)
    for place, step in enumerate(steps):
        x = left + 4 + place * 69
        for offset, way, colour in ((0.0, "ours", OURS), (wide + 2, "llama.cpp", THEIRS)):
            height = step[way] * scale
            yield box(x + offset, bottom - height, wide, height, colour)
            yield text(x + offset + wide / 2, bottom - height - 5, f"{step[way]:.0f}", anchor="middle", size=11)
        yield text(x + wide + 1, bottom + 18, f"{step['rows']:.0f}", anchor="middle", fill=GREY)
    yield f'<path d="M{left} {bottom} h414" stroke="{GREY}"/>'


# The memory as it fills


def filling(measured: dict[str, Any]) -> str:
    """Draw tokens per step by the number of completions in the cache."""
    figures = measured["figures"]
    sizes = [size for size in figures["sizes"] if size["answers"]]
    most = max(size["with the cache"] for size in sizes)
    left, bottom, width, height = 60.0, 320.0, 800.0, 220.0
    xs = [left + width * (place + 0.5) / len(sizes) for place in range(len(sizes))]

    def line(way: str) -> list[tuple[float, float]]:
        return [(x, bottom - height * size[way] / most) for x, size in zip(xs, sizes, strict=True)]

    def parts() -> Iterator[str]:
        yield text(24, 32, "Tokens per step as the cache fills", size=16)
        yield from legend(24, 60, [("with the cache", OURS), ("from the prompt alone", PROMPT)])
        for tick in range(int(most) + 1):
            y = bottom - height * tick / most
            yield f'<path d="M{left} {y:.1f} h{width}" stroke="{GRID}"/>'
            yield text(left - 10, y + 4, str(tick), anchor="end", size=11, fill=GREY)
        for way, colour, above in (("with the cache", OURS, -10), ("without the cache", PROMPT, 20)):
            points = line(way)
            drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            yield f'<polyline points="{drawn}" fill="none" stroke="{colour}" stroke-width="3"/>'
            for (x, y), size in zip(points, sizes, strict=True):
                yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>'
                yield text(x, y + above, f"{size[way]:.1f}", anchor="middle", size=12, fill=colour)
        for x, size in zip(xs, sizes, strict=True):
            yield text(x, bottom + 20, f"{size['completions']:,}", anchor="middle", fill=GREY)
        yield text(left + width / 2, bottom + 42, "at least so many answers in the cache", anchor="middle", fill=GREY)
        what = f"{figures['conversations']:,} recorded conversations of tau-bench's airline desk, in their order"
        yield text(24, bottom + 68, f"{what}: {figures['completions']:,} answers.", size=11, fill=GREY)

    return picture(900, 405, "Tokens per step by the number of answers in the cache", parts())


# The parts of a step


def step(measured: dict[str, Any]) -> str:
    """Draw the milliseconds of a step by part, without and with a candidate tree."""
    ways = {way: found["parts"] for way, found in measured["figures"].items()}
    scale = 600 / max(sum(parts.values()) for parts in ways.values())

    def parts() -> Iterator[str]:
        for row, (way, spent) in enumerate(ways.items()):
            left, top = 130.0, 24.0 + 48 * row
            yield text(left - 10, top + 20, way, anchor="end")
            for colour, taken in zip(PARTS, spent.values(), strict=True):
                yield box(left, top, taken * scale, 30, colour)
                left += taken * scale
            yield text(left + 8, top + 20, f"{sum(spent.values()):.1f} ms")
        for number, (name, colour) in enumerate(zip(spent, PARTS, strict=True)):
            yield from legend(130 + 180 * (number % 4), 150 + 26 * (number // 4), [(name, colour)])
        yield text(24, 212, place_of(measured), size=11, fill=GREY)

    return picture(850, 228, "Milliseconds of a step by part, without and with a candidate tree", parts())


DRAWN: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    "rows.svg": ("gguf-avx512-bf16", rows),
    "filling.svg": ("filling", filling),
    "step.svg": ("steps", step),
}
"""Pictures, the file of figures that each shows, and what draws it."""


def drawn(root: Path) -> dict[Path, str]:
    """Draw the pictures of the figures in a project's folder."""
    docs = root / "docs"
    return {
        docs / "images" / name: draw(json.loads((docs / "figures" / f"{file}.json").read_text(encoding="utf-8")))
        for name, (file, draw) in DRAWN.items()
    }


# The tree of a real step


def tree() -> str:
    """Draw the most telling tree that the engine verified while it served the order desk's requests."""
    from precedent import ChatPrecedent, Engine, SpeculationCache
    from precedent.pages.colours import Palette
    from precedent.pages.tree_picture import tree_svg
    from precedent_demo import (
        MAX_TOKENS_PER_TURN,
        adapted_target,
        draft_folder,
        make_database,
        make_requests,
        run_request,
    )
    from precedent_server.microscope import Microscope

    desk, seen = make_database(seed=0), Microscope(10_000)
    engine = Engine.load(adapted_target(), cache=SpeculationCache.open(), draft_model=str(draft_folder()))
    llm = ChatPrecedent.from_engine(engine, max_tokens=MAX_TOKENS_PER_TURN, temperature=0)
    for request in make_requests("A", full=True, seed=0)[:WARMING]:
        run_request(llm, request, desk)
    engine.watch_steps(seen)
    for request in make_requests("B", full=True, seed=0)[:LOOKED_AT]:
        run_request(llm, request, desk)
    steps = sorted((step.seen for step in seen.steps()), key=lambda step: step.interest, reverse=True)
    pictures = (tree_svg(step, lambda ids: str(engine.tokenizer.decode(ids)), Palette()) for step in steps)
    found = next(one for one in pictures if float(one.split('width="')[1].split('"')[0]) <= WIDEST)
    engine.close()
    return found


if __name__ == "__main__":
    (ROOT / "docs" / "images" / "tree.svg").write_text(tree() + "\n", encoding="utf-8")
