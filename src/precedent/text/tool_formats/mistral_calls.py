"""Mistral's calls: `[TOOL_CALLS][{"name": …, "arguments": {…}}]`, later `[TOOL_CALLS]look_up[ARGS]{…}`."""

from __future__ import annotations

import re

from precedent.text.tool_formats.calls import LoggedReader
from precedent.text.tool_formats.json_calls import JsonCall

_NAMED = re.compile(r"\[TOOL_CALLS\]\s*([^\s\[\]{}]+)\s*(?:\[CALL_ID\][^\[\]{}]*)?(?:\[ARGS\])?\s*")


class MistralCalls(LoggedReader):
    """A list of objects, or one call with its name in front, whichever the model writes."""

    def __init__(self, head: str) -> None:
        super().__init__(head)
        self._head = head
        self._in_list, self._is_empty = False, True
        self._call: JsonCall | None = None

    def feed(self, char: str) -> str | None:
        """Take a character; see `CallReader`."""
        if self._call is not None:
            return self._feed_call(self._call, char)
        self._head += char
        if self._in_list:
            return self._feed_list(char)
        if char == "{":
            self._open_call(_NAMED.fullmatch(self._head[:-1]))
        elif char == "[" and self._head[:-1].rstrip() == "[TOOL_CALLS]":
            self._in_list = True
        return None

    def finish(self) -> str | None:
        """End the call with the answer."""
        if self._call is not None:
            self._call.finish()
            self._log.events += self._call.take()
        elif self._is_empty:
            self._log.raw = [self._head]
            self._log.fail("it has no arguments")
        return None

    def _feed_list(self, char: str) -> str | None:
        if char == "]":
            return ""
        if not char.isspace() and char != ",":
            self._open_call(None)
        return None

    def _open_call(self, named: re.Match[str] | None) -> None:
        self._is_empty = False
        char, head = self._head[-1], self._head[:-1]
        self._call, self._head = JsonCall(head, name=named.group(1) if named else None), ""
        self._call.feed(char)

    def _feed_call(self, call: JsonCall, char: str) -> str | None:
        leftover = call.feed(char)
        self._log.events += call.take()
        if leftover is None:
            return None
        self._call = None
        return None if self._in_list else ""
