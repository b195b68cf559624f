"""Descriptions of allowed answers: a JSON Schema, a regular expression, a Lark grammar, or text with tool calls.

Descriptions are plain values (hashable, comparable), independent of tokenizer and grammar engine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from precedent.errors import ConfigError, UnsupportedError


@dataclass(frozen=True, slots=True)
class JsonSchema:
    """JSON that a schema allows, on one line, with the spacing of `json.dumps` and properties in the schema's order.

    `lenient` ignores what the grammar engine cannot enforce instead of refusing it.

    >>> JsonSchema.of({"type": "boolean"}).text
    '{"type": "boolean"}'
    """

    text: str
    lenient: bool = False

    @classmethod
    def of(cls, schema: Mapping[str, Any] | bool, *, lenient: bool = False) -> Self:
        """Create from a schema as a dict or bool. Raises ConfigError if it cannot be written as JSON."""
        try:
            return cls(json.dumps(schema, allow_nan=False), lenient)
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"a JSON Schema must be made of JSON values: {error}") from error

    @property
    def schema(self) -> Any:
        """The schema as a dict or bool."""
        return json.loads(self.text)


ANY_OBJECT = JsonSchema('{"type": "object"}')
"""Any JSON object."""


@dataclass(frozen=True, slots=True)
class Regex:
    """Text that matches a regular expression from its first to its last character (Rust's syntax, no lookaround)."""

    pattern: str


@dataclass(frozen=True, slots=True)
class Lark:
    """A grammar in llguidance's dialect of Lark, with a rule `start`."""

    text: str


@dataclass(frozen=True, slots=True)
class CallForm:
    """How a tool format writes calls whose arguments are JSON.

    One call is `begin`, the name, `between`, the arguments, `end`. The calls of an answer are `opening`, calls joined
    by `separator`, `closing`; a `separator` of None means one call per answer. `trigger` is the start of
    `opening + begin` that distinguishes calls from text; a form of `whole_answers` has no text beside its calls.
    Control tokens are written as their text. `in_json` says that the name is inside a JSON string.
    """

    name: str
    trigger: str
    begin: str
    between: str
    end: str
    separator: str | None = "\n"
    opening: str = ""
    closing: str = ""
    in_json: bool = True
    whole_answers: bool = False

    def __post_init__(self) -> None:
        if not self.trigger or not (self.opening + self.begin).startswith(self.trigger):
            raise ConfigError(f"the trigger {self.trigger!r} of the call form {self.name!r} must start its calls")


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool and the schema of its arguments."""

    name: str
    arguments: JsonSchema = ANY_OBJECT


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Optional reasoning at the start, between two markers; `begun` if the prompt already contains the first one."""

    opening: str = "<think>"
    closing: str = "</think>"
    begun: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer in one grammar: reasoning, then text, calls or JSON.

    `tools` are called in the given `form`, several per answer unless `parallel` is False. With `text` the model decides
    whether to call and may write text beside the calls; without it the answer is calls alone, or `content`.
    Raises ConfigError if no answer would be possible, UnsupportedError if calls and content cannot be told apart.
    """

    form: CallForm | None = None
    tools: tuple[Tool, ...] = ()
    parallel: bool = True
    text: bool = False
    content: JsonSchema | None = None
    reasoning: Reasoning | None = None

    def __post_init__(self) -> None:
        if bool(self.tools) != (self.form is not None):
            raise ConfigError("give tools and the form of their calls together")
        if not (self.tools or self.text or self.content):
            raise ConfigError("an answer needs tools, text or content")
        if self.content and self.text:
            raise ConfigError("content is the whole answer: set text=False with it")
        if self.content and self.form and self.form.whole_answers:
            raise UnsupportedError(f"calls in the form {self.form.name!r} look like content: use another form")


Grammar = JsonSchema | Regex | Lark | Answer
"""What `Engine.submit(grammar=…)` takes."""
