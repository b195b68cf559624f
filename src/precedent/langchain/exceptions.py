"""Errors that are both ours and LangChain's, raised where LangChain calls us: its retries and fallbacks need its types.

Each class derives from the corresponding error in `precedent.errors`; catch that one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from langchain_core import exceptions as theirs

from precedent import errors


def _langchains(name: str) -> Any:
    """LangChain's error of this name, or its base class where an older langchain-core lacks it."""
    return getattr(theirs, name, theirs.LangChainException)


class ContextOverflowError(errors.ContextOverflowError, _langchains("ContextOverflowError")):  # type: ignore[misc]  # a base class known only at run time
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
        *(ContextOverflowError, InvalidConfigError, InvalidPromptError),
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
