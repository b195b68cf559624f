"""Stop strings end the answer at the same place however the text arrives."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from precedent.text.assembly import StopScanner, partial_match


def scanned(stops: list[str], parts: list[str]) -> tuple[str, bool]:
    scanner, shown = StopScanner(stops), ""
    for part in parts:
        text, stopped = scanner.push(part)
        shown += text
        if stopped:
            return shown, True
    return shown + scanner.flush(), False


def reference(stops: list[str], text: str) -> tuple[str, bool]:
    """The shortest prefix of the text that ends with a stop string, without the longest stop string it ends with."""
    for end in range(len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            return text[: end - max(map(len, ended))], True
    return text, False


SMALL = st.text(alphabet="ab<\n", max_size=14)


@given(st.lists(st.text(alphabet="ab<\n", min_size=1, max_size=4), max_size=3), st.lists(SMALL, max_size=6))
def test_the_split_does_not_matter(stops: list[str], parts: list[str]) -> None:
    assert scanned(stops, parts) == reference(stops, "".join(parts))


def test_a_partial_match_is_held_back_and_given_when_it_fails() -> None:
    scanner = StopScanner(["<end>"])
    assert scanner.push("text <en") == ("text ", False)
    assert scanner.push("try") == ("<entry", False)


def test_nothing_comes_after_a_stop() -> None:
    scanner = StopScanner(["x"])
    assert scanner.push("ax tail") == ("a", True)
    assert scanner.push("more") == ("", True)
    assert scanner.flush() == ""


@pytest.mark.parametrize(
    ("text", "marker", "length"),
    [("abc<to", "<tool>", 3), ("abc", "<tool>", 0), ("aa", "aab", 2), ("<tool>", "<tool>", 0)],
)
def test_partial_match_length(text: str, marker: str, length: int) -> None:
    assert partial_match(text, marker) == length
