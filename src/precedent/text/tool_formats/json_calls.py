"""Calls in JSON: an object with name and arguments (Hermes, Llama), or the arguments alone (Mistral, gpt-oss)."""

from __future__ import annotations

import re
from typing import Any

from precedent.text.tool_formats.calls import CallReader, held_tail
from precedent.text.tool_formats.events import ParsedCall
from precedent.text.tool_formats.json_text import (
    JsonScanner,
    dump_json,
    escaped_in_string,
    load_json,
    load_object,
)

_NAMED = re.compile(r"\[TOOL_CALLS\]\s*([^\s\[\]{}]+)\s*(?:\[CALL_ID\][^\[\]{}]*)?(?:\[ARGS\])?\s*")
_NAME = re.compile(r'"name"\s*:\s*"([^"\\]+)"')


class MemberScanner:
    """Follows a call's JSON to find its name and the characters that belong to the arguments.

    With a given `name` the JSON is the arguments alone; otherwise they are under one of `argument_keys`.
    """

    def __init__(self, name: str | None, argument_keys: tuple[str, ...]) -> None:
        self.json = JsonScanner()
        self.name, self._argument_keys = name, argument_keys
        self.keys: list[Any] = []
        self._outside = 0 if name is not None else 1
        self._token: list[str] = []
        self._in_value = self._found = self._ended = False

    def step(self, char: str) -> bool:
        """Take a character; True if it belongs to the arguments, which occur once and after the name."""
        depth = self.json.depth
        self.json.step(char)
        if self._found:
            inside, self._ended = not self._ended, self._ended or self.json.depth <= self._outside
            return inside
        if depth == self._outside and char == "{" and not self.json.in_string and self._at_arguments():
            self._found = True
            return True
        if depth == 1 or self.json.depth == 1:
            self._step_member(char)
        return False

    def peek(self) -> Any:
        """The key or value being collected, if it is complete."""
        try:
            return load_json("".join(self._token))
        except ValueError:
            return None

    def _at_arguments(self) -> bool:
        if self._outside == 0:
            return True
        return self._in_value and self.keys[-1] in self._argument_keys and bool(self.name)

    def _step_member(self, char: str) -> None:
        """Collect keys and values of the outermost object; only string values matter."""
        if self.json.in_string or char == '"':
            self._token.append(char)
        elif char == ":":
            self.keys.append(self._token_value())
            self._in_value = True
        elif char in ",}":
            self._end_value()

    def _end_value(self) -> None:
        value = self._token_value()
        if self._in_value and self.keys[-1] == "name" and isinstance(value, str):
            self.name = self.name or value
        self._in_value = False

    def _token_value(self) -> Any:
        value = self.peek()
        self._token = []
        return value


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
        super().__init__(head)
        self._log.name = name
        self._open, self._keys = open_tag, argument_keys
        self._tags = (*close_tags, open_tag) if open_tag else close_tags
        self._longest = max(map(len, self._tags), default=0)
        self._ends = {tag[-1] for tag in self._tags}
        self._members = MemberScanner(name, argument_keys)
        self._given_name = name
        self._tail = ""
        self._pending: list[str] = []
        self._hidden_tag = False

    def feed(self, char: str) -> str | None:
        """Take a character; see `CallReader`."""
        self._log.raw.append(char)
        in_arguments = self._members.step(char)
        self._tail = (self._tail + char)[-self._longest :] if self._longest else ""
        tag = self._complete_tag() if char in self._ends else ""
        if tag and not self._members.json.in_string:
            return self._end_at(tag)
        self._hidden_tag = self._hidden_tag or bool(tag)
        if in_arguments:
            self._hand_out(char)
        if not self._tags and char == "}" and self._members.json.depth == 0 and not self._members.json.in_string:
            self._end(self._body())
            return ""
        return None

    def finish(self) -> str | None:
        """Take the call as complete, or else cut it at the first tag that was hidden in a string."""
        body = self._body()
        if closing := held_tail(body, self._tags):  # the answer ends within the closing tag
            without = body[:-closing]
            body = without if isinstance(self._parsed(without), ParsedCall) else body
        cuts = [(body.find(tag), tag) for tag in self._tags if tag in body]
        if cuts and isinstance(self._parsed(body), ValueError | RecursionError):
            return self._cut(*min(cuts))
        self._end(body)
        return None

    def _body(self) -> str:
        return "".join(self._log.raw[1:])

    def _complete_tag(self) -> str:
        return next((tag for tag in self._tags if self._tail.endswith(tag)), "")

    def _hand_out(self, char: str) -> None:
        """Hand out arguments that cannot be the start of a tag, and nothing after a hidden tag."""
        in_string = self._members.json.in_string
        self._pending.append(escaped_in_string(char) if in_string else char)
        if self._hidden_tag:
            return
        if not self._log.begun:
            self._log.begin(self._members.name or "")
        held = held_tail(self._tail, self._tags)
        ready = len(self._pending) - held
        if ready > 0:
            self._log.write("".join(self._pending[:ready]), held)
            self._pending = self._pending[ready:]

    def _end_at(self, tag: str) -> str:
        """End the call at a tag; an opening one belongs to the next call."""
        body = self._body()[: -len(tag)]
        if tag != self._open:
            self._end(body)
            return ""
        del self._log.raw[-len(tag) :]
        self._end(body)
        return tag

    def _cut(self, start: int, tag: str) -> str:
        """At the end of the answer, end the call at the first tag within its body."""
        body = self._body()
        end = start if tag == self._open else start + len(tag)
        del self._log.raw[1 + end :]
        self._end(body[:start])
        return body[end:]

    def _end(self, body: str) -> None:
        call = self._parsed(body)
        if isinstance(call, ParsedCall):
            self._end_valid(call)
            return
        name = _NAME.search(body)
        self._log.name = self._log.name or (name.group(1) if name else None)
        self._log.fail(call)

    def _end_valid(self, call: ParsedCall) -> None:
        if not self._log.begun:
            self._log.begin(call.name)
            self._log.write(dump_json(call.arguments))
        elif not self._agrees(call):
            self._log.fail("it has a duplicate key")
            return
        elif self._pending:
            self._log.write("".join(self._pending))
        self._log.end()

    def _agrees(self, call: ParsedCall) -> bool:
        """Return whether the arguments handed out are those of the whole call."""
        return call == ParsedCall(self._log.name or "", load_object(self._log.written + "".join(self._pending)))

    def _parsed(self, body: str) -> ParsedCall | ValueError | RecursionError:
        try:
            if self._given_name is not None:
                return ParsedCall(self._given_name, load_object(body))
            return _call_of(load_json(body), self._keys)
        except (ValueError, RecursionError) as error:
            return error


