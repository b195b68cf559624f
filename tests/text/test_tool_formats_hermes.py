"""Hermes tool calls: streamed equals whole under every split, and nothing the model writes raises."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from precedent.text.tool_formats import InvalidCall, ParsedCall, Part, TextPiece, whole_parts
from precedent.text.tool_formats.formats import HERMES
from precedent.text.tool_formats.parser import TaggedParser

OPEN, CLOSE = "<tool_call>", "</tool_call>"

LOOK_UP = '<tool_call>\n{"name": "look_up", "arguments": {"number": "1042"}}\n</tool_call>'
CALL = ParsedCall("look_up", {"number": "1042"})


def parsed(parts: list[str]) -> list[Part]:
    """All of an answer, neighbouring texts joined."""
    parser = TaggedParser(HERMES)
    return whole_parts([event for part in parts for event in parser.push(part)] + parser.finish())


@pytest.mark.parametrize(
    ("answer", "events"),
    [
        ("", []),
        ("no call at all\n", [TextPiece("no call at all\n")]),
        (LOOK_UP, [CALL]),
        (f"{LOOK_UP}\n{LOOK_UP}\n", [CALL, CALL]),
        (f"I look.\n{LOOK_UP}", [TextPiece("I look."), CALL]),
        (f"I look.\n\n{LOOK_UP}", [TextPiece("I look.\n"), CALL]),
        (f"{LOOK_UP}\n\nDone.", [CALL, TextPiece("Done.")]),
        (f"A{LOOK_UP}\nB\n{LOOK_UP}", [TextPiece("A"), CALL, TextPiece("\nB"), CALL]),
        (f"\n \n{LOOK_UP}", [CALL]),
        ("a < b and <tool_", [TextPiece("a < b and <tool_")]),
        (LOOK_UP.removesuffix(f"\n{CLOSE}"), [CALL]),
        (f"{LOOK_UP.removesuffix(CLOSE)}{LOOK_UP}", [CALL, CALL]),
        ('<tool_call>{"name": "f"}</tool_call>', [ParsedCall("f", {})]),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', [ParsedCall("f", {"a": 1})]),
        ('<tool_call>{"name": "f", "arguments": {"a": "1\n2"}}</tool_call>', [ParsedCall("f", {"a": "1\n2"})]),
    ],
)
def test_an_answer_and_its_events(answer: str, events: list[Part]) -> None:
    assert parsed([answer]) == events
    assert parsed(list(answer)) == events


def test_tags_inside_a_json_string_do_not_end_the_call() -> None:
    arguments = {"note": f'say "{CLOSE}" or {OPEN} \\'}
    answer = f"{OPEN}{json.dumps({'name': 'f', 'arguments': arguments})}{CLOSE}after"
    assert parsed(list(answer)) == [ParsedCall("f", arguments), TextPiece("after")]


@pytest.mark.parametrize(
    ("body", "name", "problem"),
    [
        ('{"name": "f", "arguments": {"a": 1', "f", "delimiter"),
        ('{"name": "f", "arguments": [1]}', "f", "must be an object, not list"),
        ('{"name": "f", "arguments": {"a": NaN}}', "f", "NaN"),
        ('{"name": "f", "arguments": {"a": 1e999}}', "f", "not JSON compliant"),
        ('{"name": "f", "arguments": {"a": "\\ud800"}}', "f", "surrogates"),
        ('{"arguments": {}}', None, "expected"),
        ('{"name": ""}', None, "expected"),
        ("look_up(1042)", None, "Expecting value"),
        ("[" * 100_000, None, "recursion"),
        (f'{{"name": "f", "arguments": {{"a": {"1" * 5000}}}}}', "f", "limit"),
    ],
)
@pytest.mark.parametrize("closed", [True, False])
def test_a_call_that_cannot_be_read_keeps_its_text(body: str, name: str | None, problem: str, closed: bool) -> None:
    raw = f"{OPEN}{body}{CLOSE if closed else ''}"
    (event,) = parsed([raw])
    assert isinstance(event, InvalidCall)
    assert (event.raw, event.name) == (raw, name)
    assert problem in event.error


def test_a_call_with_an_open_string_does_not_swallow_the_next_one() -> None:
    broken = f'{OPEN}{{"name": "f", "arguments": {{"a": "1}}}}{CLOSE}'
    first, second, third = parsed(list(f"{broken}\n{LOOK_UP}\nend"))
    assert isinstance(first, InvalidCall)
    assert first.raw == broken
    assert (second, third) == (CALL, TextPiece("end"))


VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.sampled_from([OPEN, CLOSE, '"', "\\"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=4,
)
CALLS = st.builds(
    lambda name, arguments: f"{OPEN}\n{json.dumps({'name': name, 'arguments': arguments})}\n{CLOSE}",
    st.text(min_size=1, max_size=5),
    st.dictionaries(st.text(max_size=4), VALUES, max_size=2),
)
FRAGMENTS = st.sampled_from([OPEN, CLOSE, "<tool_", "</", "\n", " ", '"', "{", "}", "\\", "text", '{"name": "f"}'])
ANSWERS = st.lists(CALLS | FRAGMENTS | st.text(max_size=5), max_size=7).map("".join)


@settings(max_examples=200)
@given(ANSWERS, st.lists(st.integers(min_value=0, max_value=10_000), max_size=15))
def test_streamed_equals_whole_under_every_split(answer: str, cuts: list[int]) -> None:
    edges = sorted({0, len(answer), *(cut % (len(answer) + 1) for cut in cuts)})
    parts = [answer[start:end] for start, end in pairwise(edges)]
    whole = parsed([answer])
    assert parsed(parts) == whole
    assert parsed(list(answer)) == whole


@given(st.text(max_size=60))
def test_text_without_a_tag_stays_as_it_is(text: str) -> None:
    assert "".join(event.text for event in parsed(list(text)) if isinstance(event, TextPiece)) == text
