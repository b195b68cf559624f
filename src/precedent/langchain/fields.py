"""What our models in this process share: fields, checked before weights are loaded, their engine, and its requests."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import AliasChoices, ConfigDict, Field, StrictBool, field_serializer

from precedent.cache import Completion, SpeculationCache
from precedent.config import SpeculationConfig
from precedent.drafters.registry import check_known, kind_named
from precedent.engine.options import OF_LOADING, EngineOptions, cache_or_place
from precedent.errors import ConfigError, PromptError, UnsupportedError
from precedent.langchain import arguments, synonyms
from precedent.langchain.answers import Prompt, Running, current_span, describe_request
from precedent.langchain.arguments import DEFAULT_TENANT, OF_THE_CALL, CallFields
from precedent.langchain.engines import EngineHolder, load_beside
from precedent.langchain.exceptions import of_both_kinds, settings_in_our_words
from precedent.runtime.plain_values import check_plain, shown
from precedent.text.templates import Template, Templates, tool_templates

if TYPE_CHECKING:
    from precedent.engine.engine import Engine
    from precedent.text.tool_formats import ToolFormat

FROM_ENVIRONMENT = {
    "model": "PRECEDENT_MODEL",
    "draft_model": "PRECEDENT_DRAFT_MODEL",
    "speculation_cache": "PRECEDENT_SPECULATION_CACHE",
}
"""Fields that are not given, and the environment variables that fill them in."""

_FIELD_OF = {
    option.name: {"cache": "speculation_cache"}.get(option.name, option.name)  # LangChain's `cache` is another
    for option in dataclasses.fields(EngineOptions)
    if option.name not in ("speculation", "limits")  # one is set for each call, the other wants an engine of your own
}
OF_THE_ENGINE = tuple(_FIELD_OF.values())
"""Fields that say what a model's engine is built from."""

_WITHOUT_EFFECT = ("speculation_cache", "embedder", "draft_device", "loop", "keep_prefixes")
"""Fields of the engine that no answer depends on."""

_SECRETS = ("token", "use_auth_token")
"""Arguments of `from_pretrained` that must not appear in a trace."""

_ELSEWHERE_THAN_IN_A_CALL = {
    **dict.fromkeys(synonyms.IDLE, "it means nothing for a model in this process: leave it out"),
    **dict.fromkeys(
        (*OF_THE_ENGINE, *synonyms.OF_LOADING, "streaming"),
        "it belongs in the constructor: write ChatPrecedent(model=…, {name}=…)",
    ),
}


class PendingCompletions:
    """The completions of one run's calls (`learning=` of a call); nothing is stored before `store`."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[SpeculationCache, Completion]] = deque()

    def __deepcopy__(self, memo: object) -> PendingCompletions:
        return self  # copies of a call's settings collect for the same run

    def add(self, cache: SpeculationCache, completion: Completion) -> None:
        """Keep a completion for `cache` until the run ends; called on one of the engine's threads."""
        self._waiting.append((cache, completion))

    def store(self) -> None:
        """Store all completions. Raises CacheError if a cache cannot be written."""
        while self._waiting:
            cache, completion = self._waiting.popleft()
            cache.insert(completion)


