"""Qwen3-Coder's calls: one tag per parameter, values without quotes.

<tool_call>
<function=look_up>
<parameter=number>
1042
</parameter>
</function>
</tool_call>
"""

from __future__ import annotations

import re

from precedent.text.tool_formats.argument_types import ArgumentTypes, typed_value
from precedent.text.tool_formats.calls import LoggedReader, StringWriter
from precedent.text.tool_formats.description import Tools
from precedent.text.tool_formats.json_scanner import dump_json

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_VALUE_END = "</parameter>"
_TAG = re.compile(r"\s*<(?:(?P<kind>function|parameter)=(?P<name>[^<>\n]+)|(?P<end>/function))>")


class XmlCall(LoggedReader):
    """One call in tags. A string parameter is handed out as it is written, any other once complete.

    A value ends at the first `</parameter>`, because the format has no way to quote one.
    """

    def __init__(self, head: str, tools: Tools) -> None:
        super().__init__(head)
        self._types = ArgumentTypes(tools)
        self._keys: list[str] = []
        self._value: list[str] | None = None
        self._text: StringWriter | None = None
        self._start_over()

    def _start_over(self) -> None:
        self._seen: list[str] = []
        self._complete = False
        self._problem = ""

    def feed(self, char: str) -> str | None:
        """Take a character; see `CallReader`."""
        self._log.raw.append(char)
        if self._text is not None:
            self._step_text(self._text, char)
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
        if seen.endswith(CLOSE):
            self._end("" if not seen.removesuffix(CLOSE).strip() else "there is text between its tags")
            return ""
        if seen.endswith(OPEN):
            del self._log.raw[-len(OPEN) :]
            self._end()
            return OPEN
        if not self._problem:
            self._problem = self._follow(_TAG.fullmatch(seen))
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
        self._keys.append(key)
        if self._types.of(self._log.name or "", key) == {"string"}:
            self._log.write(f'{"{" if len(self._keys) == 1 else ", "}{dump_json(key)}: "')
            self._text = StringWriter(self._log, (f"\n{_VALUE_END}", _VALUE_END))
        else:
            self._value = []
        return ""

    def _step_text(self, text: StringWriter, char: str) -> None:
        if text.step(char, skip="\n"):
            self._log.write('"')
            self._text = None

    def _step_value(self, value: list[str], char: str) -> None:
        value.append(char)
        if char == ">" and (text := "".join(value)).endswith(_VALUE_END):
            self._value = None
            text = text.removesuffix(_VALUE_END).removeprefix("\n").removesuffix("\n")
            key = self._keys[-1]
            self._log.write_pair(key, typed_value(text, self._types.of(self._log.name or "", key)))

    def _end(self, problem: str = "") -> None:
        problem = self._problem or problem
        if not self._complete:
            problem = problem or "its function is not closed"
        if problem:
            self._log.fail(problem)
        else:
            self._log.end_pairs()
