"""docs/explanation/architecture.md draws what is there: every room, arrow, file and function of it exists."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
from test_rooms import PACKAGE, files_of, imports_in, parsed, room_of

PAGE = (Path(__file__).parents[1] / "docs" / "explanation" / "architecture.md").read_text(encoding="utf-8")
ROOMS, STEP = re.findall(r"```mermaid\n(.*?)```", PAGE, re.DOTALL)
ARROWS = re.findall(r"^ *(\w+) --> (\w+)$", ROOMS, re.MULTILINE)


def outer(room: str) -> str:
    return room.split(".", maxsplit=1)[0]


def imported_by(room: str) -> set[str]:
    """The rooms that the files of a room import."""
    names = (name for file in files_of(room) for name in imports_in(parsed(file)) if name.startswith("precedent."))
    return {outer(room_of(name)) for name in names}


@pytest.mark.parametrize(("caller", "called"), ARROWS)
def test_an_arrow_between_rooms_is_an_import(caller: str, called: str) -> None:
    assert called in imported_by(caller)


@pytest.mark.parametrize("path", sorted(set(re.findall(r"\b[\w/]+\.py\b", PAGE)) - {"tests/test_rooms.py"}))
def test_every_file_exists(path: str) -> None:
    assert (PACKAGE / path).is_file()


@pytest.mark.parametrize(("verb", "path"), re.findall(r'"(\w+)<br>([\w/]+\.py)"', STEP))
def test_every_verb_of_a_step_is_a_function_that_the_loop_calls(verb: str, path: str) -> None:
    assert callable(attribute(path, verb))
    assert re.search(rf"\b{verb}\(", (PACKAGE / "decoding" / "loop.py").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("name", "path"), re.findall(r"`([\w.]+)` \(`([\w/]+\.py)`\)", PAGE))
def test_every_function_named_is_in_its_file(name: str, path: str) -> None:
    assert callable(attribute(path, name))


def attribute(path: str, name: str) -> object:
    """`Class.method` or a function, of the module at a path below the package."""
    found: object = importlib.import_module("precedent." + path.removesuffix(".py").replace("/", "."))
    for part in name.split("."):
        found = getattr(found, part)
    return found