class EngineFields(CallFields):
    """The fields that chat and text models share; `ChatPrecedent` and `EngineOptions` say what each means."""

    model_config = ConfigDict(arbitrary_types_allowed=True, protected_namespaces=())

    model: str = Field(validation_alias=AliasChoices("model", "model_name"))
    draft_model: Any = None
    speculation_cache: Any = None
    embedder: Any = None
    device: str | None = None
    draft_device: str | None = None
    dtype: str | None = None
    quantization: str | None = None
    accurate: StrictBool | None = None
    backend: str | None = None
    n_gpu_layers: int | None = None
    model_kwargs: dict[str, Any] | None = Field(default=None, repr=False)  # may hold a token of the hub
    chat_template: str | Path | None = None
    bitwise: StrictBool | None = None
    cuda_graphs: StrictBool | None = None
    loop: str | None = None
    keep_prefixes: StrictBool | None = None
    sampling: Literal["model", "precedent"] | None = None
    tenant: str = DEFAULT_TENANT
    tenant_from: Literal["metadata"] | None = None
    engines: EngineHolder = Field(default_factory=EngineHolder, exclude=True, repr=False)

    _operation: ClassVar[str]
    """OpenTelemetry's name for a call."""

    _not_in_constructor: ClassVar[Mapping[str, str]]
    """Names that the constructor does not take, with hints where they belong."""

    def __init__(self, **kwargs: Any) -> None:
        """Check the settings. Raises ConfigError or UnsupportedError, with what to write instead."""
        given = self._fields_of(kwargs)
        if "engines" not in given:  # else the model was handed over loaded
            found = {name: os.environ.get(variable) for name, variable in FROM_ENVIRONMENT.items()}
            given = {name: value for name, value in found.items() if value} | given
        given = _with_place(given)  # before pydantic, whose errors show values
        with settings_in_our_words(given):
            super().__init__(**given)
        arguments.sampling_params(self, None, {})
        config = arguments.speculation_config(self, {}, SpeculationConfig())
        if config is not None and (self.drafters is not None or not isinstance(self.speculation, bool)):
            check_known(config.drafters, () if self.engines.given is None else self.engines.given.drafters)
        arguments.checked_tenant(self.tenant)
        if self.tenant_from is not None and self.tenant != DEFAULT_TENANT:
            raise ConfigError(
                f"tenant={self.tenant!r} and tenant_from={self.tenant_from!r} both set the runs' tenant: leave one out"
            )
        self._templates({}, ())

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, cache_or_place(value) if name == "speculation_cache" else value)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy, on the same engines; see pydantic's `BaseModel.model_copy`."""
        return super().model_copy(update=_with_place(update or {}), deep=deep)

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        shared = {id(part): part for part in (self.draft_model, self.embedder)}
        return super().__deepcopy__((memo or {}) | shared)

    def __getstate__(self) -> dict[Any, Any]:
        if self.draft_model is not None and not isinstance(self.draft_model, str | Path):
            raise UnsupportedError(
                f"draft_model is a {type(self.draft_model).__name__}, and weights stay in their process: give its name "
                "or folder to pickle this chat model"
            )
        return super().__getstate__()

    @field_serializer("speculation_cache", when_used="json")
    def _cache_as_text(self, cache: Any) -> str | None:
        return cache.path if isinstance(cache, SpeculationCache) else None if cache is None else str(cache)

    def _public_model_kwargs(self) -> dict[str, Any] | None:
        if self.model_kwargs is None:
            return None
        kept = {name: value for name, value in self.model_kwargs.items() if name not in _SECRETS}
        return {name: value.to_dict() if hasattr(value, "to_dict") else value for name, value in kept.items()}

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """Everything an answer depends on, and what speeds it up: the key of LangChain's answer caches."""
        names, draft = (*OF_THE_ENGINE, "sampling", *CallFields.model_fields, "tenant"), self.draft_model
        return {
            **{name: getattr(self, name) for name in names if name not in _WITHOUT_EFFECT},
            "model_kwargs": self._public_model_kwargs(),
            "templates": [template.text for template in self._templates({}, ())],
            "model_name": self.model,
            "weights": self.engines.identity,
            "draft_model": draft if draft is None or isinstance(draft, str) else type(draft).__name__,
        }

    # Where the model comes from

    @classmethod
    def _fields_of(cls, kwargs: dict[str, Any]) -> dict[str, Any]:
        if isinstance(kwargs.get("cache"), str | Path | SpeculationCache):
            raise ConfigError(
                "cache= is LangChain's cache of whole answers (True, False or a BaseCache); for a cache to draft from "
                "write speculation_cache="
            )
        fields = arguments.checked_fields(
            kwargs, (*cls.model_fields, *synonyms.IDLE), cls.__name__, cls._not_in_constructor
        )
        if isinstance(loading := fields.get("model_kwargs"), Mapping) and (misplaced := loading.keys() & OF_THE_CALL):
            name = min(misplaced)
            raise ConfigError(f"model_kwargs says how weights are loaded: write {name}= as a separate argument")
        return fields

    @classmethod
    def from_model(cls, model: Any, tokenizer: Any, **kwargs: Any) -> Self:
        """A model on a transformers model and tokenizer that are loaded already."""
        kwargs = cls._fields_of(kwargs)
        for name in (*OF_LOADING, "engines"):
            if kwargs.pop(name, None) is not None:
                raise ConfigError(f"{name} cannot be set for a model object: change the model or its tokenizer before")
        if not hasattr(model, "config"):
            raise ConfigError(
                f"from_model takes a transformers model and its tokenizer, not a {type(model).__name__}; for a name or "
                f"folder write {cls.__name__}(model=…)"
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
        """The engine; reading this loads it if it is not running yet. Raises UnsupportedError for a wrong kind."""
        return self._usable(self.engines.get(self.model, self._engine_options()))

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
            raise PromptError(f"expected a text whose tokens to count, got {shown(text)}")
        check_plain("the text", text, PromptError)
        own: Callable[[str], list[int]] | None = getattr(self, "custom_get_token_ids", None)
        return list(self.engine.tokenizer.encode(text, add_special_tokens=False)) if own is None else own(text)

    def _engine_options(self) -> EngineOptions:
        """What the engine is built from; None in a field is the option's default.

        A drafter that has to be known when the engine is built is one of its options; calls alone choose all others.
        """
        given = {option: getattr(self, field) for option, field in _FIELD_OF.items()}
        chosen = arguments.speculation_config(self, {}, SpeculationConfig())
        if chosen is not None and any(kind_named(name) is not None for name in chosen.drafters):
            given["speculation"] = SpeculationConfig(drafters=chosen.drafters)
        return EngineOptions(**{option: value for option, value in given.items() if value is not None})

    def _usable(self, engine: Engine) -> Engine:
        """The engine, if this kind of model can run on it. Raises UnsupportedError."""
        return engine

    # One request

    def _prompt(self, engine: Engine, given: Any, settings: Mapping[str, Any]) -> Prompt:
        """Check and render what was asked. Raises PrecedentErrors, each saying what to do."""
        raise NotImplementedError

    def _reader(self, running: Running, *, whole: bool) -> Any:
        """What turns the request's emissions into chunks: `of(emission)` and `last(result)`."""
        raise NotImplementedError

    def _call_settings(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """A call's arguments under our names, without those that are None.

        Raises ConfigError or UnsupportedError for an argument that a model in this process does not take.
        """
        settings = arguments.checked_arguments(kwargs, OF_THE_CALL, _ELSEWHERE_THAN_IN_A_CALL)
        if not isinstance(settings.get("learning"), PendingCompletions | None):
            raise ConfigError(
                f"learning={shown(settings['learning'])} must be PendingCompletions, which SpeculationMiddleware makes"
            )
        return settings

    def _engine_of(self, settings: Mapping[str, Any]) -> Engine:
        """The engine of a call: the model's own, or that of another loaded model that the call names."""
        name = settings.get("model", self.model)
        if not isinstance(name, str):
            raise ConfigError(f"model={shown(name)} must be the name of a loaded model")
        return self.engine if name == self.model else self._usable(self.engines.other(name, self._engine_options()))

    def _begin(self, given: Any, stop: Sequence[str] | None, run: Any, kwargs: Mapping[str, Any]) -> Running:
        settings = self._call_settings(kwargs)
        engine = self._engine_of(settings)
        return self._submit(engine, self._prompt(engine, given, settings), settings, stop, run)

    async def _abegin(self, given: Any, stop: Sequence[str] | None, run: Any, kwargs: Mapping[str, Any]) -> Running:
        """The same without delaying the event loop: what takes long runs on other threads."""
        settings = self._call_settings(kwargs)
        waits = self.engines.loaded(self.model, self._engine_options()) is None
        engine = await load_beside(self._engine_of, settings) if waits else self._engine_of(settings)
        prompt = self._prompt(engine, given, settings)
        if (grammar := prompt.arguments.get("grammar")) is not None:  # compiling one takes long, the first above all
            await asyncio.to_thread(engine.grammars.matcher, grammar)
        return self._submit(engine, prompt, settings, stop, run)

    def _chunks(
        self, given: Any, stop: Sequence[str] | None, run: Any, kwargs: Mapping[str, Any], *, whole: bool = False
    ) -> Iterator[Any]:
        """Answer in chunks; leaving the iterator cancels the request."""
        with of_both_kinds():
            running = self._begin(given, stop, run, kwargs)
        try:
            reader = self._reader(running, whole=whole)
            for emission in running.generation:
                yield from reader.of(emission)
            yield from reader.last(running.result())
        finally:
            running.generation.cancel()

    async def _achunks(
        self, given: Any, stop: Sequence[str] | None, run: Any, kwargs: Mapping[str, Any], *, whole: bool = False
    ) -> AsyncGenerator[Any, None]:
        with of_both_kinds():
            running = await self._abegin(given, stop, run, kwargs)
        try:
            reader = self._reader(running, whole=whole)
            async for emission in running.generation:
                for chunk in reader.of(emission):
                    yield chunk
            for chunk in reader.last(running.result()):
                yield chunk
        finally:
            running.generation.cancel()

    def _templates(
        self, settings: Mapping[str, Any], tools: Sequence[Mapping[str, Any]], form: ToolFormat | None = None
    ) -> tuple[Template, ...]:
        """The premade responses of the call, or else the model's, and the forms of calls to the bound tools."""
        premade = settings.get("templates", self.templates)
        return (*(() if premade is None else Templates(premade)), *tool_templates(tools, form))

    def _submit(
        self, engine: Engine, prompt: Prompt, settings: Mapping[str, Any], stop: Sequence[str] | None, run: Any
    ) -> Running:
        """Submit a request with the model's fields, overridden by the call's `settings` and the run's metadata.

        `run` is LangChain's manager of the run.
        """
        from precedent.target.load.source import samples_as_recommended  # here: it loads torch

        name, metadata = settings.get("model", self.model), None if run is None else run.metadata
        tenant, learning = arguments.tenant_of(self, settings, metadata), settings.get("learning")
        speculation, rendered = arguments.speculation_config(self, settings, engine.speculation), dict(prompt.arguments)
        if isinstance(tenant, arguments.UnsharedTenant):
            tenant = str(arguments.unshared_tenant())  # for each request, since a batch may be of different people
            speculation = speculation or engine.speculation
            drafters = tuple(name for name in speculation.drafters if name != "recall")
            speculation = dataclasses.replace(speculation, drafters=drafters, write_back=False)
            rendered["prefix_tokens"] = 0
        by_default = "precedent" if self.engines.identity else None  # whoever gave a model may have named it anyhow
        recommended = engine.sampling_defaults if samples_as_recommended(name, self.sampling or by_default) else {}
        recommended = {name: value for name, value in recommended.items() if name not in self.model_fields_set}
        sampling, span = arguments.sampling_params(self, stop, {**recommended, **settings}), current_span()
        if span is not None:
            describe_request(span, self._operation, name, sampling)
        generation = engine.submit(
            prompt.token_ids,
            sampling,
            speculation=speculation,
            tenant=tenant,
            workflow_step=settings.get("workflow_step") or arguments.workflow_step_of(metadata) or "",
            prediction=arguments.prediction_text(settings.get("prediction")),
            write_back=None if learning is None else partial(learning.add, engine.cache),
            **rendered,
        )
        return Running(engine, generation, prompt, name, span)


def _with_place(fields: Mapping[str, Any]) -> dict[str, Any]:
    """`fields` with a cache's URL replaced by one that shows no password."""
    given = "speculation_cache" in fields
    return {**fields, "speculation_cache": cache_or_place(fields["speculation_cache"])} if given else dict(fields)
