"""Our errors as LangChain's own as well, raised where LangChain calls us: retries and fallbacks look for its types.

Every class here is also the error of the same meaning in `precedent.errors`, which is what to catch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from langchain_core import exceptions as theirs

from precedent import errors

_OF_OLDER_VERSIONS = theirs.LangChainException
"""What stands for a type that an older langchain-core does not have."""

_ContextOverflow: Any = getattr(theirs, "ContextOverflowError", _OF_OLDER_VERSIONS)
_InvalidRequest: Any = getattr(theirs, "ModelInvalidRequestError", _OF_OLDER_VERSIONS)
_NotFound: Any = getattr(theirs, "ModelNotFoundError", _OF_OLDER_VERSIONS)


class ContextOverflowError(errors.ContextOverflowError, _ContextOverflow):  # type: ignore[misc]  # a class of theirs
    """Prompt and answer together do not fit into the model's context; LangChain's own type."""


class InvalidConfigError(errors.ConfigError, _InvalidRequest):  # type: ignore[misc]
    """An argument of a call is wrong; LangChain's invalid request."""


class InvalidPromptError(errors.PromptError, _InvalidRequest):  # type: ignore[misc]
    """The messages or the prompt cannot be used; LangChain's invalid request."""


class UnsupportedRequestError(errors.UnsupportedError, _InvalidRequest):  # type: ignore[misc]
    """Something that this model cannot do; LangChain's invalid request."""


class ModelNotLoadedError(errors.ModelLoadError, _NotFound):  # type: ignore[misc]
    """The model cannot be loaded; LangChain's model that was not found."""


class AnswerParsingError(errors.PrecedentError, theirs.OutputParserException):
    """An answer is not what the schema says, or was cut; LangChain's error of output parsers."""

    def __init__(self, message: str, *, llm_output: str | None = None) -> None:
        super().__init__(ValueError(message), llm_output=llm_output)  # of a text it would make a text with a link


_BOTH: dict[type[errors.PrecedentError], type[errors.PrecedentError]] = {
    errors.ContextOverflowError: ContextOverflowError,
    errors.ConfigError: InvalidConfigError,
    errors.PromptError: InvalidPromptError,
    errors.UnsupportedError: UnsupportedRequestError,
    errors.ModelLoadError: ModelNotLoadedError,
}


@contextmanager
def of_both_kinds() -> Iterator[None]:
    """Raise an error of ours as the one that is LangChain's as well, where LangChain has one."""
    try:
        yield
    except errors.PrecedentError as error:
        both = _BOTH.get(type(error))
        if both is None:
            raise
        raise both(*error.args).with_traceback(error.__traceback__) from error.__cause__
