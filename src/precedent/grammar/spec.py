"""What an answer may be, as data: a JSON Schema, a regular expression, a Lark grammar, or text with tool calls.

Descriptions are values (hashable, comparable) and know no tokenizer and no grammar engine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from precedent.errors import ConfigError, UnsupportedError


@dataclass(frozen=True, slots=True)
class JsonSchema:
    """JSON that a schema allows, on one line and spaced as `json.dumps` spaces it, properties in the schema's order.

    `lenient` ignores what the grammar engine cannot enforce instead of refusing it.
    """

    text: str
    lenient: bool = False

    @classmethod
    def of(cls, schema: Mapping[str, Any] | bool, *, lenient: bool = False) -> Self:
        """From a schema as a dict. Raises ConfigError if it cannot be written as JSON."""
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

    One call is `begin`, the name, `between`, the arguments, `end`. All calls of an answer are `opening`, calls joined
    by `separator`, `closing`; a `separator` of None means one call per answer. `trigger` starts `opening + begin` and
    is what sets calls apart from text; a form of `whole_answers` has no text beside its calls. Control tokens stand in
    the texts as they are written. `in_json` says that the name stands inside a JSON string.
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
    """A tool that may be called, with the schema of its arguments."""

    name: str
    arguments: JsonSchema = ANY_OBJECT


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Thinking that may come first, between two markers; `begun` when the prompt wrote the first one already."""

    opening: str = "<think>"
    closing: str = "</think>"
    begun: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer under one automaton: reasoning, then text, calls or JSON.

    `tools` may be called in the `form`, one after the other unless `parallel` is False. With `text` the model decides
    whether to call and may write beside the calls; without it the answer is calls alone, or `content`.
    Raises ConfigError where nothing would be left to write, UnsupportedError where calls and content look the same.
    """

    form: CallForm | None = None
    tools: tuple[Tool, ...] = ()
    parallel: bool = True
    text: bool = False
    content: JsonSchema | None = None
    reasoning: Reasoning | None = None

    def __post_init__(self) -> None:
        if bool(self.tools) != (self.form is not None):
            raise ConfigError("tools and the form of their calls go together")
        if not (self.tools or self.text or self.content):
            raise ConfigError("an answer needs tools, text or content")
        if self.content and self.text:
            raise ConfigError("content is the whole answer: it allows no text beside it")
        if self.content and self.form and self.form.whole_answers:
            raise UnsupportedError(f"calls in the form {self.form.name!r} bear no mark: they could be content")


Grammar = JsonSchema | Regex | Lark | Answer
"""What `Engine.submit(grammar=…)` takes."""
