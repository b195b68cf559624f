"""Gemma's calls: `call:look_up{number:<escape>1042<escape>,copies:2}`, keys and values without JSON's quotes."""

from __future__ import annotations

import json
import re
from typing import Any

from precedent.text.tool_formats.calls import LoggedReader
from precedent.text.tool_formats.json_scanner import load_json

_HEAD = re.compile(r"\s*call:\s*([\w.\-]+)\s*")
_BARE_KEY = re.compile(r"(?<=[{,])(\s*)([A-Za-z_][\w.\-]*)(\s*:)")


class GemmaCall(LoggedReader):
    """One call up to `close`; strings are enclosed in `quote` marks. Each argument is handed out once complete."""

    def __init__(self, head: str, quote: str, close: str) -> None:
        super().__init__(head)
        self._quote, self._close = quote, close
        self._longest = max(len(quote), len(close))
        self._piece: list[str] = []
        self._keys: set[str] = set()
        self._depth = 0
        self._in_text = self._complete = False
        self._problem = ""

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
            self._open()
        elif char in ",}" and self._depth == 1:
            self._end_argument("".join(self._piece[:-1]))
            self._piece.clear()
        self._depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(char, 0)
        self._complete = self._complete or (char == "}" and self._depth == 0)
        return None

    def _open(self) -> None:
        head = _HEAD.fullmatch("".join(self._piece[:-1]))
        if head is None:
            self._problem = "expected call:name{argument:value}"
        else:
            self._log.begin(head.group(1))
        self._piece.clear()

    def _end_argument(self, piece: str) -> None:
        if self._problem or (not piece.strip() and not self._keys):
            return
        key, colon, value = piece.partition(":")
        key = key.replace(self._quote, "").strip(' \t\r\n"')
        try:
            if not colon or not key or key in self._keys:
                raise ValueError(f"expected argument:value, found {piece.strip()!r}")
            self._keys.add(key)
            self._log.write_pair(key, self._value(value))
        except (ValueError, RecursionError) as error:
            self._problem = str(error)

    def _value(self, text: str) -> Any:
        """Parse the text of a value. Raises ValueError."""
        parts = text.split(self._quote)
        plain = [_BARE_KEY.sub(r'\1"\2"\3', part) for part in parts[::2]]
        quoted = [json.dumps(part) for part in parts[1::2]]
        return load_json("".join(piece for pair in zip(plain, [*quoted, ""], strict=True) for piece in pair))

    def _end(self, rest: str) -> None:
        problem = self._problem
        if not self._complete:
            problem = problem or "it was cut off"
        elif rest.strip():
            problem = problem or "there is text after its arguments"
        if problem:
            self._log.fail(problem)
        else:
            self._log.end_pairs()
