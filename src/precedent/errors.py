"""Every error Precedent raises on purpose."""

from __future__ import annotations


class PrecedentError(Exception):
    """Base of every error that Precedent raises on purpose; its message is one line that says what to do."""


class ConfigError(PrecedentError, ValueError):
    """A setting is wrong; the message says what to write instead."""


class UnsupportedError(PrecedentError):
    """A combination of features, or a kind of model, that is not supported."""


class ModelLoadError(PrecedentError):
    """A model or tokenizer cannot be loaded, or a draft model does not fit its target."""


class PromptError(PrecedentError, ValueError):
    """The messages or the prompt cannot be used."""


class ContextOverflowError(PromptError):
    """Prompt and answer together do not fit into the model's context."""


class CacheError(PrecedentError):
    """The speculation cache cannot be opened, read or written."""


class CacheMismatchError(CacheError):
    """The cache file belongs to another format, tokenizer or embedder."""


class CapacityError(PrecedentError):
    """A request needs more memory than the engine may ever use for it."""


class EngineClosedError(PrecedentError):
    """The engine was closed before this request was submitted."""


class GenerationError(PrecedentError):
    """A running request failed; the engine and all other requests continue."""


class GrammarError(GenerationError):
    """The grammar of a running request became too complex to enforce, or its constraints exclude every token."""


class RequestCancelled(PrecedentError):
    """The caller cancelled this request, or closed the engine before it finished."""
