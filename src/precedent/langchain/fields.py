"""The fields of our LangChain models, checked before weights are loaded, and the engine that they describe."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from langchain_core.language_models.chat_models import BaseChatModel
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, StrictBool, field_serializer, model_validator

from precedent import __version__
from precedent.cache import SpeculationCache
from precedent.engine.options import OF_LOADING, EngineOptions, cache_or_place
from precedent.errors import ConfigError, PromptError, UnsupportedError
from precedent.langchain.arguments import check_strict, prediction_text, sampling_params, speculation_config
from precedent.langchain.call import Call
from precedent.langchain.engines import EngineHolder, load_beside
from precedent.langchain.messages import Media
from precedent.langchain.runs import workflow_step_of
from precedent.langchain.serializing import without_secrets, written_cache
from precedent.langchain.settings import (
    OF_THE_ENGINE,
    check_fields,
    engine_options,
    fields_of,
    templates_of,
)
from precedent.langchain.synonyms import ANSWER_CACHE, IDLE
from precedent.langchain.telemetry import current_span, describe_request
from precedent.langchain.tenants import DEFAULT_TENANT, Nobody, tenant_of, without_cache
from precedent.langchain.wording import settings_in_our_words
from precedent.runtime.plain_values import check_plain, shown
from precedent.text.template_settings import TemplateSettings

if TYPE_CHECKING:
    from precedent.engine.engine import Engine, Generation

OUTPUT_VERSIONS = (None, "v0", "v1")
"""Forms of an answer's content that LangChain supports for every model."""

FROM_ENVIRONMENT = {
    "model": "PRECEDENT_MODEL",
    "draft_model": "PRECEDENT_DRAFT_MODEL",
    "speculation_cache": "PRECEDENT_SPECULATION_CACHE",
}
"""Fields that are not given, and the environment variables that fill them in."""


