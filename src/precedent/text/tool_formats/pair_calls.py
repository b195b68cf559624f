"""Calls whose arguments are pairs of a name and a value: Qwen's tags, Python's keywords, Gemma's braces."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from precedent.text.tool_formats.calls import CallReader, EndOfAnswer, Reading, StringWriter, Tools, held_tail
from precedent.text.tool_formats.json_text import dump_json, load_json
from precedent.text.tool_schema import referenced


class PairReader(CallReader):
    """Hands out each argument once it is complete; the first problem makes the call invalid."""

    def __init__(self, head: str) -> None:
        self._keys: set[str] = set()
        self._problem = ""
        super().__init__(head)

    def _add(self, read: Callable[[], tuple[str, Any]]) -> None:
        """Hand out the argument that `read` returns; an exception is the call's problem."""
        if self._problem:
            return
        try:
            key, value = read()
            self._claim(key)
            self._log.write_pair(key, value)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
            self._problem = str(error)

    def _claim(self, key: str) -> None:
        if key in self._keys:
            raise ValueError(f"argument {key!r} is given twice")
        self._keys.add(key)

    def _end_call(self, problem: str = "") -> None:
        if self._problem or problem:
            self._log.fail(self._problem or problem)
        else:
            self._log.end_pairs()
        self._keys, self._problem = set(), ""


class XmlCall(PairReader):
    """Qwen3-Coder's call: a function in tags, in it one tag per parameter, values without quotes.

    <tool_call>
    <function=look_up>
    <parameter=number>
    1042
    </parameter>
    </function>
    </tool_call>

    A string parameter is handed out as it is written, any other once complete. A value ends at the first
    `</parameter>`, because the format has no way to quote one. At the end of an answer the call is valid if its
    function was complete.
    """

    OPEN, CLOSE, VALUE_END = "<tool_call>", "</tool_call>", "</parameter>"
    TAG = re.compile(r"\s*<(?:(?P<kind>function|parameter)=(?P<name>[^<>\n]+)|(?P<end>/function))>")

    def __init__(self, head: str, tools: Tools) -> None:
        self._tools = tools
        super().__init__(head)

    def _read(self) -> Reading:
        seen, problem, complete = "", "", False
        try:
            while not seen.endswith((self.OPEN, self.CLOSE)):
                seen += yield
                if not seen.endswith(">") or seen.endswith((self.OPEN, self.CLOSE)) or self._problem:
                    continue
                tag, seen = self.TAG.fullmatch(seen), ""
                if tag is None or complete or (tag["kind"] == "function") == self._log.begun:
                    self._problem = "a tag is out of place"
                elif tag["kind"] == "function":
                    self._log.begin(tag["name"])
                elif tag["kind"] == "parameter":
                    yield from self._value(tag["name"])
                else:
                    complete = True
        except EndOfAnswer:
            seen = ""
        if seen.endswith(self.CLOSE) and seen.removesuffix(self.CLOSE).strip():
            problem = "there is text between its tags"
        if seen.endswith(self.OPEN):
            del self._log.raw[-len(self.OPEN) :]
        self._end_call(problem or ("" if complete else "its function is not closed"))
        return self.OPEN if seen.endswith(self.OPEN) else ""

    def _value(self, key: str) -> Reading:
        types = argument_types(self._tools, self._log.name or "", key)
        if key in self._keys:
            self._problem = f"parameter {key!r} is given twice"
        elif types == {"string"}:
            self._log.write(f'{", " if self._keys else "{"}{dump_json(key)}: "')
            self._claim(key)
            writer = StringWriter(self._log, (f"\n{self.VALUE_END}", self.VALUE_END))
            while not writer.step((yield), skip="\n"):
                pass
            self._log.write('"')
        else:
            value = ""
            while not value.endswith(self.VALUE_END):
                value += yield
            text = value.removesuffix(self.VALUE_END).removeprefix("\n").removesuffix("\n")
            self._add(lambda: (key, typed_value(text, types)))
        return ""


class PythonCalls(PairReader):
    """A list of calls in Python syntax up to `close`: `[look_up(number="1042"), cancel(number="7")]`.

    A `bare` list is text unless it begins with a function name and a bracket.
    """

    NAME = re.compile(r"[A-Za-z_][\w.\-]*")
    BEGINNING = re.compile(r"\[\s*(?:[A-Za-z_][\w.\-]*)?\s*")
    BRACKETS: ClassVar = {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}
    AROUND = " \t\r\n,;["

    def __init__(self, head: str, close: str, *, bare: bool = False) -> None:
        self._close, self._bare = close, bare
        super().__init__(head)

    def _read(self) -> Reading:
        between, in_call, is_empty = "", False, True
        try:
            while not between.endswith(self._close):
                between += yield
                if between.endswith("("):
                    name, between, in_call, is_empty = between[:-1].strip(self.AROUND), "", True, False
                    if self.NAME.fullmatch(name):
                        self._log.begin(name)
                    else:
                        self._problem = "expected name(argument=value)"
                    yield from self._call()
                    in_call = False
                elif is_empty and self._bare and not self.BEGINNING.fullmatch(between):
                    return self._reject()
        except EndOfAnswer:
            if is_empty and self._bare:
                return self._reject()
            between = between[: len(between) - held_tail(between, (self._close,))]
            if in_call or is_empty or between.strip(self.AROUND):
                self._log.fail("it was cut off")
            return ""
        if between.removesuffix(self._close).strip(self.AROUND):
            self._log.fail("expected name(argument=value)")
        return ""

    def _reject(self) -> str:
        self.rejected = True
        return "".join(self._log.raw)

    def _call(self) -> Reading:
        """Read the arguments up to the closing bracket, tracking nesting and strings of a Python expression."""
        piece, depth, quote, escaped = "", 1, "", False
        while depth:
            char = yield
            if escaped:
                escaped = False
            elif quote:
                escaped = char == "\\"
                quote = "" if char == quote else quote
            elif char in "\"'":
                quote = char
            else:
                depth += self.BRACKETS.get(char, 0)
            if not quote and (depth == 0 or (char == "," and depth == 1)):
                if text := piece.strip():
                    self._add(lambda text=text: _keyword(text))  # type: ignore[misc]
                piece = ""
            else:
                piece += char
        self._end_call()
        return ""


