"""Calls in Python syntax: `[look_up(number="1042"), cancel(number="7")]` (Llama), or a block of them (Gemma)."""

from __future__ import annotations

import ast
import json
import re
from typing import Any

from precedent.text.tool_formats.calls import LoggedReader, held_tail
from precedent.text.tool_formats.json_scanner import load_json

_CALL = re.compile(r"[A-Za-z_][\w.\-]*")
_BRACKETS = {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}
_WORDS = {"true": True, "false": False, "null": None}


class PythonScanner:
    """Tracks nesting and strings of a Python expression, character by character."""

    __slots__ = ("depth", "escaped", "quote")

    def __init__(self) -> None:
        self.depth, self.quote, self.escaped = 0, "", False

    def step(self, char: str) -> None:
        """Take the next character."""
        if self.escaped:
            self.escaped = False
        elif self.quote:
            self.escaped = char == "\\"
            self.quote = "" if char == self.quote else self.quote
        elif char in "\"'":
            self.quote = char
        else:
            self.depth += _BRACKETS.get(char, 0)


class PythonCalls(LoggedReader):
    """A list of calls up to `close`; each argument is handed out once complete.

    A `bare` list is text unless it begins with a function name and a bracket.
    """

    def __init__(self, head: str, close: str, *, bare: bool = False) -> None:
        super().__init__(head)
        self._close, self._bare = close, bare
        self._is_empty = True
        self._between: list[str] = []
        self._reset()

    def _reset(self) -> None:
        self._scanner = PythonScanner()
        self._piece: list[str] = []
        self._keys: set[str] = set()
        self._problem = ""
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
            return self._end_list(text.removesuffix(self._close))
        if char == "(":
            self._open_call(text[:-1].strip(" \t\r\n,;["))
        elif self._bare and not re.fullmatch(r"\[\s*(?:[A-Za-z_][\w.\-]*)?\s*", text):
            return self._reject()
        return None

    def finish(self) -> str | None:
        """End the list with the answer."""
        if self._bare and not self._in_call:
            return self._reject()
        between = "".join(self._between)
        between = between[: len(between) - held_tail(between, (self._close,))]
        if self._in_call or self._is_empty or between.strip(" \t\r\n,;["):
            self._log.fail("it was cut off")
        return None

    def _reject(self) -> str:
        self.rejected = True
        return "".join(self._log.raw)

    def _end_list(self, rest: str) -> str:
        if rest.strip(" \t\r\n,;["):
            self._log.fail("expected name(argument=value)")
        return ""

    def _open_call(self, name: str) -> None:
        self._between.clear()
        self._in_call, self._bare, self._is_empty = True, False, False
        self._scanner.depth = 1
        if _CALL.fullmatch(name):
            self._log.begin(name)
        else:
            self._problem = "expected name(argument=value)"

    def _step_call(self, char: str) -> None:
        self._scanner.step(char)
        at_end = self._scanner.depth == 0
        if not self._scanner.quote and (at_end or (char == "," and self._scanner.depth == 1)):
            self._end_argument("".join(self._piece))
            self._piece.clear()
            if at_end:
                self._end_call()
        else:
            self._piece.append(char)

    def _end_argument(self, piece: str) -> None:
        if self._problem or not piece.strip():
            return
        try:
            key, value = _argument(piece)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
            self._problem = str(error)
            return
        if key in self._keys:
            self._problem = f"argument {key!r} is given twice"
        else:
            self._keys.add(key)
            self._log.write_pair(key, value)

    def _end_call(self) -> None:
        if self._problem:
            self._log.fail(self._problem)
        else:
            self._log.end_pairs()
        self._reset()


def _argument(piece: str) -> tuple[str, Any]:
    """Parse `name=value`. Raises ValueError for anything else."""
    key, equals, text = piece.partition("=")
    if not equals or not key.strip().isidentifier():
        raise ValueError(f"expected argument=value, found {piece.strip()!r}")
    tree = ast.parse(text.strip(), mode="eval")
    try:
        value = ast.literal_eval(_Words().visit(tree))
    except ValueError as error:  # its own message contains a memory address
        raise ValueError(f"{text.strip()!r} is an expression, not a value") from error
    return key.strip(), _as_json(value)


class _Words(ast.NodeTransformer):
    """Reads JSON's `true`, `false` and `null` as Python constants, since models mix the two."""

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Constant(_WORDS[node.id]) if node.id in _WORDS else node


def _as_json(value: Any) -> Any:
    """The value as JSON has it, tuples as lists. Raises ValueError or TypeError for what JSON cannot represent."""
    return load_json(json.dumps(value))
