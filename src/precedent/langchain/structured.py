"""What a call's answer must be: forced calls, schemas of arguments, JSON of a schema, as one grammar."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from langchain_core.utils.function_calling import convert_to_json_schema
from langchain_core.utils.pydantic import is_basemodel_subclass

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
    unenforceable,
)
from precedent.langchain.tools import ANY, AUTO

if TYPE_CHECKING:
    from precedent.text.answers import AnswerSyntax
    from precedent.text.tool_formats import ToolFormat

STRICT = ("auto", True, False)


@dataclass(slots=True)
class AnswerRules:
    """What a call asks of its answer.

    `choice` is `AUTO`, `NONE`, `ANY` or a tool's name. `strict` says how far schemas bind: True holds every call to its
    tool's schema and refuses a schema that the grammar cannot enforce in full; "auto" leaves calls of the model's own
    accord alone, holds forced ones and content to their schemas, and where one cannot be enforced in full says so in
    `relaxed`; False asks for the outer form alone, a call of a bound tool with some JSON object.
    """

    choice: str = AUTO
    parallel: bool = True
    strict: Any = "auto"
    response_format: Any = None
    relaxed: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, kwargs: Mapping[str, Any], choice: str, default_strict: Any) -> AnswerRules:
        """From the arguments of a call. Raises ConfigError on a value that is none of those above."""
        strict = next(
            (kwargs[name] for name in ("strict", "strict_tools") if kwargs.get(name) is not None), default_strict
        )
        check_strict(strict)
        return cls(choice, kwargs.get("parallel_tool_calls") is not False, strict, kwargs.get("response_format"))

    def grammar(self, syntax: AnswerSyntax) -> Grammar | None:
        """The grammar of the answer to a prompt, None where the model may write what it likes.

        Raises UnsupportedError where llguidance is missing, the model writes calls in a form that no grammar holds, or
        `strict` meets a schema that cannot be enforced.
        """
        content, reasoning = self._content(), _reasoning(syntax)
        tools = [tool["function"] for tool in syntax.tools if self.choice in (AUTO, ANY, tool["function"]["name"])]
        is_free = self.choice == AUTO and content is None
        calls_are_free = not tools or (is_free and self.strict is not True and self.parallel)
        if calls_are_free and content is None:
            return None
        check_installed()
        if syntax.channels:
            raise UnsupportedError(
                "answers in channels (gpt-oss) cannot be held to a grammar: use another model for it"
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
        """What `response_metadata` says of a grammar that was used: what of the schemas it does not enforce."""
        return {"grammar": {"engine": "llguidance", "relaxed": list(self.relaxed)}}

    def _tool(self, function: Mapping[str, Any]) -> Tool:
        parameters, name = function.get("parameters") or {"type": "object", "properties": {}}, function["name"]
        return Tool(name, self._schema(parameters, f"the schema of tool {name!r}", self.strict))

    def _content(self) -> JsonSchema | None:
        """The schema of the whole answer, None for text."""
        schema, strict = schema_of(self.response_format)
        return None if schema is None else self._schema(schema, "the schema of response_format", strict or self.strict)

    def _schema(self, schema: Mapping[str, Any], what: str, strict: Any) -> JsonSchema:
        """A schema as far as it can be enforced, and a note where that is not far enough."""
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


def check_strict(strict: Any) -> None:
    """Raise ConfigError unless `strict` is one of the three."""
    if not any(strict is known or (isinstance(strict, str) and strict == known) for known in STRICT):
        raise ConfigError(f"strict={strict!r} must be 'auto', True or False")


def schema_of(response_format: Any) -> tuple[Mapping[str, Any] | None, bool]:
    """The JSON Schema that a `response_format` asks for, None for text, and whether it is said to be strict.

    Reads OpenAI's dicts of type `text`, `json_object` and `json_schema`, and classes (pydantic, TypedDict).
    Raises ConfigError on anything else.
    """
    if isinstance(response_format, type):
        return json_schema_of(response_format), False
    kind = response_format.get("type") if isinstance(response_format, Mapping) else response_format
    if kind in (None, "text"):
        return None, False
    if kind == "json_object":
        return ANY_OBJECT.schema, False
    described = response_format.get("json_schema") if kind == "json_schema" else None
    schema = described.get("schema") if isinstance(described, Mapping) else None
    if not isinstance(described, Mapping) or not isinstance(schema, Mapping):
        raise ConfigError(
            f"response_format={response_format!r} is neither a class nor a dict of type 'text', 'json_object' or "
            '\'json_schema\' ({"type": "json_schema", "json_schema": {"name": …, "schema": {…}}})'
        )
    return schema, described.get("strict") is True


def json_schema_of(schema: Any) -> dict[str, Any]:
    """The JSON Schema of a pydantic class (v2 or v1), a TypedDict, a function, or a dict that describes one.

    Raises ConfigError on anything else.
    """
    if isinstance(schema, type) and is_basemodel_subclass(schema):
        describe: Any = getattr(schema, "model_json_schema", None) or schema.schema  # type: ignore[attr-defined]
        found: dict[str, Any] = describe()
        return found
    try:
        return convert_to_json_schema(schema)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"{schema!r} is no schema ({str(error).splitlines()[0]}): "
            "give a pydantic class, a TypedDict, or a JSON Schema"
        ) from error


def call_form(form: ToolFormat | None) -> CallForm:
    """How the model writes calls, for a grammar. Raises UnsupportedError for formats whose arguments are not JSON."""
    if form is None or form.channels or form.arguments != "json":
        name = "of the tokenizer's response template" if form is None else repr(form.name)
        raise UnsupportedError(
            f"calls in the tool format {name} cannot be held to a grammar: use tool_choice='auto' without strict=True, "
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


def _reasoning(syntax: AnswerSyntax) -> Reasoning | None:
    tags = syntax.reasoning
    return None if tags is None else Reasoning(tags.open, tags.close, begun=syntax.opened_by_prompt)
