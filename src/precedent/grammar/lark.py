"""Writes a grammar's description in llguidance's dialect of Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from precedent.grammar.spec import Answer, CallForm, Grammar, JsonSchema, Lark, Regex, Tool

TEXT = "TEXT: /(.|\\n)*/"
GAP = "GAP: /\\n{0,2}/"

_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def to_lark(grammar: Grammar, control_tokens: Mapping[str, int]) -> str:
    """The Lark text of a grammar; `control_tokens` maps the text of each control token to its id."""
    if isinstance(grammar, Lark):
        return grammar.text
    if isinstance(grammar, JsonSchema):
        return f"start: {_json(grammar)}"
    if isinstance(grammar, Regex):
        return f"start: TOP\nTOP: /{_in_slashes(grammar.pattern)}/"
    return _AnswerRules(grammar, control_tokens).text()


def _json(schema: JsonSchema) -> str:
    layout = {**_LAYOUT, **({"lenient": True} if schema.lenient else {})}
    value: Any = schema.schema
    if not isinstance(value, dict):
        value = {} if value else {"enum": []}
    return f"%json {json.dumps({**value, 'x-guidance': layout})}"


def _in_slashes(pattern: str) -> str:
    return re.sub(
        r"\\.|/|\n", lambda found: {"/": "\\/", "\n": "\\n"}.get(found[0], found[0]), pattern, flags=re.DOTALL
    )


class _AnswerRules:
    def __init__(self, answer: Answer, control_tokens: Mapping[str, int]) -> None:
        self._answer, self._control_tokens = answer, control_tokens
        longest_first = sorted(control_tokens, key=len, reverse=True)
        self._control = re.compile(f"({'|'.join(map(re.escape, longest_first))})") if longest_first else None

    def text(self) -> str:
        """All rules, `start` first."""
        return "\n".join(["%llguidance {}", *self._reasoning(), *self._body(), TEXT, GAP])

    def _terms(self, text: str) -> str:
        """A text as terms: its control tokens by id, the rest as string literals."""
        parts = self._control.split(text) if self._control else [text]
        return " ".join(self._term(part) for part in parts if part)

    def _term(self, part: str) -> str:
        token = self._control_tokens.get(part)
        return json.dumps(part, ensure_ascii=False) if token is None else f"<[{token}]>"

    def _up_to(self, rule: str, marker: str) -> str:
        """A rule for any text up to and including the first `marker`."""
        if marker in self._control_tokens:
            return f"{rule}: TEXT {self._terms(marker)}"
        return f"{rule}[lazy]: TEXT {json.dumps(marker, ensure_ascii=False)}"

    def _reasoning(self) -> Iterator[str]:
        reasoning = self._answer.reasoning
        if reasoning is None:
            yield "start: body"
        elif reasoning.begun:
            yield "start: thought GAP body"
        else:
            yield f"start: body | {self._terms(reasoning.opening)} thought GAP body"
        if reasoning is not None:
            yield self._up_to("thought", reasoning.closing)

    def _body(self) -> Iterator[str]:
        answer = self._answer
        if answer.form is None:
            yield f"body: {'TEXT' if answer.content is None else _json(answer.content)}"
            return
        yield from self._calls(answer.form)
        if answer.text:
            yield from self._calls_in_text(answer.form)
        elif answer.content:
            yield f"body: block | {_json(answer.content)}"
        else:
            yield "body: block"

    def _calls(self, form: CallForm) -> Iterator[str]:
        """The rules `call` (everything after `begin`) and `block` (all calls of an answer without text)."""
        yield f"call: {' | '.join(f'call_{index}' for index in range(len(self._answer.tools)))}"
        for index, tool in enumerate(self._answer.tools):
            yield f"call_{index}: {self._call(form, tool)}"
        yield f"block: {self._terms(form.opening + form.begin)} {self._following(form)}"

    def _call(self, form: CallForm, tool: Tool) -> str:
        name = json.dumps(tool.name, ensure_ascii=False)[1:-1] if form.in_json else tool.name
        return f"{self._terms(name + form.between)} {_json(tool.arguments)} {self._terms(form.end)}"

    def _following(self, form: CallForm) -> str:
        more = ""
        if self._answer.parallel and form.separator is not None:
            more = f"({self._terms(form.separator + form.begin)} call)*"
        return f"call {more} {self._terms(form.closing)}"

    def _calls_in_text(self, form: CallForm) -> Iterator[str]:
        """Text in which a trigger starts a block; in a form without an opening, a trigger starts every single call."""
        if form.whole_answers:
            first = re.escape(form.trigger[0])
            yield f"body: block | OTHER_TEXT\nOTHER_TEXT: /([^{first}](.|\\n)*)?/"
            return
        rest = self._terms((form.opening + form.begin).removeprefix(form.trigger))
        following = self._following(form) if form.opening else "call"
        yield self._up_to("head", form.trigger)
        yield f"called: head {rest} {following}"
        yield "body: called* tail" if self._answer.parallel else "body: called | tail"
        yield "tail: TEXT"