def _keyword(piece: str) -> tuple[str, Any]:
    key, equals, text = piece.partition("=")
    if not equals or not key.strip().isidentifier():
        raise ValueError(f"expected argument=value, found {piece!r}")
    tree = ast.parse(text.strip(), mode="eval")
    try:
        value = ast.literal_eval(_Words().visit(tree))
    except ValueError as error:  # its own message contains a memory address
        raise ValueError(f"{text.strip()!r} is an expression, not a value") from error
    return key.strip(), load_json(json.dumps(value))  # tuples become lists; raises for what JSON cannot represent


class _Words(ast.NodeTransformer):
    """Reads JSON's `true`, `false` and `null` as Python constants, since models mix the two."""

    WORDS: ClassVar = {"true": True, "false": False, "null": None}

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Constant(self.WORDS[node.id]) if node.id in self.WORDS else node


class GemmaCall(PairReader):
    """Gemma's call up to `close`: `call:look_up{number:<escape>1042<escape>,copies:2}`; `quote` encloses strings.

    At the end of an answer the call is valid if its arguments were complete.
    """

    HEAD = re.compile(r"\s*call:\s*([\w.\-]+)\s*")
    BARE_KEY = re.compile(r"(?<=[{,])(\s*)([A-Za-z_][\w.\-]*)(\s*:)")

    def __init__(self, head: str, quote: str, close: str) -> None:
        self._quote, self._close = quote, close
        super().__init__(head)

    def _read(self) -> Reading:
        piece, depth, in_text, complete = "", 0, False, False
        try:
            while in_text or not piece.endswith(self._close):
                piece += (char := (yield))
                if piece.endswith(self._quote):
                    in_text = not in_text
                    continue
                if in_text or piece.endswith(self._close):
                    continue
                if char == "{" and depth == 0 and not complete:
                    head, piece = self.HEAD.fullmatch(piece[:-1]), ""
                    if head is None:
                        self._problem = "expected call:name{argument:value}"
                    else:
                        self._log.begin(head.group(1))
                elif char in ",}" and depth == 1:
                    text, piece = piece[:-1], ""
                    if text.strip() or self._keys:
                        self._add(lambda text=text: self._pair(text))  # type: ignore[misc]
                depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(char, 0)
                complete = complete or (char == "}" and depth == 0)
        except EndOfAnswer:
            piece = ""
        after = "there is text after its arguments" if piece.removesuffix(self._close).strip() else ""
        self._end_call(after if complete else "it was cut off")
        return ""

    def _pair(self, piece: str) -> tuple[str, Any]:
        key, colon, value = piece.partition(":")
        key = key.replace(self._quote, "").strip(' \t\r\n"')
        if not colon or not key:
            raise ValueError(f"expected argument:value, found {piece.strip()!r}")
        parts = value.split(self._quote)
        plain = [self.BARE_KEY.sub(r'\1"\2"\3', part) for part in parts[::2]]
        quoted = [json.dumps(part) for part in parts[1::2]]
        return key, load_json("".join(piece for pair in zip(plain, [*quoted, ""], strict=True) for piece in pair))


# Values without quotes, read by the type that the tool's schema gives them

_MAX_NESTING = 8
_WORDS = {"true": True, "false": False}
_KINDS = (
    *((bool, "boolean"), (str, "string"), (int, "integer"), (float, "number"), (type(None), "null")),
    *((dict, "object"), (list, "array")),
)


def argument_types(tools: Tools, tool: str, argument: str) -> frozenset[str]:
    """An argument's types by their JSON Schema names; an argument that no schema describes is a string."""
    root = next((one["function"].get("parameters") for one in tools if one["function"]["name"] == tool), None) or {}
    schema = (root.get("properties") or {}).get(argument)
    return frozenset(_types(schema, root, _MAX_NESTING)) or frozenset({"string"})


def typed_value(text: str, types: frozenset[str]) -> Any:
    """Read `text` as a value of one of these types; return the text itself if it is none of them."""
    word = text.strip()
    if "null" in types and word in ("null", "None"):
        return None
    if "boolean" in types and word.lower() in _WORDS:
        return _WORDS[word.lower()]
    if types & {"integer", "number", "object", "array"}:
        try:
            value = load_json(word)
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, float) and value.is_integer() and "number" not in types:
            value = int(value)
        if _kind(value) in types or (_kind(value) == "integer" and "number" in types):
            return value
    return text


def _kind(value: Any) -> str:
    return next(name for kind, name in _KINDS if isinstance(value, kind))


def _types(schema: Any, root: Mapping[str, Any], nesting: int) -> set[str]:
    if not isinstance(schema, Mapping) or nesting == 0:
        return set()
    if isinstance(schema.get("$ref"), str):
        return _types(referenced(schema["$ref"], root), root, nesting - 1)
    declared = schema.get("type")
    types = {declared} if isinstance(declared, str) else set(declared or ())
    for keyword in ("anyOf", "oneOf", "allOf"):
        for choice in schema.get(keyword) or ():
            types |= _types(choice, root, nesting - 1)
    return types or set(map(_kind, [schema["const"]] if "const" in schema else schema.get("enum") or []))
