"""Errors that are both ours and LangChain's, raised where LangChain calls us: its retries and fallbacks need its types.

Each class derives from the corresponding error in `precedent.errors`; catch that one. Pydantic's errors become one line
that names the value and says what it must be.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from langchain_core import exceptions as theirs
from pydantic import ValidationError
from pydantic.v1 import ValidationError as ValidationErrorV1

from precedent import errors
from precedent.errors import ConfigError, PrecedentError, PromptError
from precedent.runtime.plain_values import first_line, shown


def _langchains(name: str) -> Any:
    """LangChain's error of this name, or its base class where an older langchain-core lacks it."""
    return getattr(theirs, name, theirs.LangChainException)


class PromptTooLongError(errors.ContextOverflowError, _langchains("ContextOverflowError")):  # type: ignore[misc]  # a base class known only at run time
    """Prompt and answer together do not fit into the model's context."""


class InvalidConfigError(errors.ConfigError, _langchains("ModelInvalidRequestError")):  # type: ignore[misc]
    """An argument of a call is wrong."""


class InvalidPromptError(errors.PromptError, _langchains("ModelInvalidRequestError")):  # type: ignore[misc]
    """The messages or the prompt cannot be used."""


class UnsupportedRequestError(errors.UnsupportedError, _langchains("ModelInvalidRequestError")):  # type: ignore[misc]
    """The model cannot do what was requested."""


class ModelNotLoadedError(errors.ModelLoadError, _langchains("ModelNotFoundError")):  # type: ignore[misc]
    """The model cannot be loaded."""


class AnswerParsingError(errors.PrecedentError, theirs.OutputParserException):
    """An answer does not fit its schema, or was cut."""

    def __init__(self, message: str, *, llm_output: str | None = None) -> None:
        super().__init__(ValueError(message), llm_output=llm_output)  # LangChain would append a link to a plain text


_BOTH = {
    both.__bases__[0]: both
    for both in (
        *(PromptTooLongError, InvalidConfigError, InvalidPromptError),
        *(UnsupportedRequestError, ModelNotLoadedError),
    )
}


@contextmanager
def of_both_kinds() -> Iterator[None]:
    """Re-raise our errors as the class that is also LangChain's, if there is one."""
    try:
        yield
    except errors.PrecedentError as error:
        both: Any = _BOTH.get(type(error))
        if both is None:
            raise
        raise both(*error.args).with_traceback(error.__traceback__) from error.__cause__


# Pydantic's errors in our words

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
    for words_of_pydantic, ours in _WORDS.items():
        words = words.replace(words_of_pydantic, ours)
    return words if words[:1].islower() else f"is refused: {words}"
