"""A model's fields as an engine's options, and the settings of a call: the fields, overridden by its arguments."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from precedent.config import SpeculationConfig
from precedent.drafters.registry import kind_named
from precedent.engine.options import EngineOptions
from precedent.errors import ConfigError, UnsupportedError
from precedent.langchain.arguments import (
    FOR_CHAT,
    OF_THE_CALL,
    checked_arguments,
    checked_fields,
    merged_stop,
    sampling_params,
    speculation_config,
)
from precedent.langchain.exceptions import of_both_kinds
from precedent.langchain.learning import PendingCompletions
from precedent.langchain.synonyms import (
    IDLE,
    IN_A_CALL,
    IN_CHAT,
    IN_MODEL_KWARGS,
    IN_THE_CONSTRUCTOR,
    LEFT_OUT,
    OF_LOADING,
    WITH_TOOLS,
    Elsewhere,
)
from precedent.langchain.tenants import check_tenants
from precedent.runtime.plain_values import shown
from precedent.text.templates import Template, Templates, tool_templates

if TYPE_CHECKING:
    from precedent.langchain.fields import EngineFields
    from precedent.text.tool_formats import ToolFormat

_RENAMED = {"cache": "speculation_cache"}  # LangChain's own `cache` is one of whole answers
_NO_FIELDS = ("speculation", "limits")  # the former is applied to each call, the latter wants an engine of your own
_FIELD_OF = {
    option.name: _RENAMED.get(option.name, option.name)
    for option in dataclasses.fields(EngineOptions)
    if option.name not in _NO_FIELDS
}
OF_THE_ENGINE = tuple(_FIELD_OF.values())
"""Fields that say what a model's engine is built from."""

_WITH_TOOLS = Elsewhere(("tools", "tool_choice", "strict", "parallel_tool_calls"), WITH_TOOLS)
_IN_A_CALL = Elsewhere(OF_THE_CALL, IN_A_CALL)
_IN_CHAT = Elsewhere(FOR_CHAT, IN_CHAT)
_NOWHERE = Elsewhere(IDLE, LEFT_OUT)
_IN_THE_CONSTRUCTOR = Elsewhere((*OF_THE_ENGINE, *OF_LOADING, "streaming"), IN_THE_CONSTRUCTOR)


def engine_options(model: EngineFields) -> EngineOptions:
    """What the model's engine is built from; None in a field is the option's default."""
    given = {option: getattr(model, field) for option, field in _FIELD_OF.items()} | {"speculation": _asked(model)}
    return EngineOptions(**{option: value for option, value in given.items() if value is not None})


def _asked(model: EngineFields) -> SpeculationConfig | None:
    """The model's drafters where one of them has to be known when the engine is built; otherwise calls choose alone."""
    chosen = speculation_config(model, {}, SpeculationConfig())
    known = chosen is not None and any(kind_named(name) is not None for name in chosen.drafters)
    return SpeculationConfig(drafters=chosen.drafters) if chosen is not None and known else None


def fields_of(given: Mapping[str, Any], known: Sequence[str], where: str) -> dict[str, Any]:
    """`checked_fields` of a model that is loaded in this process. Raises what that raises."""
    of_its_kind = _WITH_TOOLS if "strict_tools" in known else _IN_CHAT
    fields = checked_fields(given, known, where, (of_its_kind, _IN_A_CALL))
    _check_model_kwargs(fields.get("model_kwargs"))
    return fields


def _check_model_kwargs(model_kwargs: Any) -> None:
    for name in model_kwargs if isinstance(model_kwargs, Mapping) else ():
        if name in OF_THE_CALL:
            raise ConfigError(IN_MODEL_KWARGS.format(name=name))


def check_fields(model: EngineFields) -> None:
    """Raise ConfigError before weights are loaded, for a field that no call could use."""
    sampling_params(model, None, {})
    config = speculation_config(model, {}, SpeculationConfig())
    if config is not None and (model.drafters is not None or not isinstance(model.speculation, bool)):
        model.engines.check_drafters(config.drafters)
    check_tenants(model)


def call_settings(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """`checked_arguments` of a model that is loaded in this process. Raises what that raises."""
    settings = checked_arguments(kwargs, OF_THE_CALL, (_IN_THE_CONSTRUCTOR, _NOWHERE))
    learning = settings.get("learning")
    if not isinstance(learning, PendingCompletions | None):
        raise ConfigError(f"learning={shown(learning)} must be PendingCompletions, which SpeculationMiddleware makes")
    return settings


@of_both_kinds()
def check_call(kwargs: Mapping[str, Any], stop: Any = None) -> None:
    """Raise what `call_settings` raises, as LangChain's errors too, before LangChain consumes some of the arguments."""
    merged_stop(call_settings(kwargs).get("stop"), stop)


def text_settings(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """`call_settings` of a text completion. Raises UnsupportedError for what only chat models support."""
    settings = call_settings(kwargs)
    for name in FOR_CHAT:
        if settings.get(name) is not None:
            raise UnsupportedError(f"{name} cannot be given to a text completion: use ChatPrecedent")
    return settings


def templates_of(
    model: EngineFields,
    kwargs: Mapping[str, Any],
    tools: Sequence[Mapping[str, Any]],
    form: ToolFormat | None = None,
) -> tuple[Template, ...]:
    """The premade responses of the call, or else the model's, and the forms of calls to the bound tools."""
    premade = kwargs.get("templates")
    premade = model.templates if premade is None else premade
    return (*(() if premade is None else Templates(premade)), *tool_templates(tools, form))
