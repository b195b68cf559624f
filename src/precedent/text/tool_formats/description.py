"""A tool format as data: how a model family writes tool calls, and how to recognise its chat template."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from precedent.text.tool_formats.calls import CallReader

Tools = Sequence[Mapping[str, Any]]
"""OpenAI function dicts."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model family writes tool calls.

    Writing: a call is `call_open`, the call itself, `call_close`. `separator` precedes a call that follows text and
    separates two calls (`between` overrides the latter); `list_open` and `list_close` enclose all calls of an answer.
    With `name_key` the call itself is a JSON object with the name and, under `arguments_key`, the arguments; without
    it, the call is the name, `name_close`, and the arguments. `arguments` is their syntax: "json", "xml", "python" or
    "gemma".

    Reading: `tag` opens a call anywhere, and `reader` creates the reader for the rest of it. `bare_start` is a
    character that opens a call at the beginning of an answer, for `bare_reader`. A format with `channels` (gpt-oss)
    sorts the whole answer into messages instead. `tags` are the texts that mean something to the format or its
    template; in messages of users and tools they are plain text.

    Recognising: a chat template is in this format if it contains every text of `known_by` and none of `not_by`.

    Templates: `id_length` is the length of call ids that the template requires, `one_call_per_turn` says that it shows
    only one call per turn, `reasoning_key` is the message key from which it reads reasoning.
    """

    name: str
    models: str
    known_by: tuple[str, ...]
    reader: Callable[[ToolFormat, Tools], CallReader] | None
    not_by: tuple[str, ...] = ()
    call_open: str = ""
    call_close: str = ""
    separator: str = ""
    between: str | None = None
    list_open: str = ""
    list_close: str = ""
    name_key: str | None = None
    arguments_key: str = "arguments"
    name_close: str = ""
    arguments: str = "json"
    tag: str = ""
    bare_start: str = ""
    bare_reader: Callable[[ToolFormat, Tools], CallReader] | None = None
    tags: tuple[str, ...] = ()
    channels: bool = False
    id_length: int | None = None
    one_call_per_turn: bool = False
    reasoning_key: str = "reasoning_content"

    def wrote(self, template: str) -> bool:
        """Whether a chat template writes calls in this format."""
        return all(text in template for text in self.known_by) and not any(text in template for text in self.not_by)

    def around_arguments(self, name: str) -> tuple[str, str]:
        """The text before and after the arguments in an answer that is one call of `name`."""
        if self.name_key is None:
            before, after = f"{name}{self.name_close}", ""
        else:
            before = f"{{{_json(self.name_key)}: {_json(name)}, {_json(self.arguments_key)}: "
            after = "}"
        return f"{self.list_open}{self.call_open}{before}", f"{after}{self.call_close}{self.list_close}"


def _json(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)
