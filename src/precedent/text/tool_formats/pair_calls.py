"""Calls whose arguments are pairs of a name and a value: Qwen's tags, Python's keywords, Gemma's braces."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from precedent.text.tool_formats.calls import CallReader, StringWriter, Tools, held_tail
from precedent.text.tool_formats.json_text import dump_json, load_json
from precedent.text.tool_schema import referenced


class PairReader(CallReader):
    """Hands out each argument once it is complete; the first problem makes the call invalid."""

    def __init__(self, head: str) -> None:
        super().__init__(head)
        self._start_call()

    def _start_call(self) -> None:
        self._keys: set[str] = set()
        self._problem = ""

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
        self._start_call()


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
    `</parameter>`, because the format has no way to quote one.
    """

    OPEN, CLOSE, VALUE_END = "<tool_call>", "</tool_call>", "</parameter>"
    TAG = re.compile(r"\s*<(?:(?P<kind>function|parameter)=(?P<name>[^<>\n]+)|(?P<end>/function))>")

    def __init__(self, head: str, tools: Tools) -> None:
        super().__init__(head)
        self._tools = tools
        self._key = ""
        self._seen: list[str] = []
        self._value: list[str] | None = None
        self._text: StringWriter | None = None
        self._complete = False

    def feed(self, char: str) -> str | None:
        """Take a character; see `CallReader`."""
        self._log.raw.append(char)
        if self._text is not None:
            if self._text.step(char, skip="\n"):
                self._log.write('"')
                self._text = None
        elif self._value is not None:
            self._step_value(self._value, char)
        else:
            self._seen.append(char)
            return self._end_tag("".join(self._seen)) if char == ">" else None
        return None

    def finish(self) -> str | None:
        """End the call with the answer; it is valid if its function was complete."""
        self._end()
        return None

    def _end_tag(self, seen: str) -> str | None:
        if seen.endswith(self.CLOSE):
            self._end("" if not seen.removesuffix(self.CLOSE).strip() else "there is text between its tags")
            return ""
        if seen.endswith(self.OPEN):
            del self._log.raw[-len(self.OPEN) :]
            self._end()
            return self.OPEN
        if not self._problem:
            self._problem = self._follow(self.TAG.fullmatch(seen))
            self._seen.clear()
        return None

    def _follow(self, tag: re.Match[str] | None) -> str:
        """Process a tag; return what is wrong with it here, or "" if the call goes on."""
        if tag is None or self._complete or (tag["kind"] == "function") == self._log.begun:
            return "a tag is out of place"
        if tag["kind"] == "function":
            self._log.begin(tag["name"])
        elif tag["kind"] == "parameter":
            return self._open_value(tag["name"])
        else:
            self._complete = True
        return ""

    def _open_value(self, key: str) -> str:
        if key in self._keys:
            return f"parameter {key!r} is given twice"
        self._key = key
        if self._types == {"string"}:
            self._log.write(f'{", " if self._keys else "{"}{dump_json(key)}: "')
            self._keys.add(key)
            self._text = StringWriter(self._log, (f"\n{self.VALUE_END}", self.VALUE_END))
        else:
            self._value = []
        return ""

    def _step_value(self, value: list[str], char: str) -> None:
        value.append(char)
        if char == ">" and (text := "".join(value)).endswith(self.VALUE_END):
            self._value = None
            text = text.removesuffix(self.VALUE_END).removeprefix("\n").removesuffix("\n")
            self._add(lambda: (self._key, typed_value(text, self._types)))

    @property
    def _types(self) -> frozenset[str]:
        return argument_types(self._tools, self._log.name or "", self._key)

    def _end(self, problem: str = "") -> None:
        self._end_call(problem if self._complete else problem or "its function is not closed")


