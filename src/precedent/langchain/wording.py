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

_KINDS = {
    "missing": "is missing",
    "extra": "is not known",
    "string": "must be a text",
    "str": "must be a text",
    "bytes": "must be bytes",
    "int": "must be a whole number",
    "integer": "must be a whole number",
    "float": "must be a number",
    "decimal": "must be a number",
    "finite": "must be a finite number",
    "bool": "must be True or False",
    "list": "must be a list",
    "tuple": "must be a list",
    "set": "must be a list without repetitions",
    "frozen": "must be a list without repetitions",
    "iterable": "must be a list",
    "dict": "must be a dict",
    "mapping": "must be a dict",
    "model": "must be a dict",
    "dataclass": "must be a dict",
    "none": "must be None",
    "callable": "must be a function",
    "uuid": "must be a UUID",
    "url": "must be a URL",
    "date": "must be a date",
    "datetime": "must be a date with a time",
    "time": "must be a time",
    "timedelta": "must be a duration",
    "json": "must be JSON",
    "type": "must be of another type",
}
"""Wordings by a word of pydantic's error type (of v1 and v2)."""

_LIMITS = {
    "gt": "must be greater than {}",
    "ge": "must be at least {}",
    "lt": "must be less than {}",
    "le": "must be at most {}",
    "multiple_of": "must be a multiple of {}",
    "min_length": "must have a length of at least {}",
    "max_length": "must have a length of at most {}",
    "limit_value": "is beyond the limit {}",
    "pattern": "must match the pattern {}",
    "class": "must be a {}",
    "expected": "must be {}",
    "expected_tags": "must be one of {}",
    "permitted": "must be one of {}",
}
"""Wordings by the key of the limit in an error's context."""


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
    first = problems[0]
    place = ".".join(map(str, first["loc"])).replace("__root__", "")
    also = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return f"{place or 'it'} {_why(first)}{also}"


def _why(problem: Mapping[str, Any]) -> str:
    kind, context = str(problem["type"]), problem.get("ctx") or {}
    if kind in ("value_error", "assertion_error"):  # the message of a class's own validator
        return f"is refused: {context.get('error', problem['msg'])}"
    for name, words in _LIMITS.items():
        if name in context:
            return words.format(context[name])
    parts = kind.removeprefix("value_error.").removeprefix("type_error.").replace(".", "_").split("_")
    return next((_KINDS[part] for part in parts if part in _KINDS), "does not fit")
