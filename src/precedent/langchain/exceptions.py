"""Errors that are both ours and LangChain's, raised where LangChain calls us: its retries and fallbacks need its types.

Each class derives from the corresponding error in `precedent.errors`; catch that one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from langchain_core import exceptions as theirs

from precedent import errors

_OF_OLDER_VERSIONS = theirs.LangChainException
"""Replaces error types that an older langchain-core lacks."""

_ContextOverflow: Any = getattr(theirs, "ContextOverflowError", _OF_OLDER_VERSIONS)
_InvalidRequest: Any = getattr(theirs, "ModelInvalidRequestError", _OF_OLDER_VERSIONS)
_NotFound: Any = getattr(theirs, "ModelNotFoundError", _OF_OLDER_VERSIONS)


class ContextOverflowError(errors.ContextOverflowError, _ContextOverflow):  # type: ignore[misc]  # a base class known only at run time
    """Prompt and answer together do not fit into the model's context; LangChain's context overflow."""


class InvalidConfigError(errors.ConfigError, _InvalidRequest):  # type: ignore[misc]
    """An argument of a call is wrong; LangChain's invalid request."""


class InvalidPromptError(errors.PromptError, _InvalidRequest):  # type: ignore[misc]
    """The messages or the prompt cannot be used; LangChain's invalid request."""


class UnsupportedRequestError(errors.UnsupportedError, _InvalidRequest):  # type: ignore[misc]
    """The model cannot do what was requested; LangChain's invalid request."""


class ModelNotLoadedError(errors.ModelLoadError, _NotFound):  # type: ignore[misc]
    """The model cannot be loaded; LangChain's model-not-found error."""


class AnswerParsingError(errors.PrecedentError, theirs.OutputParserException):
    """An answer does not fit its schema, or was cut; LangChain's output parser error."""

    def __init__(self, message: str, *, llm_output: str | None = None) -> None:
        super().__init__(ValueError(message), llm_output=llm_output)  # LangChain would append a link to a plain text


_BOTH: dict[type[errors.PrecedentError], type[errors.PrecedentError]] = {
    errors.ContextOverflowError: ContextOverflowError,
    errors.ConfigError: InvalidConfigError,
    errors.PromptError: InvalidPromptError,
    errors.UnsupportedError: UnsupportedRequestError,
    errors.ModelLoadError: ModelNotLoadedError,
}


@contextmanager
def of_both_kinds() -> Iterator[None]:
    """Re-raise our errors as the class that is also LangChain's, if there is one."""
    try:
        yield
    except errors.PrecedentError as error:
        both = _BOTH.get(type(error))
        if both is None:
            raise
        raise both(*error.args).with_traceback(error.__traceback__) from error.__cause__
