"""Combines a call's constraints (forced tool calls, argument schemas, an answer's JSON Schema) into one grammar."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from precedent.errors import ConfigError, UnsupportedError
from precedent.grammar import (
    ANY_OBJECT,
    Answer,
    CallForm,
    Grammar,
    JsonSchema,
    Reasoning,
    Tool,
    check_installed,
    closed,
    is_installed,
    unenforceable,
)
from precedent.langchain.arguments import parallel_calls, strictness
from precedent.langchain.tools import ANY, AUTO, asked_format
from precedent.runtime.plain_values import check_plain

if TYPE_CHECKING:
    from precedent.text.answers import AnswerSyntax
    from precedent.text.tool_formats import ToolFormat


@dataclass(slots=True)
class AnswerRules:
    """The constraints that a call puts on its answer.

    `choice` is `AUTO`, `NONE`, `ANY` or a tool's name. `strict` says how far schemas are enforced:

    - True enforces the schema of every call and refuses a schema that the grammar cannot enforce in full.
    - "auto" does the same for tools marked `strict`. It enforces the schemas of forced calls and of content as far as
      possible, and lists in `relaxed` what it cannot enforce. Other calls are not constrained.
    - False enforces only the outer form: a call of a bound tool with any JSON object.
    """

    choice: str
    parallel: bool
    strict: Any
    response_format: Any
    relaxed: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, settings: Mapping[str, Any], choice: str, default_strict: Any) -> AnswerRules:
        """Read the settings of a call. Raises ConfigError for any other value."""
        parallel = parallel_calls(settings) is not False
        return cls(choice, parallel, strictness(settings, default_strict), settings.get("response_format"))

    def grammar(self, syntax: AnswerSyntax) -> Grammar | None:
        """The grammar of the answer to a prompt; None if the answer is unconstrained.

        Raises UnsupportedError if llguidance is missing, if no grammar can express the model's format of tool calls, or
        if a strict schema cannot be enforced.
        """
        for tool in syntax.tools:  # even without a grammar: the model was shown these schemas
            _check_patterns(tool["function"].get("parameters"), _of_tool(tool["function"]))
        tags, content = syntax.reasoning, self._content()
        reasoning = None if tags is None else Reasoning(tags.open, tags.close, begun=syntax.opened_by_prompt)
        tools = [tool["function"] for tool in syntax.tools if self.choice in (AUTO, ANY, tool["function"]["name"])]
        is_free = self.choice == AUTO and content is None
        strict = any(self._strictness(tool) is True for tool in tools)
        calls_are_free = not tools or (is_free and not strict and self.parallel)
        if calls_are_free and content is None:
            return None
        check_installed()
        if syntax.channels:
            raise UnsupportedError(
                "answers in channels (gpt-oss) cannot be constrained by a grammar: use another model"
            )
        if calls_are_free:
            return Answer(content=content, reasoning=reasoning)
        return Answer(
            form=call_form(syntax.form),
            tools=tuple(map(self._tool, tools)),
            parallel=self.parallel and self.choice in (AUTO, ANY),
            text=is_free,
            content=content if self.choice == AUTO else None,
            reasoning=reasoning,
        )

    def notes(self) -> dict[str, Any]:
        """The entry in `response_metadata` about the grammar, with the parts of schemas that it does not enforce."""
        return {"grammar": {"engine": "llguidance", "relaxed": list(self.relaxed)}}

    def _tool(self, function: Mapping[str, Any]) -> Tool:
        parameters, name = function.get("parameters") or {"type": "object", "properties": {}}, function["name"]
        return Tool(name, self._schema(parameters, _of_tool(function), self._strictness(function)))

    def _strictness(self, function: Mapping[str, Any]) -> Any:
        own = function.get("strict")
        return own if self.strict == "auto" and isinstance(own, bool) else self.strict

    def _content(self) -> JsonSchema | None:
        kind, schema, own = asked_format(self.response_format)
        schema = {"type": "object"} if kind == "json_object" else schema
        if schema is None:
            return None
        return self._schema(schema, "the schema of response_format", own or self._strictness({"strict": own}))

    def _schema(self, schema: Mapping[str, Any], what: str, strict: Any) -> JsonSchema:
        """The schema as far as it can be enforced; notes the rest in `relaxed`."""
        check_plain(what, schema)
        _check_patterns(schema, what)
        if strict is False:
            return ANY_OBJECT
        wanted = JsonSchema.of(closed(schema))
        problem = unenforceable(wanted)
        if problem is None:
            return wanted
        if strict is True:
            raise UnsupportedError(f"{what} cannot be enforced in full ({problem}): change it, or leave strict out")
        self.relaxed.append(f"{what}: {problem}")
        lenient = JsonSchema.of(closed(schema), lenient=True)
        return lenient if unenforceable(lenient) is None else ANY_OBJECT


def _of_tool(function: Mapping[str, Any]) -> str:
    return f"the schema of tool {function['name']!r}"


def _check_patterns(schema: Any, what: str) -> None:
    """Raise ConfigError for a `pattern` that is invalid in every dialect; dropping it would change the schema."""
    for pattern in _patterns(schema):
        try:
            re.compile(pattern)
        except re.error as error:
            if is_installed() and unenforceable(JsonSchema.of({"type": "string", "pattern": pattern})) is not None:
                raise ConfigError(
                    f"{what} has pattern={pattern!r}, which is not a regular expression: {error}"
                ) from error


def _patterns(schema: Any) -> Iterator[str]:
    if isinstance(schema, Mapping):
        if isinstance(schema.get("pattern"), str):
            yield schema["pattern"]
        named = schema.get("patternProperties")
        yield from named if isinstance(named, Mapping) else ()
    parts = schema.values() if isinstance(schema, Mapping) else schema if isinstance(schema, list) else ()
    for part in parts:
        yield from _patterns(part)


def call_form(form: ToolFormat | None) -> CallForm:
    """The model's format of tool calls, for a grammar. Raises UnsupportedError if its arguments are not JSON."""
    if form is None or form.channels or form.arguments != "json":
        name = "of the tokenizer's response template" if form is None else repr(form.name)
        raise UnsupportedError(
            f"a grammar cannot constrain calls in the tool format {name}: use tool_choice='auto' without strict=True, "
            "parallel_tool_calls=False and response_format, or a model that writes calls in JSON"
        )
    begin, between, end = form.call_open, form.name_close, form.call_close
    if form.name_key is not None:
        begin = f'{begin}{{"{form.name_key}": "'
        between, end = f'", "{form.arguments_key}": ', f"}}{end}"
    between_calls = form.separator if form.between is None else form.between
    has_tag = bool(form.tag) and f"{form.list_open}{begin}".startswith(form.tag)
    return CallForm(
        name=form.name,
        trigger=form.tag if has_tag else form.bare_start,
        begin=begin,
        between=between,
        end=end,
        separator=None if form.one_call_per_turn else between_calls,
        opening=form.list_open,
        closing=form.list_close,
        in_json=form.name_key is not None,
        whole_answers=not has_tag,
    )