class PythonCalls(PairReader):
    """A list of calls in Python syntax up to `close`: `[look_up(number="1042"), cancel(number="7")]`.

    A `bare` list is text unless it begins with a function name and a bracket.
    """

    NAME = re.compile(r"[A-Za-z_][\w.\-]*")
    BEGINNING = re.compile(r"\[\s*(?:[A-Za-z_][\w.\-]*)?\s*")
    BRACKETS: ClassVar = {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}
    AROUND = " \t\r\n,;["

    def __init__(self, head: str, close: str, *, bare: bool = False) -> None:
        super().__init__(head)
        self._close, self._bare = close, bare
        self._is_empty = True
        self._between: list[str] = []

    def _start_call(self) -> None:
        super()._start_call()
        self._piece: list[str] = []
        self._depth, self._quote, self._escaped = 0, "", False
        self._in_call = False

    def feed(self, char: str) -> str | None:
        """Take a character; see `CallReader`."""
        self._log.raw.append(char)
        if self._in_call:
            self._step_call(char)
            return None
        self._between.append(char)
        text = "".join(self._between)
        if text.endswith(self._close):
            if text.removesuffix(self._close).strip(self.AROUND):
                self._log.fail("expected name(argument=value)")
            return ""
        if char == "(":
            self._open_call(text[:-1].strip(self.AROUND))
        elif self._bare and not self.BEGINNING.fullmatch(text):
            return self._reject()
        return None

    def finish(self) -> str | None:
        """End the list with the answer."""
        if self._bare and not self._in_call:
            return self._reject()
        between = "".join(self._between)
        between = between[: len(between) - held_tail(between, (self._close,))]
        if self._in_call or self._is_empty or between.strip(self.AROUND):
            self._log.fail("it was cut off")
        return None

    def _reject(self) -> str:
        self.rejected = True
        return "".join(self._log.raw)

    def _open_call(self, name: str) -> None:
        self._between.clear()
        self._in_call, self._bare, self._is_empty = True, False, False
        self._depth = 1
        if self.NAME.fullmatch(name):
            self._log.begin(name)
        else:
            self._problem = "expected name(argument=value)"

    def _step_call(self, char: str) -> None:
        self._step(char)
        at_end = self._depth == 0
        if not self._quote and (at_end or (char == "," and self._depth == 1)):
            if piece := "".join(self._piece).strip():
                self._add(lambda: _keyword(piece))
            self._piece.clear()
            if at_end:
                self._end_call()
        else:
            self._piece.append(char)

    def _step(self, char: str) -> None:
        """Track nesting and strings of a Python expression."""
        if self._escaped:
            self._escaped = False
        elif self._quote:
            self._escaped = char == "\\"
            self._quote = "" if char == self._quote else self._quote
        elif char in "\"'":
            self._quote = char
        else:
            self._depth += self.BRACKETS.get(char, 0)


def _keyword(piece: str) -> tuple[str, Any]:
    """Parse `name=value`. Raises ValueError for anything else."""
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
    """Gemma's call up to `close`: `call:look_up{number:<escape>1042<escape>,copies:2}`; `quote` encloses strings."""

    HEAD = re.compile(r"\s*call:\s*([\w.\-]+)\s*")
    BARE_KEY = re.compile(r"(?<=[{,])(\s*)([A-Za-z_][\w.\-]*)(\s*:)")

    def __init__(self, head: str, quote: str, close: str) -> None:
        super().__init__(head)
        self._quote, self._close = quote, close
        self._longest = max(len(quote), len(close))
        self._piece: list[str] = []
        self._depth = 0
        self._in_text = self._complete = False

    def feed(self, char: str) -> str | None:
        """Take a character; see `CallReader`."""
        self._log.raw.append(char)
        self._piece.append(char)
        tail = "".join(self._piece[-self._longest :])
        if tail.endswith(self._quote):
            self._in_text = not self._in_text
        elif not self._in_text:
            return self._step(char, tail)
        return None

    def finish(self) -> str | None:
        """End the call with the answer; it is valid if its arguments were complete."""
        self._end("")
        return None

    def _step(self, char: str, tail: str) -> str | None:
        if tail.endswith(self._close):
            self._end("".join(self._piece).removesuffix(self._close))
            return ""
        if char == "{" and self._depth == 0 and not self._complete:
            self._open("".join(self._piece[:-1]))
        elif char in ",}" and self._depth == 1:
            piece = "".join(self._piece[:-1])
            if piece.strip() or self._keys:
                self._add(lambda: self._pair(piece))
            self._piece.clear()
        self._depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(char, 0)
        self._complete = self._complete or (char == "}" and self._depth == 0)
        return None

    def _open(self, text: str) -> None:
        head = self.HEAD.fullmatch(text)
        if head is None:
            self._problem = "expected call:name{argument:value}"
        else:
            self._log.begin(head.group(1))
        self._piece.clear()

    def _pair(self, piece: str) -> tuple[str, Any]:
        """Parse `name:value`. Raises ValueError for anything else."""
        key, colon, value = piece.partition(":")
        key = key.replace(self._quote, "").strip(' \t\r\n"')
        if not colon or not key:
            raise ValueError(f"expected argument:value, found {piece.strip()!r}")
        parts = value.split(self._quote)
        plain = [self.BARE_KEY.sub(r'\1"\2"\3', part) for part in parts[::2]]
        quoted = [json.dumps(part) for part in parts[1::2]]
        return key, load_json("".join(piece for pair in zip(plain, [*quoted, ""], strict=True) for piece in pair))

    def _end(self, rest: str) -> None:
        after = "there is text after its arguments" if rest.strip() else ""
        self._end_call(after if self._complete else "it was cut off")


# Values without quotes, read by the type that the tool's schema gives them

_MAX_NESTING = 8
_WORDS = {"true": True, "false": False}
_KINDS = ((bool, "boolean"), (str, "string"), (int, "integer"), (float, "number"), (type(None), "null"))


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
    if isinstance(value, dict | list):
        return "object" if isinstance(value, dict) else "array"
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
    if not types:
        choices = [schema["const"]] if "const" in schema else schema.get("enum") or []
        types = {_kind(choice) for choice in choices}
    return types
