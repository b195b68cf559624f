"""Every tool format: what an answer holds, the same under every split, and nothing the model writes raises."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from helpers.answer_parts import Part, events_in, whole_parts
from hypothesis import given, settings
from hypothesis import strategies as st

from precedent.text.tool_formats import Event, EventParser, InvalidCall, ReasoningPiece, TextPiece
from precedent.text.tool_formats.calls import ParsedCall
from precedent.text.tool_formats.formats import BUILTIN, REASONING
from precedent.text.tool_formats.parser import HarmonyParser, TaggedParser

FORMS = {form.name: form for form in BUILTIN}
THINK = REASONING[0]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "parameters": {
                "type": "object",
                "properties": {
                    "number": {"type": "string"},
                    "copies": {"type": "integer"},
                    "deep": {"$ref": "#/$defs/Deep"},
                    "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                    "fast": {"type": "boolean"},
                    "price": {"type": "number"},
                    "kind": {"enum": ["a", "b"]},
                },
                "$defs": {"Deep": {"type": "object"}},
            },
        },
    }
]
LOOK_UP = ParsedCall("look_up", {"number": "1042"})


def parser_of(name: str) -> EventParser:
    form = FORMS[name]
    return HarmonyParser(form, TOOLS) if form.channels else TaggedParser(form, THINK, TOOLS)


def events_of(name: str, parts: list[str]) -> list[Event]:
    return events_in(parser_of(name), parts)


def parts_of(name: str, answer: str) -> list[Part]:
    """All of an answer, read at once and character by character."""
    whole = events_of(name, [answer])
    assert events_of(name, list(answer)) == whole
    return whole_parts(whole)


HARMONY_CALL = '<|channel|>commentary to=functions.look_up <|constrain|>json<|message|>{"number": "1042"}<|call|>'
XML_CALL = "<tool_call>\n<function=look_up>\n<parameter=number>\n1042\n</parameter>\n</function>\n</tool_call>"
HERMES_CALL = '<tool_call>\n{"name": "look_up", "arguments": {"number": "1042"}}\n</tool_call>'
ONE_CALL = {
    "hermes": HERMES_CALL,
    "qwen3-coder": XML_CALL,
    "llama-json": '{"name": "look_up", "parameters": {"number": "1042"}}',
    "llama-pythonic": "[look_up(number='1042')]",
    "mistral": '[TOOL_CALLS] [{"name": "look_up", "arguments": {"number": "1042"}}]',
    "mistral-args": '[TOOL_CALLS]look_up[ARGS]{"number": "1042"}',
    "function-gemma": "<start_function_call>call:look_up{number:<escape>1042<escape>}<end_function_call>",
    "gemma4": '<|tool_call>call:look_up{number:<|"|>1042<|"|>}<tool_call|>',
    "tool-code": '```tool_code\nlook_up(number="1042")\n```',
    "harmony": HARMONY_CALL,
}


@pytest.mark.parametrize("name", FORMS)
def test_one_call(name: str) -> None:
    assert parts_of(name, ONE_CALL[name]) == [LOOK_UP]


@pytest.mark.parametrize("name", [name for name in FORMS if name != "harmony"])
def test_reasoning_comes_apart_from_what_follows(name: str) -> None:
    answer = f"<think>\nHm.\n\nYes {{ [ <tool_\n</think>\n\n{ONE_CALL[name]}"
    assert parts_of(name, answer) == [ReasoningPiece("Hm.\n\nYes { [ <tool_"), LOOK_UP]


TWO = {"a": 1, "b": [True, None, {"c": "é \" ' \\ \n"}]}
TAGS = {"note": 'say "</tool_call>" or <tool_call> \\'}
"""Tags inside a JSON string do not end the call."""

ANSWERS: list[tuple[str, str, list[Part]]] = [
    ("hermes", "", []),
    ("hermes", "no call at all\n", [TextPiece("no call at all\n")]),
    ("hermes", f"{HERMES_CALL}\n{HERMES_CALL}\n", [LOOK_UP, LOOK_UP]),
    ("hermes", f"I look.\n\n{HERMES_CALL}", [TextPiece("I look.\n"), LOOK_UP]),
    ("hermes", f"{HERMES_CALL}\n\nDone.", [LOOK_UP, TextPiece("Done.")]),
    ("hermes", f"A{HERMES_CALL}\nB\n{HERMES_CALL}", [TextPiece("A"), LOOK_UP, TextPiece("\nB"), LOOK_UP]),
    ("hermes", f"\n \n{HERMES_CALL}", [LOOK_UP]),
    ("hermes", "a < b and <tool_", [TextPiece("a < b and <tool_")]),
    ("hermes", HERMES_CALL.removesuffix("\n</tool_call>"), [LOOK_UP]),
    ("hermes", HERMES_CALL.removesuffix("_call>"), [LOOK_UP]),
    ("hermes", f"{HERMES_CALL.removesuffix('</tool_call>')}{HERMES_CALL}", [LOOK_UP, LOOK_UP]),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', [ParsedCall("f", {})]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', [ParsedCall("f", {"a": 1})]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "1\n2"}}</tool_call>', [ParsedCall("f", {"a": "1\n2"})]),
    ("hermes", f"<tool_call>{json.dumps({'name': 'f', 'arguments': TAGS})}</tool_call>after", [
        ParsedCall("f", TAGS), TextPiece("after")]),
    ("qwen3-coder", f"I look.\n{XML_CALL}\n{XML_CALL}\n", [TextPiece("I look."), LOOK_UP, LOOK_UP]),
    (
        "qwen3-coder",
        "<tool_call>\n<function=look_up>\n<parameter=copies>\n3\n</parameter>\n<parameter=deep>\n"
        '{"a": "</tool_call>"}\n</parameter>\n<parameter=number>\n "x"\n\\y\n</parameter>\n<parameter=note>\nnull\n'
        "</parameter>\n<parameter=fast>\nTrue\n</parameter>\n<parameter=price>\n2.5\n</parameter>\n<parameter=kind>b"
        "</parameter>\n<parameter=other>\n7\n</parameter>\n</function>\n</tool_call>",
        [
            ParsedCall(
                "look_up",
                {
                    "copies": 3,
                    "deep": {"a": "</tool_call>"},
                    "number": ' "x"\n\\y',
                    "note": None,
                    "fast": True,
                    "price": 2.5,
                    "kind": "b",
                    "other": "7",
                },
            )
        ],
    ),
    ("qwen3-coder", "<tool_call>\n<function=f>\n</function>\n</tool_call>", [ParsedCall("f", {})]),
    ("qwen3-coder", XML_CALL.removesuffix("\n</tool_call>"), [LOOK_UP]),
    ("qwen3-coder", XML_CALL.replace("number", "copies").replace("1042", "many"), [
        ParsedCall("look_up", {"copies": "many"})]),
    ("qwen3-coder", XML_CALL.replace("number", "copies").replace("1042", "3.0"), [
        ParsedCall("look_up", {"copies": 3})]),
    ("hermes", f"<think>{ONE_CALL['hermes']}</think>x", [ReasoningPiece(ONE_CALL["hermes"]), TextPiece("x")]),
    ("llama-json", f"{ONE_CALL['llama-json']}; {ONE_CALL['llama-json']}", [LOOK_UP, LOOK_UP]),
    ("llama-json", f" <|python_tag|>{ONE_CALL['llama-json']}", [LOOK_UP]),
    ("llama-json", '{"type": "function", "name": "f", "parameters": {}}', [ParsedCall("f", {})]),
    ("llama-json", '{"answer": 42}', [TextPiece('{"answer": 42}')]),
    ("llama-json", '{"name": "Ann", "age": 7}', [TextPiece('{"name": "Ann", "age": 7}')]),
    ("llama-json", '{"name": {"first": "A"}, "parameters": {}}',
     [TextPiece('{"name": {"first": "A"}, "parameters": {}}')]),
    ("llama-json", "{braces} first", [TextPiece("{braces} first")]),
    ("llama-json", f"Text {ONE_CALL['llama-json']}", [TextPiece(f"Text {ONE_CALL['llama-json']}")]),
    ("llama-pythonic", "[f(), look_up(number='1042',)]", [ParsedCall("f", {}), LOOK_UP]),
    ("llama-pythonic", f"[f(a=1, b={TWO['b']!r})]", [ParsedCall("f", TWO)]),
    ("llama-pythonic", "[f(a=true, b=(1, null))]", [ParsedCall("f", {"a": True, "b": [1, None]})]),
    ("llama-pythonic", "<|python_start|>[look_up(number='1042')]<|python_end|>",
     [LOOK_UP, TextPiece("<|python_end|>")]),
    ("llama-pythonic", "[1] is a footnote", [TextPiece("[1] is a footnote")]),
    ("llama-pythonic", "[see f]", [TextPiece("[see f]")]),
    ("mistral", 'Hi[TOOL_CALLS][{"name": "f", "arguments": {}}, {"arguments": {"a": "]"}, "name": "g"}]', [
        TextPiece("Hi"), ParsedCall("f", {}), ParsedCall("g", {"a": "]"})]),
    ("mistral", ONE_CALL["mistral-args"], [LOOK_UP]),
    ("mistral-args", f"A\n{ONE_CALL['mistral-args']}[TOOL_CALLS]f{{}}",
     [TextPiece("A\n"), LOOK_UP, ParsedCall("f", {})]),
    ("mistral-args", '[TOOL_CALLS]f[CALL_ID]abc123DEF[ARGS]{"a": [1, {}]}', [ParsedCall("f", {"a": [1, {}]})]),
    ("function-gemma", "<start_function_call>call:f{a:1,b:[true,null,{c:<escape>{,}\"<escape>}]}<end_function_call>", [
        ParsedCall("f", {"a": 1, "b": [True, None, {"c": '{,}"'}]})]),
    ("function-gemma", "<start_function_call>call:f{}<end_function_call>", [ParsedCall("f", {})]),
    ("tool-code", "A\n```tool_code\nf(a=1)\nlook_up(number='1042')\n```\n", [
        TextPiece("A"), ParsedCall("f", {"a": 1}), LOOK_UP]),
    ("harmony", "Hello", [TextPiece("Hello")]),
    ("harmony", "<|channel|>final<|message|>Hi<|return|>", [TextPiece("Hi")]),
    ("harmony", f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant{HARMONY_CALL}", [
        ReasoningPiece("Hm."), LOOK_UP]),
    ("harmony", ' to=functions.look_up<|channel|>commentary json<|message|>{"number": "1042"}<|call|>', [LOOK_UP]),
    ("harmony", f"<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{HARMONY_CALL}<|start|>assistant"
        "<|channel|>final<|message|>Done.<|return|>", [TextPiece("I look."), LOOK_UP, TextPiece("\n\nDone.")]),
    ("harmony", "<|channel|>analysis<|message|>cut off", [ReasoningPiece("cut off")]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "answer", "parts"), ANSWERS)
def test_an_answer_and_its_parts(name: str, answer: str, parts: list[Part]) -> None:
    assert parts_of(name, answer) == parts


BROKEN = [
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": 1', "f", '{"a": 1', ""),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', "f", '{"a": NaN}', "}</tool_call>"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}, "arguments": {"a": 1}}</tool_call>', "f", "{}",
        ', "arguments": {"a": 1}}</tool_call>'),
    ("hermes", "<tool_call>f(1)</tool_call>", None, None, None),
    ("qwen3-coder", "<tool_call>\n<function=f>\n<parameter=a>\nx</tool_call>", "f", '{"a": "x</tool_call>', ""),
    ("qwen3-coder", "<tool_call>\n<function=f>\n</tool_call>", "f", "", "\n</tool_call>"),
    ("qwen3-coder", f"<tool_call>{ONE_CALL['llama-json']}</tool_call>", None, None, None),
    ("qwen3-coder", XML_CALL.replace("</function>", "<parameter=number>\n7\n</parameter>\n</function>"), "look_up",
        '{"number": "1042"', None),
    ("llama-json", '{"name": "f", "parameters": {"a": "b', "f", '{"a": "b', ""),
    ("llama-json", '{"name": "f", "par', "f", None, None),
    ("llama-json", "<|python_tag|>f.call(x)", None, None, None),
    ("llama-pythonic", "[f(a=1, b=", "f", '{"a": 1', " b="),
    ("llama-pythonic", "[f(1)]", "f", "", "1)"),
    ("llama-pythonic", "[f(a=g())]", "f", "", "a=g())"),
    ("mistral", "[TOOL_CALLS]f", None, None, None),
    ("mistral-args", '[TOOL_CALLS]f[ARGS]{"a": }', "f", '{"a": }', ""),
    ("function-gemma", "<start_function_call>call:f{a:1,a:2}<end_function_call>", "f", '{"a": 1',
        "a:2}<end_function_call>"),
    ("function-gemma", "<start_function_call>call:f{a:Paris}<end_function_call>", "f", "", None),
    ("harmony", HARMONY_CALL.replace('"}', ""), "look_up", '{"number": "1042', "<|call|>"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "answer", "called", "handed_out", "rest"), BROKEN)
def test_a_call_that_cannot_be_read_keeps_its_text(
    name: str, answer: str, called: str | None, handed_out: str | None, rest: str | None
) -> None:
    events = events_of(name, [answer])
    assert events_of(name, list(answer)) == events
    invalid = events[-1] if isinstance(events[-1], InvalidCall) else events[-2]
    assert isinstance(invalid, InvalidCall)
    assert invalid.name == called
    assert invalid.raw in answer
    if handed_out is None:
        assert (invalid.raw, invalid.rest, events) == (answer, None, [invalid])
        return
    assert "".join(getattr(event, "json", "") for event in events) == handed_out
    assert invalid.rest is not None
    assert invalid.rest in invalid.raw
    assert rest in (None, invalid.rest)


@pytest.mark.parametrize(
    ("body", "name", "problem"),
    [
        ('{"name": "f", "arguments": {"a": 1', "f", "delimiter"),
        ('{"name": "f", "arguments": [1]}', "f", "must be an object, not list"),
        ('{"name": "f", "arguments": {"a": 1e999}}', "f", "not JSON compliant"),
        ('{"name": "f", "arguments": {"a": "\\ud800"}}', "f", "surrogates"),
        ('{"arguments": {}}', None, "expected"),
        ("[" * 100_000, None, "recursion"),
        (f'{{"name": "f", "arguments": {{"a": {"1" * 5000}}}}}', "f", "limit"),
    ],
)
@pytest.mark.parametrize("close", ["</tool_call>", ""])
def test_a_call_that_cannot_be_read_says_why(body: str, name: str | None, problem: str, close: str) -> None:
    (event,) = whole_parts(events_of("hermes", [f"<tool_call>{body}{close}"]))
    assert isinstance(event, InvalidCall)
    assert (event.raw, event.name) == (f"<tool_call>{body}{close}", name)
    assert problem in event.error


def test_a_call_with_an_open_string_does_not_swallow_the_next_one() -> None:
    broken = '<tool_call>{"name": "f", "arguments": {"a": "1}}</tool_call>'
    first, second, third = parts_of("hermes", f"{broken}\n{HERMES_CALL}\nend")
    assert isinstance(first, InvalidCall)
    assert (first.raw, second, third) == (broken, LOOK_UP, TextPiece("end"))


PIECES = [
    *ONE_CALL.values(),
    *(tag for form in BUILTIN for tag in (*form.tags, form.list_open, form.call_open, form.call_close) if tag),
    *("<think>", "</think>", "<tool_", "</", "\n", " ", '"', "'", "{", "}", "[", "]", "(", ")", "\\", ",", ":", "="),
    *(";", "text", '{"name": "f"', '"arguments": {', '"parameters": {', "<function=f>", "<parameter=a>", "a=1"),
]  # fmt: skip
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6) | st.sampled_from(["</tool_call>", '"', "\\", "'"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=4,
)


@pytest.mark.parametrize("name", FORMS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
@pytest.mark.sampled(3)
def test_streamed_equals_whole_under_every_split(name: str, data: st.DataObject) -> None:
    mine = [ONE_CALL[name], FORMS[name].tag or "<|channel|>", FORMS[name].call_close or "}"]
    pieces = st.lists(st.sampled_from(PIECES) | st.sampled_from(mine) | st.text(max_size=4), max_size=8)
    answer = "".join(data.draw(pieces))
    cuts = data.draw(st.lists(st.integers(0, 10_000), max_size=12))
    edges = sorted({0, len(answer), *(cut % (len(answer) + 1) for cut in cuts)})
    whole = events_of(name, [answer])
    assert events_of(name, [answer[start:end] for start, end in pairwise(edges)]) == whole
    assert events_of(name, list(answer)) == whole
    for part in whole_parts(whole):
        if isinstance(part, ParsedCall):
            json.dumps(part.arguments, allow_nan=False)


def written(name: str, function: str, arguments: dict[str, Any]) -> str:
    """A call as the format's models write it, for the formats whose arguments are JSON or Python."""
    form = FORMS[name]
    before, behind = form.around_arguments(function)
    if form.arguments == "json":
        return f"{before}{json.dumps(arguments)}{behind}"
    return before + ", ".join(f"{key}={value!r}" for key, value in arguments.items()) + behind


@pytest.mark.parametrize("name", [name for name in FORMS if FORMS[name].arguments in ("json", "python")])
@settings(max_examples=40, deadline=None)
@given(arguments=st.dictionaries(st.from_regex(r"[a-z]{1,5}", fullmatch=True), VALUES, max_size=3))
def test_what_is_written_is_read_back(name: str, arguments: dict[str, Any]) -> None:
    reserved = {"as", "if", "in", "is", "or", "and", "def", "del", "for", "not", "try", "from", "pass", "with", "else"}
    arguments = {key: value for key, value in arguments.items() if key not in reserved}
    assert parts_of(name, written(name, "look_up", arguments)) == [ParsedCall("look_up", arguments)]
