"""Calls whose arguments are JSON: between tags, bare, in Mistral's lists, and behind a name."""

from __future__ import annotations

import re
from typing import Any

from precedent.text.tool_formats.calls import CallReader, EndOfAnswer, ParsedCall, Reading, held_tail
from precedent.text.tool_formats.json_text import (
    JsonScanner,
    dump_json,
    escaped_in_string,
    load_json,
    load_object,
)

_NAMED = re.compile(r"\[TOOL_CALLS\]\s*([^\s\[\]{}]+)\s*(?:\[CALL_ID\][^\[\]{}]*)?(?:\[ARGS\])?\s*")
_NAME = re.compile(r'"name"\s*:\s*"([^"\\]+)"')


class MemberScanner(JsonScanner):
    """Follows a call's JSON to find its name and the characters that belong to the arguments.

    With a given `name` the JSON is the arguments alone; otherwise they are under one of `argument_keys`.
    """

    def __init__(self, name: str | None, argument_keys: tuple[str, ...]) -> None:
        super().__init__()
        self.name, self._argument_keys = name, argument_keys
        self.keys: list[Any] = []
        self._outside = 0 if name is not None else 1
        self._token = ""
        self._in_value = self._found = self._ended = False

    def takes(self, char: str) -> bool:
        """Take a character; True if it belongs to the arguments, which occur once and after the name."""
        depth, starts = self.depth, char == "{" and not self.in_string
        self.step(char)
        if self._found:
            inside, self._ended = not self._ended, self._ended or self.depth <= self._outside
            return inside
        if starts and depth == self._outside and self._at_arguments():
            self._found = True
        elif depth == 1 or self.depth == 1:
            self._step_member(char)
        return self._found

    def peek(self) -> Any:
        """The key or value being collected, if it is complete."""
        try:
            return load_json(self._token)
        except ValueError:
            return None

    def _at_arguments(self) -> bool:
        if self._outside == 0:
            return True
        return self._in_value and self.keys[-1] in self._argument_keys and bool(self.name)

    def _step_member(self, char: str) -> None:
        if self.in_string or char == '"':
            self._token += char
        elif char == ":":
            self.keys.append(self.peek())
            self._in_value, self._token = True, ""
        elif char in ",}":
            value = self.peek()
            if self._in_value and self.keys[-1] == "name" and isinstance(value, str):
                self.name = self.name or value
            self._in_value, self._token = False, ""


class JsonCall(CallReader):
    """One call in JSON; its arguments are handed out as they are written.

    The call ends at a closing tag outside of strings or, without tags, with the JSON itself. An opening tag also ends
    it: the model forgot the closing one. A tag inside a string belongs to the string, if the string is closed.
    """

    def __init__(
        self,
        head: str,
        *,
        open_tag: str = "",
        close_tags: tuple[str, ...] = (),
        name: str | None = None,
        argument_keys: tuple[str, ...] = ("arguments",),
    ) -> None:
        self._open, self._keys, self._given_name = open_tag, argument_keys, name
        self._tags = (*close_tags, open_tag) if open_tag else close_tags
        self._members = MemberScanner(name, argument_keys)
        self._pending: list[str] = []
        super().__init__(head)
        self._log.name = name

    def _read(self) -> Reading:
        longest, ends = max(map(len, self._tags), default=0), {tag[-1] for tag in self._tags}
        tail, hidden_tag, members = "", False, self._members
        try:
            while True:
                char = yield
                if self._refuses(char):
                    self.rejected = True
                    return self._body()
                in_arguments = members.takes(char)
                tail = (tail + char)[-longest:] if longest else ""
                tag = next((tag for tag in self._tags if tail.endswith(tag)), "") if char in ends else ""
                if tag and not members.in_string:
                    return self._cut(len(self._body()) - len(tag), tag)
                hidden_tag = hidden_tag or bool(tag)
                if in_arguments:
                    self._hand_out(char, hidden_tag, held_tail(tail, self._tags))
                if not self._tags and char == "}" and members.depth == 0 and not members.in_string:
                    self._end(self._body())
                    return ""
        except EndOfAnswer:
            return self._finish()

    def _refuses(self, char: str) -> bool:
        """Whether the text turns out not to be a call with this character, or at the end if there is none."""
        return False

    def _finish(self) -> str:
        """Take the call as complete, or else cut it at the first tag that was hidden in a string."""
        if self._refuses(""):
            self.rejected = True
            return self._body()
        body = self._body()
        if closing := held_tail(body, self._tags):  # the answer ends within the closing tag
            without = body[:-closing]
            body = without if isinstance(self._parsed(without), ParsedCall) else body
        cuts = [(body.find(tag), tag) for tag in self._tags if tag in body]
        if cuts and not isinstance(self._parsed(body), ParsedCall):
            return self._cut(*min(cuts))
        self._end(body)
        return ""

    def _body(self) -> str:
        return "".join(self._log.raw[1:])

    def _hand_out(self, char: str, hidden_tag: bool, held: int) -> None:
        """Hand out arguments that cannot be the start of a tag, and nothing after a hidden tag."""
        self._pending.append(escaped_in_string(char) if self._members.in_string else char)
        if hidden_tag:
            return
        if not self._log.begun:
            self._log.begin(self._members.name or "")
        ready = len(self._pending) - held
        if ready > 0:
            self._log.write("".join(self._pending[:ready]), held)
            self._pending = self._pending[ready:]

    def _cut(self, start: int, tag: str) -> str:
        """End the call at a tag of its body; an opening one belongs to the next call. Returns what follows."""
        body = self._body()
        end = start if tag == self._open else start + len(tag)
        del self._log.raw[1 + end :]
        self._end(body[:start])
        return body[end:]

    def _end(self, body: str) -> None:
        call = self._parsed(body)
        if not isinstance(call, ParsedCall):
            name = _NAME.search(body)
            self._log.name = self._log.name or (name.group(1) if name else None)
            self._log.fail(call)
        elif not self._log.begun:
            self._log.begin(call.name)
            self._log.write(dump_json(call.arguments))
            self._log.end()
        else:
            rest = "".join(self._pending)
            if call != ParsedCall(self._log.name or "", load_object(self._log.written + rest)):
                self._log.fail("it has a duplicate key")
                return
            if rest:
                self._log.write(rest)
            self._log.end()

    def _parsed(self, body: str) -> ParsedCall | ValueError | RecursionError:
        try:
            if self._given_name is not None:
                return ParsedCall(self._given_name, load_object(body))
            return _call_of(load_json(body), self._keys)
        except (ValueError, RecursionError) as error:
            return error