class EngineFields(BaseModel):
    """The fields that chat and text models share; `ChatPrecedent` and `EngineOptions` say what each means."""

    model_config = ConfigDict(arbitrary_types_allowed=True, protected_namespaces=())

    model: str = Field(validation_alias=AliasChoices("model", "model_name"))
    draft_model: Any = None
    speculation_cache: Any = None
    embedder: Any = None
    device: str | None = None
    draft_device: str | None = None
    dtype: str | None = None
    model_kwargs: dict[str, Any] | None = None
    chat_template: str | Path | None = None
    bitwise: StrictBool | None = None
    cuda_graphs: StrictBool | None = None
    loop: str | None = None
    keep_prefixes: StrictBool | None = None
    sampling: Literal["model"] | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    max_tokens: int = 512
    stop: list[str] | None = None
    stop_token_ids: tuple[int, ...] | None = None
    logprobs: StrictBool = False
    top_logprobs: int | None = None
    tenant: str = DEFAULT_TENANT
    tenant_from: Literal["metadata"] | None = None
    drafters: tuple[str, ...] | None = None
    templates: Any = None
    speculation: Any = True
    engines: EngineHolder = Field(default_factory=EngineHolder, exclude=True, repr=False)

    _operation: ClassVar[str]
    """OpenTelemetry's name for a call."""

    def __init__(self, **kwargs: Any) -> None:
        """Check the settings. Raises ConfigError or UnsupportedError, with what to write instead."""
        given = _with_place(_with_environment(self._fields_of(kwargs)))  # before pydantic, whose errors show values
        with settings_in_our_words(given):
            super().__init__(**given)
        check_fields(self)
        templates_of(self, {}, ())

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, cache_or_place(value) if name == "speculation_cache" else value)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy, on the same engines; see pydantic's `BaseModel.model_copy`."""
        return super().model_copy(update=_with_place(update or {}), deep=deep)

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        """A copy on the same engines; it shares the draft model and the embedder."""
        shared = {id(part): part for part in (self.draft_model, self.embedder)}
        return super().__deepcopy__((memo or {}) | shared)

    def __getstate__(self) -> dict[Any, Any]:
        if self.draft_model is not None and not isinstance(self.draft_model, str | Path):
            raise UnsupportedError(
                f"draft_model is a {type(self.draft_model).__name__}, and weights stay in their process: give its name "
                "or folder to pickle this chat model"
            )
        return super().__getstate__()

    def __repr_args__(self) -> Any:
        shown = super().__repr_args__()
        return [(name, without_secrets(value) if name == "model_kwargs" else value) for name, value in shown]

    @field_serializer("speculation_cache", when_used="json")
    def _cache_as_text(self, cache: Any) -> str | None:
        return written_cache(cache)

    @classmethod
    def _fields_of(cls, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The constructor's arguments under the names of its fields."""
        if isinstance(kwargs.get("cache"), str | Path | SpeculationCache):
            raise ConfigError(ANSWER_CACHE)
        return fields_of(kwargs, (*cls.model_fields, *IDLE), cls.__name__)

    @classmethod
    def from_model(cls, model: Any, tokenizer: Any, **kwargs: Any) -> Self:
        """A model on a transformers model and tokenizer that are loaded already."""
        kwargs = cls._fields_of(kwargs)
        for name in (*OF_LOADING, "engines"):
            if kwargs.pop(name, None) is not None:
                raise ConfigError(f"{name} cannot be set for a model object: change the model or its tokenizer before")
        if not hasattr(model, "config"):
            raise ConfigError(
                f"from_model takes a transformers model and its tokenizer, and a {type(model).__name__} is no model; "
                f"for a name or folder write {cls.__name__}(model=…)"
            )
        name = kwargs.pop("model", None) or model.config._name_or_path or type(model).__name__
        return cls(model=name, engines=EngineHolder(weights=(model, tokenizer)), **kwargs)

    @classmethod
    def from_engine(cls, engine: Engine, **kwargs: Any) -> Self:
        """A model on a running engine."""
        kwargs = cls._fields_of(kwargs)
        for name in ("model", "engines", *OF_THE_ENGINE):
            if kwargs.pop(name, None) is not None:
                raise ConfigError(f"{name} belongs to the engine: give it to Engine.load")
        return cls(model=engine.model_name, engines=EngineHolder(engine=engine), **kwargs)

    @property
    def model_name(self) -> str:
        """The model's Hugging Face id or folder."""
        return self.model

    @property
    def engine(self) -> Engine:
        """The engine; reading this loads it if it is not running yet."""
        return self.engines.get(self.model, self._engine_options())

    def unload(self) -> None:
        """Free the weights, for all models of equal settings; the next call loads them again.

        Running requests are cancelled. Of a model made by `from_model` the engine goes, with its KV cache and packed
        weights; the transformers model stays yours, and the next call makes another engine on it. Raises
        UnsupportedError for a model made by `from_engine`.
        """
        self.engines.unload(self.model, self._engine_options())

    def get_token_ids(self, text: str) -> list[int]:
        """Token ids of `text` by the model's tokenizer, without special tokens. Raises PromptError for no text."""
        if not isinstance(text, str):
            raise PromptError(f"{shown(text)} is no text, and has no tokens")
        check_plain("the text", text, PromptError)
        own: Callable[[str], list[int]] | None = getattr(self, "custom_get_token_ids", None)
        return list(self.engine.tokenizer.encode(text, add_special_tokens=False)) if own is None else own(text)

    def _engine_options(self) -> EngineOptions:
        return engine_options(self)

    def _loaded_engine(self) -> Engine | None:
        return self.engines.loaded(self.model, self._engine_options())

    def _engine_of(self, kwargs: Mapping[str, Any]) -> Engine:
        """The engine of a call: the model's own, or that of another loaded model that the call names."""
        name = self.model if kwargs.get("model") is None else kwargs["model"]
        if not isinstance(name, str):
            raise ConfigError(f"model={shown(name)} must be the name of a loaded model")
        return self.engine if name == self.model else self.engines.other(name, self._engine_options())

    async def _aengine_of(self, kwargs: Mapping[str, Any]) -> Engine:
        """The same; loading takes seconds and leaves the event loop, everything else stays on it."""
        if self._loaded_engine() is None:
            return await load_beside(self._engine_of, kwargs)
        return self._engine_of(kwargs)

    def _submit(self, engine: Engine, call: Call) -> Generation:
        """Start a request with the model's fields, overridden by the call's settings and the run's metadata."""
        said = call.settings
        whose, learning = tenant_of(self, said, call.metadata), said.get("learning")
        sampling = sampling_params(self, call.stop, self._with_recommended(engine, said))
        span = current_span()
        prefix_tokens = 0 if isinstance(whose, Nobody) else call.prefix_tokens
        speculation = speculation_config(self, said, engine.speculation)
        if isinstance(whose, Nobody):  # a new one for each request: those of a batch may be different people's
            whose, speculation = str(Nobody.alone()), without_cache(speculation or engine.speculation)
        if span is not None:
            describe_request(span, self._operation, said.get("model") or self.model, sampling)
        return engine.submit(
            call.prompt_ids,
            sampling,
            speculation=speculation,
            tenant=whose,
            query=call.query,
            workflow_step=said.get("workflow_step") or workflow_step_of(call.metadata) or "",
            tools=call.tools,
            prediction=prediction_text(said.get("prediction")),
            templates=call.templates,
            grammar=call.grammar,
            write_back=None if learning is None else partial(learning.add, engine.cache),
            shown_tokens=call.shown_tokens,
            prefix_tokens=prefix_tokens,
        )

    def _with_recommended(self, engine: Engine, said: Mapping[str, Any]) -> dict[str, Any]:
        """A call's settings, over the checkpoint's own where these were asked for and nothing else was given."""
        given = {name: value for name, value in said.items() if value is not None}
        if self.sampling is None:
            return given
        recommended = engine.sampling_defaults
        return {name: one for name, one in recommended.items() if name not in self.model_fields_set} | given


class ChatFields(EngineFields, BaseChatModel):
    """The fields of a chat model."""

    _operation = "chat"

    streaming: StrictBool = False
    strict_tools: Any = "auto"
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning: Any = None
    media: Media = "refuse"

    def __init__(self, **kwargs: Any) -> None:
        """Check the settings. Raises ConfigError or UnsupportedError, which say what to write."""
        super().__init__(**kwargs)
        check_strict(self.strict_tools)
        self.template_settings({})
        if self.output_version not in OUTPUT_VERSIONS:
            raise ConfigError(f"output_version={shown(self.output_version)} must be 'v0' or 'v1'")

    @property
    def engine(self) -> Engine:
        """The engine; reading this loads it if it is not running yet. Raises UnsupportedError for no chat model."""
        return decoder_only(super().engine)

    def _engine_of(self, kwargs: Mapping[str, Any]) -> Engine:
        return decoder_only(super()._engine_of(kwargs))

    def template_settings(self, kwargs: Mapping[str, Any]) -> tuple[TemplateSettings, ...]:
        """Settings of the chat template: those of the fields, then those of the call."""
        names = ("chat_template_kwargs", "reasoning")
        said = ({name: getattr(self, name) for name in names}, {name: kwargs.get(name) for name in names})
        return tuple(
            TemplateSettings({} if variables is None else variables, reasoning)
            for variables, reasoning in (one.values() for one in said)
            if variables is not None or reasoning is not None
        )

    @model_validator(mode="after")
    def _set_precedent_version(self) -> Self:
        """Add our version to traces; LangChain wants a validator of a name that no other class has."""
        self._add_version("precedent-llm", __version__)
        return self


def decoder_only(engine: Engine) -> Engine:
    """The engine. Raises UnsupportedError if an encoder reads its prompts: such models hold no conversation."""
    if engine.encodes_prompt:
        raise UnsupportedError(
            f"{engine.model_name} is an encoder-decoder model, which has no chat template and no tool calls: use "
            "PrecedentLLM, which turns one text into another"
        )
    return engine


def _with_place(fields: Mapping[str, Any]) -> dict[str, Any]:
    """`fields` with a cache's URL replaced by one that shows no password."""
    given = "speculation_cache" in fields
    return {**fields, "speculation_cache": cache_or_place(fields["speculation_cache"])} if given else dict(fields)


def _with_environment(kwargs: dict[str, Any]) -> dict[str, Any]:
    """`kwargs`, completed from the environment unless the model was handed over loaded."""
    if "engines" in kwargs:
        return kwargs
    found = {name: os.environ.get(variable) for name, variable in FROM_ENVIRONMENT.items() if name not in kwargs}
    return kwargs | {name: value for name, value in found.items() if value}
