"""Writes the documentation's tables and pictures of figures from the files in `docs/figures`.

    python .ci/figures.py              # writes them
    python .ci/figures.py --check      # the exit status is 1 if one does not show what its files say

A table is between `<!-- figures NAME -->` and `<!-- end -->` on a page; `.ci/tables.md` contains its lines.
"""

from __future__ import annotations

import json
import re
import string
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from pictures import drawn

ROOT = Path(__file__).parents[1]
CLASSES = ("amx", "avx512-bf16", "avx512", "avx2")  # best first
# keys by which a path finds an element of a list: `[runs][both]` is the run whose name is `both`
NAMES = ("name", "mode", "way", "without", "rows", "minute", "completions")
REGION = re.compile(r"<!-- figures (?P<name>[\w-]+) -->\n(?P<shown>.*?)<!-- end -->", re.DOTALL)
LINE = re.compile(r"(?P<kind>each|of) (?P<file>[\w*-]+)(?P<path>(\[[^\]]+\])*): (?P<text>.*)")
KERNELS = re.compile(r"(PRECEDENT_CPU_KERNELS=\w+ )?(.*)")
QUIET = 0.75  # load before a measurement up to which a page does not mention other programs


class Node:
    """A mapping or a list of a file; elements of a list are found by their name or their number."""

    def __init__(self, found: Any) -> None:
        self.found = found

    def __getitem__(self, key: str) -> Any:
        if isinstance(self.found, list):
            named = [one for one in self.found if isinstance(one, dict) and key in {str(one.get(n)) for n in NAMES}]
            found = named[0] if named else self.found[int(key)]
        else:
            found = self.found[key]
        return Node(found) if isinstance(found, (dict, list)) else found


class Cells(string.Formatter):
    """Formats a line; null is empty. `!c` is a ratio's change in percent, `!k` a thousandth."""

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> tuple[Any, str]:
        found: Any = Node(kwargs)
        for key in re.findall(r"[^\[\]]+", field_name):
            found = None if found is None else found[key]
        return found, field_name

    def convert_field(self, value: Any, conversion: str | None) -> Any:
        if value is None or conversion is None:
            return value
        return {"c": 100 * (value - 1), "k": value / 1000}[conversion]

    def format_field(self, value: Any, format_spec: str) -> str:
        text = format(value, format_spec) if isinstance(value, (int, float)) else value or ""
        return str(text).replace("-", "−", text[:1] == "-")


COUNTED = re.compile(r"bench_replay\.sh|bench_branches\.py|precedent replay")
"""What only counts tokens, which no machine changes."""

CELLS = Cells()


@dataclass(frozen=True)
class File:
    """One file: its figures with `label` and `command` beside them, and what the line below a table says."""

    figures: dict[str, Any]
    typed: str
    date: str
    place: str


def read(path: Path) -> File:
    """Read one file of figures."""
    found = json.loads(path.read_text(encoding="utf-8"))
    machine, typed, kind = found["machine"], found["command"], found["machine"]["instructions"]
    load, remarks = machine["load_before"] or 0, ["limited"] * bool(machine.get("limited"))
    remarks += [f"beside other programs (load {load:g})"] * (load > QUIET) + machine.get("remarks", [])
    remark = "".join(f", {one}" for one in remarks)
    place = f"{machine['processor']} ({kind}), {machine['cores']} cores{remark}"
    shown = {"label": kind + remark, "command": typed.removeprefix("python benchmarks/")}
    return File(found["figures"] | shown, typed, found["date"], place)


def rank(path: Path) -> tuple[int, str]:
    """Sort the files of a measurement by machine, the best first."""
    return next((n for n, name in enumerate(CLASSES) if f"-{name}" in path.stem), len(CLASSES)), path.stem


