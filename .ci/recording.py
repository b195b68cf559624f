"""Records commands in a terminal: `docs/images/recording.cast` for asciinema, and as an animated picture.

    python .ci/recording.py    # in the environment of `make demo`, on a machine that has compiled the kernels

The commands run in an empty folder, with the program that the first lesson saves there. What they print is recorded as
they print it, except that pauses longer than `LONGEST_PAUSE` are cut, and lines that only say how long something takes.
"""

from __future__ import annotations

import codecs
import html
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rich.ansi import AnsiDecoder
from rich.cells import cell_len
from rich.console import Console
from rich.segment import Segment
from rich.terminal_theme import SVG_EXPORT_THEME as THEME

ROOT = Path(__file__).parents[1]
IMAGES, LESSON = ROOT / "docs" / "images", ROOT / "docs" / "tutorial" / "first-agent.md"

COMMANDS = (
    'precedent run "Name three rivers." --cache mine --max-tokens 60 --show-sources',
    'precedent run "Name three rivers, please." --cache mine --max-tokens 60 --show-sources',
    "python agent.py",
    "python agent.py",
    "precedent cache stats agent-cache",
)
COLUMNS, ROWS = 100, 26
LONGEST_PAUSE, KEYSTROKE, READING, LONGEST = 1.5, 0.04, 2.5, 90.0
"""Seconds: of a pause, of a typed letter, before the next command, and of the whole."""

PROGRESS = re.compile(r"^[a-z][^\n]* \((?:\d+ min )?\d+ s\)\n", re.MULTILINE)

LETTER, LINE, MARGIN = 8.4, 19.0, 14.0
"""Pixels of a letter and of a line, and around the text."""


@dataclass
class Recording:
    """Pieces of output with their seconds from the start."""

    pieces: list[tuple[float, str]] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, pause: float, text: str) -> None:
        self.seconds += min(pause, LONGEST_PAUSE)
        self.pieces.append((round(self.seconds, 1), text))

    def type(self, command: str) -> None:
        self.add(0.0, "\x1b[1m$ ")
        for letter in command:
            self.add(KEYSTROKE, letter)
        self.add(0.3, "\x1b[0m\r\n")

    def run(self, command: str, folder: Path) -> None:
        """Run a command and record what it prints."""
        paths = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        environment = os.environ | {"PATH": paths, "COLUMNS": str(COLUMNS)}
        with subprocess.Popen(
            command, shell=True, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ) as process:
            assert process.stdout is not None
            decoder, before = codecs.getincrementaldecoder("utf-8")(), time.monotonic()
            while read := os.read(process.stdout.fileno(), 4096):
                now, text = time.monotonic(), PROGRESS.sub("", decoder.decode(read))
                if text:
                    self.add(now - before, text.replace(str(Path.home()), "~").replace("\n", "\r\n"))
                    before = now
        if process.returncode:
            raise SystemExit(f"{command} ended with status {process.returncode}: {self.pieces[-1][1]}")
        self.seconds += READING

    @classmethod
    def of(cls, cast: str) -> Recording:
        """Read a recording in asciinema's format."""
        return cls([(when, text) for when, _, text in map(json.loads, cast.splitlines()[1:])])

    def as_cast(self) -> str:
        """Return the recording in asciinema's format, version 2."""
        header = {"version": 2, "width": COLUMNS, "height": ROWS, "title": "Precedent"}
        lines = [header, *([when, "o", text] for when, text in self.pieces)]
        return "".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in lines)

    def placed(self) -> Iterator[tuple[float, int, int, Segment]]:
        """Yield the parts of the text with their second, line and column, as a terminal of `COLUMNS` wraps them."""
        decoder, console, line, column = AnsiDecoder(), Console(width=COLUMNS), 0, 0
        for when, text in self.pieces:
            for number, part in enumerate(text.split("\r\n")):
                if number:
                    line, column = line + 1, 0
                for segment in decoder.decode_line(part).render(console):
                    rest = segment.text
                    while rest:
                        if column == COLUMNS:
                            line, column = line + 1, 0
                        fits, rest = rest[: COLUMNS - column], rest[COLUMNS - column :]
                        yield when, line, column, Segment(fits, segment.style)
                        column += cell_len(fits)

    def as_svg(self) -> str:
        """Return a picture that plays the recording, and shows its end to who wants no motion."""
        moments, scrolled = defaultdict[float, list[str]](list), {0.0: 0}
        for when, line, column, segment in self.placed():
            moments[when].append(drawn(segment, column, line))
            scrolled[when] = max(0, line - ROWS + 2)
        width, height, whole = COLUMNS * LETTER + 2 * MARGIN, ROWS * LINE + 2 * MARGIN, self.pieces[-1][0] + 2 * READING
        frames = "".join(f"{when / whole:.2%}{{{moved(up)}}}" for when, up in scrolled.items())
        style = [
            "text{white-space:pre}",
            f"g{{animation:{whole:.1f}s step-end infinite}}",
            f"#all{{animation-name:all;{moved(max(scrolled.values()))}}}@keyframes all{{{frames}}}",
            *(
                f"#t{place}{{animation-name:t{place}}}"
                f"@keyframes t{place}{{0%{{opacity:0}}{when / whole:.2%}{{opacity:1}}}}"
                for place, when in enumerate(moments)
            ),
            "@media (prefers-reduced-motion:reduce){g{animation:none!important}}",
        ]
        groups = (f'<g id="t{place}">{"".join(texts)}</g>' for place, texts in enumerate(moments.values()))
        return "\n".join([
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
            f'height="{height:.0f}" font-family="ui-monospace, Menlo, Consolas, monospace" font-size="14" '
            f'fill="{THEME.foreground_color.hex}">',
            "<title>Commands in a terminal, and what they print</title>",
            f"<style>\n{chr(10).join(style)}\n</style>",
            f'<rect width="100%" height="100%" rx="8" fill="{THEME.background_color.hex}"/>',
            f'<svg x="{MARGIN}" y="{MARGIN}" width="{COLUMNS * LETTER}" height="{ROWS * LINE}"><g id="all">',
            *groups,
            "</g></svg></svg>\n",
        ])  # fmt: skip


def moved(lines: int) -> str:
    return f"transform:translateY({-LINE * lines}px)"


def drawn(segment: Segment, column: int, line: int) -> str:
    """Draw a piece of a line in its colour."""
    style, words = segment.style, segment.text
    if not words.strip():
        return ""
    colour = style.color.get_truecolor(THEME).hex if style and style.color else ""
    marks = (f' fill="{colour}"' if colour else "") + (' font-weight="bold"' if style and style.bold else "")
    length = cell_len(words) * LETTER
    place = f'x="{column * LETTER:.1f}" y="{line * LINE + 14:.0f}" textLength="{length:.1f}"'
    return f"<text {place}{marks}>{html.escape(words)}</text>"


def main() -> None:
    recording = Recording()
    program = re.search(
        r"Save this as `agent.py`:\n\n```python\n(.*?)```", LESSON.read_text(encoding="utf-8"), re.DOTALL
    )
    assert program is not None
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "agent.py").write_text(program[1], encoding="utf-8")
        for command in COMMANDS:
            recording.type(command)
            recording.run(command, Path(folder))
    (IMAGES / "recording.cast").write_text(recording.as_cast(), encoding="utf-8")
    (IMAGES / "recording.svg").write_text(recording.as_svg(), encoding="utf-8")
    if recording.seconds > LONGEST:
        raise SystemExit(f"the recording takes {recording.seconds:.0f} seconds: at most {LONGEST:.0f} are shown")


if __name__ == "__main__":
    main()
