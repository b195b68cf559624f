"""The fields of `ChatPrecedent`, checked before any weights are loaded, and the engine that they name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from langchain_core.language_models.chat_models import BaseChatModel
from pydantic import AliasChoices, Field

from precedent.langchain.engines import EngineHolder, EngineSettings
from precedent.langchain.settings import check_fields, check_names, in_one_line, templates_of
from precedent.langchain.structured import check_strict

if TYPE_CHECKING:
    from precedent.engine import Engine

STANDARD_BUT_IDLE = ("api_key", "timeout", "max_retries")
"""Constructor arguments that LangChain gives every chat model and that mean nothing for weights in this process."""

OF_THE_ENGINE = ("draft_model", "speculation_cache", "embedder", "device", "dtype")


class ChatFields(BaseChatModel):
    """What a chat model is built with; `ChatPrecedent` says what each field means."""

    model: str = Field(validation_alias=AliasChoices("model", "model_name"))
    draft_model: Any = None
    speculation_cache: Any = None
    embedder: Any = None
    device: str | None = None
    dtype: str | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int = 512
    stop: list[str] | None = None
    tenant: str = "default"
    drafters: tuple[str, ...] | None = None
    templates: Any = None
    speculation: Any = True
    strict_tools: Any = "auto"
    streaming: bool = False
    engines: EngineHolder = Field(default_factory=EngineHolder, exclude=True, repr=False)

    def __init__(self, **kwargs: Any) -> None:
        """Check the settings. Raises ConfigError on an unknown name or a value out of its range."""
        known = (*type(self).model_fields, "model_name", *STANDARD_BUT_IDLE)
        check_names(kwargs, known, type(self).__name__)
        with in_one_line():
            super().__init__(**kwargs)
        check_fields(self)
        check_strict(self.strict_tools)
        templates_of(self, {}, ())

    @property
    def model_name(self) -> str:
        """The model's name or folder."""
        return self.model

    @property
    def engine(self) -> Engine:
        """The engine, loaded now if it is not running yet."""
        return self.engines.get(self._engine_settings())

    def _engine_settings(self) -> EngineSettings:
        return EngineSettings(self.model, **{name: getattr(self, name) for name in OF_THE_ENGINE})
