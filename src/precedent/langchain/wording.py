"""Rewords pydantic's errors: one line that names the value and says what it must be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pydantic import ValidationError
from pydantic.v1 import ValidationError as ValidationErrorV1

from precedent.errors import ConfigError, PrecedentError, PromptError
from precedent.runtime.plain_values import first_line, shown

AnyValidationError = ValidationError | ValidationErrorV1

_WORDS = {
    "Input should be ": "must be ",
    "Input should": "must",
    "Field required": "is missing",
    "field required": "is missing",
    "value is": "is",
    "a valid string": "a text",
    "a valid integer": "a whole number",
    "a valid number": "a number",
    "a valid boolean": "True or False",
    "a valid list": "a list",
    "a valid tuple": "a list",
    "a valid dictionary": "a dict",
}
"""Pydantic's phrases (of v2 and v1), and ours."""


@contextmanager
def settings_in_our_words(given: Mapping[str, Any]) -> Iterator[None]:
    """Turn pydantic's refusal of one of the settings `given` into a ConfigError."""
    try:
        yield
    except ValidationError as error:
        name = str(error.errors()[0]["loc"][0])
        if name not in given:
            raise ConfigError(f"{name} is missing: give a Hugging Face id or a folder as {name}=…") from None
        whys = dict.fromkeys(_why(one) for one in error.errors() if str(one["loc"][0]) == name)
        raise ConfigError(f"{name}={shown(given[name])} {' or '.join(whys)}") from None


@contextmanager
def input_in_our_words() -> Iterator[None]:
    """Turn LangChain's and pydantic's refusals of a model's input into a PromptError."""
    try:
        yield
    except PrecedentError:
        raise
    except Exception as error:  # a caller's own message classes may raise anything
        why = in_our_words(error) if isinstance(error, AnyValidationError) else first_line(error)
        raise PromptError(f"the input is neither a text nor a list of messages: {why}") from error


def in_our_words(error: AnyValidationError) -> str:
    """Where a value does not fit its class, and why: the first problem, and the number of others."""
    problems: list[Any] = list(error.errors())
    place = ".".join(map(str, problems[0]["loc"])).replace("__root__", "")
    also = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return f"{place or 'it'} {_why(problems[0])}{also}"


def _why(problem: Mapping[str, Any]) -> str:
    words = " ".join(str(problem["msg"]).split())
    if problem["type"] in ("value_error", "assertion_error"):  # a class's own validator
        return f"is refused: {problem.get('ctx', {}).get('error', words)}"
    for theirs, ours in _WORDS.items():
        words = words.replace(theirs, ours)
    return words if words[:1].islower() else f"is refused: {words}"
