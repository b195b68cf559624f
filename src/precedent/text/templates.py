"""Premade responses with named holes, like `Document {document_id} is open`, for what an agent says again and again.

A template only proposes. The model remains free to write something else.
"""

from __future__ import annotations

import json
import string
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Self

from precedent.errors import ConfigError
from precedent.runtime.plain_values import shown
from precedent.text.tool_formats.formats import HERMES, ToolFormat
from precedent.text.tool_schema import referenced

MOST_READ = 1 << 20
"""Templates that are read of an iterable, however many it yields: far more than are allowed."""

MOST_TEMPLATES = 1024
"""Premade responses of one list; forms of tool calls do not count."""

MOST_CHARACTERS = 262_144
"""Characters of all premade responses of one list together."""

MOST_HOLES = 512
"""Holes of all premade responses of one list together."""

KINDS = ("text", "string", "number", "json")
"""Kinds of text that fill a hole: plain text, the inside of a JSON string, a JSON number, or any JSON value."""


@dataclass(frozen=True, slots=True)
class Hole:
    """A place whose text is not known in advance; `choices` lists its possible texts, as written, if there are few.

    Raises ConfigError for an unknown kind or an empty choice.
    """

    name: str
    kind: str = "text"
    choices: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"hole {self.name!r} is of kind {self.kind!r}: use one of {', '.join(KINDS)}")
        if not all(self.choices):
            raise ConfigError(f"hole {self.name!r} has an empty choice: leave it out")


@dataclass(frozen=True, slots=True)
class Template:
    """Literal texts and the holes between them, in order; `is_call` marks the template of a tool call.

    Raises ConfigError if there is no literal text, or if two holes have nothing between them: the end of the first
    one could not be found.

    >>> Template.parse("Order {number} was sent.").parts
    ('Order ', Hole(name='number', kind='text', choices=()), ' was sent.')
    """

    parts: tuple[str | Hole, ...]
    is_call: bool = False

    def __post_init__(self) -> None:
        if not any(isinstance(part, str) and part.strip() for part in self.parts):
            raise ConfigError(f"template {shown(self.text)} has no text of its own: write the text around the holes")
        for left, right in zip(self.parts, self.parts[1:], strict=False):
            if isinstance(left, Hole) and isinstance(right, Hole):
                raise ConfigError(
                    f"template {shown(self.text)} has nothing between the holes {left.name!r} and {right.name!r}: "
                    "put text between them, or make them one"
                )

    @classmethod
    def parse(cls, text: str, choices: Mapping[str, Sequence[str]] | None = None) -> Template:
        """Parse a text in the syntax of `str.format`: `{name}` is a hole, `{{` and `}}` are literal braces.

        `choices` maps names of holes to the few texts they can have. Raises ConfigError, saying what is wrong.
        """
        parts: list[str | Hole] = []
        for literal, hole in _parsed(text):
            if literal:
                parts.append(literal)
            if hole is not None:
                parts.append(Hole(hole, choices=tuple((choices or {}).get(hole, ()))))
        return cls(tuple(parts))

    @property
    def holes(self) -> tuple[Hole, ...]:
        """The holes, in order."""
        return tuple(part for part in self.parts if isinstance(part, Hole))

    @property
    def text(self) -> str:
        """The template in the syntax that `parse` reads."""
        escaped = (part.replace("{", "{{").replace("}", "}}") for part in self.parts if isinstance(part, str))
        return "".join(f"{{{part.name}}}" if isinstance(part, Hole) else next(escaped) for part in self.parts)


class Templates(tuple[Template, ...]):
    """Premade responses, checked: texts with `{holes}`, or `Template` objects.

    `choices` maps names of holes to the few texts they can have. Raises ConfigError for a template that cannot be
    parsed or is given twice, for choices of a hole that no template has, and for more than `MOST_TEMPLATES` templates,
    `MOST_CHARACTERS` characters or `MOST_HOLES` holes.

    >>> len(Templates(["Order {number} is {state}.", "Welcome back."], choices={"state": ["open", "sent"]}))
    2
    >>> Templates(["{number}"])
    Traceback (most recent call last):
    precedent.errors.ConfigError: template '{number}' has no text of its own: write the text around the holes
    """

    __slots__ = ()

    def __new__(
        cls, templates: Iterable[str | Template] = (), *, choices: Mapping[str, Sequence[str]] | None = None
    ) -> Self:
        """Check the templates."""
        if isinstance(templates, str):
            raise ConfigError(f"templates={shown(templates)} is one text: give a list of them")
        if not isinstance(templates, Iterable):
            raise ConfigError(f"templates={shown(templates)} must be a list of texts")
        given = list(islice(templates, MOST_READ))  # an endless one is refused, not read on
        premade = [one for one in given if not (isinstance(one, Template) and one.is_call)]
        parts = [part for one in premade for part in (one.parts if isinstance(one, Template) else [one])]
        size = sum(len(part) for part in parts if isinstance(part, str))
        _check_number(len(premade), "templates", MOST_TEMPLATES, "give those that the model says most often")
        _check_number(size, "characters", MOST_CHARACTERS, "give fewer or shorter ones")
        checked = super().__new__(cls, (_template(template, choices) for template in given))
        num_holes = sum(len(template.holes) for template in checked if not template.is_call)
        _check_number(num_holes, "holes", MOST_HOLES, "give fewer")
        _check_names(checked, choices or {})
        return checked

    def __repr__(self) -> str:
        return f"Templates({[template.text for template in self]!r})"