def rendered(template: str, files: Mapping[str, File], used: dict[str, File]) -> str:
    """Fill in a table, with its source below, or a sentence with its source in brackets; adds to `used`."""
    lines, own = list[str](), dict[str, File]()
    for line in template.splitlines():
        match = LINE.match(line)
        for pattern in [match["file"]] if match else re.findall(r"\{([\w-]+)\[", line):
            matching = {name: file for name, file in files.items() if fnmatch(name, pattern)}
            if not matching:
                raise SystemExit(f"there is no docs/figures/{pattern}.json: run make figures")
            own |= matching
        for figures in (file.figures for file in matching.values()) if match else ():
            part, _ = CELLS.get_field(f"figures{match['path']}", (), {"figures": figures})
            for one in part.found if match["kind"] == "each" and match["path"] else [part.found]:
                lines.append(CELLS.vformat(match["text"], (), figures | one))
        if not match:
            lines.append(CELLS.vformat(line, (), {name: file.figures for name, file in own.items()}))
    used |= own
    commands = typed([file.typed for file in own.values()]) if "command" not in template else []
    timed = [file for file in own.values() if not COUNTED.search(file.typed)]
    places = [file.place for file in timed if "label" not in template]
    parts = (commands, [file.date for file in own.values()], places)
    source = ", ".join(" and ".join(dict.fromkeys(part)) for part in parts if part)
    return "\n" + "\n".join(lines) + (f"\n\n{source}.\n\n" if lines[0].startswith("|") else f" ({source}).\n\n")


def typed(commands: Sequence[str]) -> list[str]:
    """Name each command once, with the kernels that it was given as well."""
    kernels = dict[str, list[str]]()
    for command in commands:
        limit, program = KERNELS.fullmatch(command).groups()  # type: ignore[union-attr]  # matches every text
        kernels.setdefault(program, []).append(limit or "")
    return [f"`{first}{program}`{also(rest)}" for program, (first, *rest) in kernels.items()]


def also(kernels: Sequence[str]) -> str:
    named = " and ".join(f"`{one.strip()}`" for one in kernels if one)
    return f", also with {named}" if named else ""


def written(root: Path, *, check: bool) -> Iterator[str]:
    """Write all pages, or none if one cannot be written; yields what is wrong."""
    parts = re.split(r"^## (.+)\n", (ROOT / ".ci" / "tables.md").read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    templates = dict(zip(parts[::2], map(str.strip, parts[1::2]), strict=True))
    files = {path.stem: read(path) for path in sorted((root / "docs" / "figures").glob("*.json"), key=rank)}
    pages, used = dict[Path, str](), dict[str, File]()
    for page in [*root.glob("README.md"), *sorted((root / "docs").rglob("*.md"))]:
        text, name = page.read_text(encoding="utf-8"), page.relative_to(root).as_posix()
        if page.parent.name == "decisions":
            continue
        places = list(REGION.finditer(text))
        if len(places) != text.count("<!-- figures"):
            raise SystemExit(f"{name}: a table does not begin with '<!-- figures NAME -->' or has no '<!-- end -->'")
        for place in reversed(places):
            try:
                shown = rendered(templates[place["name"]], files, used)
            except (KeyError, IndexError, TypeError, ValueError) as error:
                raise SystemExit(
                    f"{name}: .ci/tables.md or a file lacks {place['name']!r} or a part ({error!r})"
                ) from error
            if check and shown != place["shown"]:
                yield f"{name}: {place['name']!r} is not what docs/figures says: run make reference"
            text = text[: place.start("shown")] + shown + text[place.end("shown") :]
        pages[page] = text
    pictures = drawn(root)
    for page, text in (pages | pictures).items() if not check else ():
        page.write_text(text, encoding="utf-8")
    for path in pictures if check else ():
        if not path.is_file() or path.read_text(encoding="utf-8") != pictures[path]:
            yield f"docs/images/{path.name} is not what docs/figures says: run make reference"
    yield from (f"no page shows docs/figures/{name}.json" for name in files if name not in used)


if __name__ == "__main__":
    wrong = list(written(ROOT, check="--check" in sys.argv))
    print("\n".join(wrong) or "ok")
    sys.exit(bool(wrong))