class BareCall(JsonCall):
    """A JSON object that may be a call: it is text unless it has a function name, arguments, and little else.

    At the end of an answer, a truncated object that names a function is a call, anything else is text.
    """

    _MEMBERS = frozenset({"name", "type", "id", "parameters", "arguments"})

    def _refuses(self, char: str) -> bool:
        members = self._members
        if not char:
            return not members.name
        if self._log.begun or members.in_string or members.depth != 1:
            return False
        if char == ":":
            return members.peek() not in self._MEMBERS
        if char == "}":
            has_arguments = any(key in self._keys for key in members.keys)
            return not has_arguments or not isinstance(self._parsed(self._body()), ParsedCall)
        return not members.keys and not members.peek() and char not in ' \t\r\n"'


class MistralCalls(CallReader):
    """Mistral's calls: a list of objects, or one call with its name in front, whichever the model writes.

    `[TOOL_CALLS][{"name": …, "arguments": {…}}]`, later `[TOOL_CALLS]look_up[ARGS]{…}`.
    """

    def __init__(self, head: str) -> None:
        self._head = head
        super().__init__(head)

    def _read(self) -> Reading:
        is_empty = True
        try:
            while True:
                head, self._head = self._head, self._head + (yield)
                if self._head.endswith("{"):
                    named, is_empty = _NAMED.fullmatch(head), False
                    yield from self._call(head, "{", named and named[1])
                    return ""
                if self._head.endswith("[") and head.rstrip() == "[TOOL_CALLS]":
                    break
            while (char := (yield)) != "]":
                if char.isspace() or char == ",":
                    self._head += char
                else:
                    is_empty = False
                    yield from self._call(self._head, char, None)
                    self._head = ""
        except EndOfAnswer:
            if is_empty:
                self._log.raw = [self._head]
                self._log.fail("it has no arguments")
        return ""

    def _call(self, head: str, char: str, name: str | None) -> Reading:
        call = JsonCall(head, name=name)
        try:
            while call.feed(char) is None:
                self._log.events += call.take()
                char = yield
        except EndOfAnswer:
            call.finish()
            raise
        finally:
            self._log.events += call.take()
        return ""


def _call_of(value: Any, argument_keys: tuple[str, ...]) -> ParsedCall:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        raise ValueError(f'expected {{"name": "…", "{argument_keys[0]}": {{…}}}}')
    key = next((key for key in argument_keys if key in value), argument_keys[0])
    arguments = value.get(key)
    if isinstance(arguments, str):
        arguments = load_json(arguments)
    if not isinstance(arguments, dict | None):
        raise ValueError(f'"{key}" must be an object, not {type(arguments).__name__}')
    return ParsedCall(value["name"], arguments or {})