def _check_number(number: int, what: str, most: int, advice: str) -> None:
    if number > most:
        raise ConfigError(f"templates holds {number:,} {what}, at most {most:,} are allowed: {advice}")


def _check_names(templates: Sequence[Template], choices: Mapping[str, Sequence[str]]) -> None:
    twice = [template for template, count in Counter(templates).items() if count > 1]
    if twice:
        raise ConfigError(f"template {shown(twice[0].text)} is given twice: leave one out")
    names = {hole.name for template in templates for hole in template.holes}
    for name in choices:
        if name not in names:
            known = ", ".join(sorted(names)) or "none"
            raise ConfigError(f"choices are given for {name!r}, which no template has as a hole (holes: {known})")


def _template(template: object, choices: Mapping[str, Sequence[str]] | None) -> Template:
    if isinstance(template, Template):
        return template
    if isinstance(template, str):
        return Template.parse(template, choices)
    raise ConfigError(f"template {shown(template)} is neither a text nor a Template")


def _parsed(text: str) -> Iterator[tuple[str, str | None]]:
    try:
        fields = list(string.Formatter().parse(text))
    except ValueError as error:
        raise ConfigError(
            f"template {shown(text)} cannot be read ({error}): write a literal brace as {{{{ or }}}}"
        ) from None
    for literal, name, form, conversion in fields:
        if name is not None and (not name.isidentifier() or form or conversion):
            raise ConfigError(
                f"template {shown(text)} has a hole that is not a plain name ({shown(name or 'empty')}): write "
                "{name}, or {{ for a literal brace"
            )
        yield literal, name


_MAX_REFERENCES = 8


def tool_templates(tools: Sequence[Mapping[str, Any]], form: ToolFormat | None = HERMES) -> tuple[Template, ...]:
    """Templates for calls of these tools (checked OpenAI function dicts); none if `form` has no JSON arguments."""
    if form is None or form.arguments != "json":
        return ()
    return tuple(template for tool in tools for template in _templates_of(tool["function"], form))


def _templates_of(function: Mapping[str, Any], form: ToolFormat) -> list[Template]:
    schema = function.get("parameters") or {}
    properties = schema.get("properties") or {}
    required = [name for name in properties if name in (schema.get("required") or ())]
    variants = [required, list(properties)] if required != list(properties) else [required]
    around = form.around_arguments(function["name"])
    return [_call_template(around, {name: properties[name] for name in names}, schema) for names in variants]


def _call_template(around: tuple[str, str], arguments: Mapping[str, Any], root: Mapping[str, Any]) -> Template:
    before, after = around
    parts: list[str | Hole] = [f"{before}{{"]
    for number, (name, schema) in enumerate(arguments.items()):
        parts.append(f"{', ' if number else ''}{_json(name)}: ")
        parts += _value(name, schema, root)
    return Template(_joined([*parts, f"}}{after}"]), is_call=True)


def _value(name: str, schema: Any, root: Mapping[str, Any]) -> list[str | Hole]:
    """The parts of a value that its schema determines, with holes for the rest."""
    schema = _resolved(schema, root)
    choices = _choices(schema)
    kind = schema.get("type")
    if choices:
        return [Hole(name, "json", choices)]
    if kind == "string":
        return ['"', Hole(name, "string"), '"']
    if kind in ("integer", "number"):
        return [Hole(name, "number")]
    if kind == "array":
        return ["[", *_value(name, schema.get("items"), root), "]"]
    if kind == "object":
        return ["{", Hole(name, "json"), "}"]
    return [Hole(name, "json")]


def _choices(schema: Mapping[str, Any]) -> tuple[str, ...]:
    if "const" in schema:
        return (_json(schema["const"]),)
    if schema.get("enum"):
        return tuple(dict.fromkeys(map(_json, schema["enum"])))
    return ("true", "false") if schema.get("type") == "boolean" else ()


def _resolved(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Resolve references within the document and take the first alternative that is not null."""
    for _ in range(_MAX_REFERENCES):
        if not isinstance(schema, Mapping):
            return {}
        if isinstance(schema.get("$ref"), str):
            schema = referenced(schema["$ref"], root)
        elif alternatives := schema.get("anyOf") or schema.get("oneOf"):
            schema = next((one for one in alternatives if not _is_null(one)), {})
        else:
            return schema
    return {}


def _is_null(schema: Any) -> bool:
    return isinstance(schema, Mapping) and schema.get("type") == "null"


def _joined(parts: Sequence[str | Hole]) -> tuple[str | Hole, ...]:
    joined: list[str | Hole] = []
    for part in parts:
        if isinstance(part, str) and joined and isinstance(joined[-1], str):
            joined[-1] += part
        else:
            joined.append(part)
    return tuple(joined)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