class BareCall(JsonCall):
    """A JSON object that may be a call: it is text unless it has a function name, arguments, and little else."""

    _MEMBERS = frozenset({"name", "type", "id", "parameters", "arguments"})

    def feed(self, char: str) -> str | None:
        """Take a character; hand back the whole text as soon as it cannot be a call."""
        if not self._log.begun and not self._members.json.in_string and not self._may_go_on(char):
            return self._reject(char)
        return super().feed(char)

    def finish(self) -> str | None:
        """End with the answer: a truncated object that names a function is a call, anything else is text."""
        return super().finish() if self._members.name else self._reject("")

    def _may_go_on(self, char: str) -> bool:
        if self._members.json.depth != 1:
            return True
        if char == ":":
            return self._members.peek() in self._MEMBERS
        if char == "}":
            has_arguments = any(key in self._keys for key in self._members.keys)
            return has_arguments and isinstance(self._parsed(self._body() + char), ParsedCall)
        return bool(self._members.keys or self._members.peek()) or char in ' \t\r\n"'

    def _reject(self, char: str) -> str:
        self.rejected = True
        return self._body() + char


class MistralCalls(CallReader):
    """Mistral's calls: a list of objects, or one call with its name in front, whichever the model writes.

    `[TOOL_CALLS][{"name": …, "arguments": {…}}]`, later `[TOOL_CALLS]look_up[ARGS]{…}`.
    """

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
