"""What one call asks for: the model's fields, overridden by keyword arguments."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from precedent.config import SamplingParams, SpeculationConfig
from precedent.errors import ConfigError, UnsupportedError
from precedent.langchain.tenants import check_tenants
from precedent.templates import Template, Templates
from precedent.text.tool_skeletons import tool_templates

if TYPE_CHECKING:
    from precedent.langchain.fields import EngineFields
    from precedent.text.tool_formats import ToolFormat

SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "max_tokens")
OF_THE_CALL = (
    *SAMPLING,
    *("speculation", "drafters", "max_nodes", "tenant", "workflow_step", "prediction", "templates", "learning"),
    *("logprobs", "top_logprobs", "tools", "tool_choice", "model"),
    *("strict", "strict_tools", "parallel_tool_calls", "response_format"),
)
ONLY_SPEED = ("learning", "prediction", "templates", "max_nodes", "drafters", "workflow_step")
"""Of these, what changes how fast an answer comes and nothing else."""

FROM_LANGCHAIN = ("stream", "ls_structured_output_format", "structured_output_format")
"""Keyword arguments that LangChain passes on and that say nothing about the answer."""

_HARMLESS_VALUES: dict[str, tuple[Any, ...]] = {
    "n": (None, 1),
}
"""Keyword arguments known from other chat models: refused by name where they ask for something."""


@contextmanager
def in_one_line() -> Iterator[None]:
    """Turn what pydantic says of a field, a page for each, into one ConfigError."""
    try:
        yield
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(map(str, first["loc"]))
        if first["type"] == "missing":
            raise ConfigError(f"{name} is missing: give a Hugging Face id or a folder as {name}=…") from error
        raise ConfigError(f"{name}={first['input']!r} cannot be used: {first['msg']}") from error


def check_fields(model: EngineFields) -> None:
    """Raise ConfigError for a field that no call could use, before any weights are loaded."""
    sampling_params(model, None, {})
    speculation_config(model, {}, SpeculationConfig())
    check_tenants(model)


def check_call(kwargs: Mapping[str, Any]) -> None:
    """Raise UnsupportedError or ConfigError for keyword arguments that would otherwise be dropped silently."""
    for name, value in kwargs.items():
        if name in _HARMLESS_VALUES and value not in _HARMLESS_VALUES[name]:
            raise UnsupportedError(f"{name}={value!r} is not supported: leave it out")
    check_names(kwargs, (*OF_THE_CALL, *FROM_LANGCHAIN, *_HARMLESS_VALUES), "a call")


def check_text_call(kwargs: Mapping[str, Any]) -> None:
    """Raise UnsupportedError for what only a chat model can do."""
    for name in ("tools", "tool_choice", "parallel_tool_calls", "strict", "strict_tools", "response_format"):
        if kwargs.get(name) is not None:
            raise UnsupportedError(f"{name} cannot be given to a text completion: use ChatPrecedent")


def check_names(names: Iterable[str], known: Iterable[str], where: str) -> None:
    """Raise ConfigError on a name that is not known, with the nearest one that is."""
    known = list(known)
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
            raise ConfigError(f"{where} takes no {name!r}; {hint}")


def sampling_params(model: EngineFields, stop: list[str] | None, kwargs: Mapping[str, Any]) -> SamplingParams:
    """The model's sampling settings under those of the call; stop strings of both apply."""
    chosen = {name: getattr(model, name) for name in SAMPLING}
    chosen |= {name: kwargs[name] for name in SAMPLING if kwargs.get(name) is not None}
    return SamplingParams(**chosen, stop=merged_stop(model.stop, stop), logprobs=_num_logprobs(model, kwargs))


def _num_logprobs(model: EngineFields, kwargs: Mapping[str, Any]) -> int | None:
    """How many of the likeliest tokens are wanted at each place, in OpenAI's words; None without `logprobs`."""
    wanted, top = (
        getattr(model, name) if kwargs.get(name) is None else kwargs[name] for name in ("logprobs", "top_logprobs")
    )
    if not isinstance(wanted, bool):
        raise ConfigError(f"logprobs={wanted!r} must be True or False; top_logprobs= says how many")
    if top is not None and not wanted:
        raise ConfigError(f"top_logprobs={top!r} needs logprobs=True")
    if wanted and not (top is None or isinstance(top, int)):
        raise ConfigError(f"top_logprobs={top!r} must be a number of tokens")
    return (top or 0) if wanted else None


def merged_stop(*stops: Iterable[str] | None) -> tuple[str, ...]:
    """All stop strings, each once, in order."""
    return tuple(dict.fromkeys(text for texts in stops for text in texts or ()))


def speculation_config(
    model: EngineFields, kwargs: Mapping[str, Any], default: SpeculationConfig
) -> SpeculationConfig | None:
    """What may be proposed in this call, or None for the engine's `default`. Raises ConfigError on other types."""
    wanted = kwargs.get("speculation")
    wanted = model.speculation if wanted is None else wanted
    drafters = kwargs.get("drafters")
    drafters = model.drafters if drafters is None else drafters  # an empty list asks for none
    if isinstance(drafters, str):  # a text is a sequence too: of names of one letter
        raise ConfigError(f"drafters={drafters!r} must be a list of names: [{drafters!r}]")
    if isinstance(wanted, bool):
        config = default if wanted else dataclasses.replace(default, enabled=False)
    elif isinstance(wanted, Mapping):
        config = SpeculationConfig.from_dict(wanted)
    elif isinstance(wanted, SpeculationConfig):
        config = wanted
    else:
        raise ConfigError(
            f"speculation={wanted!r} is neither True, False, a SpeculationConfig nor a dict of its settings"
        )
    if drafters is not None:
        config = dataclasses.replace(config, drafters=tuple(drafters))
    if kwargs.get("max_nodes") is not None:
        config = dataclasses.replace(config, max_nodes=kwargs["max_nodes"])
    return None if config is default else config


def prediction_text(prediction: Any) -> str | None:
    """The caller's guess of the answer: a text, or OpenAI's `{"type": "content", "content": …}` (text or text parts).

    Raises ConfigError on anything else.
    """
    if prediction is None or isinstance(prediction, str):
        return prediction
    content = prediction.get("content") if isinstance(prediction, Mapping) else None
    if isinstance(content, list):
        parts: list[Any] = [part.get("text") if isinstance(part, Mapping) else part for part in content]
        content = "".join(parts) if all(isinstance(part, str) for part in parts) else None
    if not isinstance(content, str) or prediction.get("type", "content") != "content":
        raise ConfigError(f'prediction={prediction!r} is neither a text nor {{"type": "content", "content": "…"}}')
    return content


def templates_of(
    model: EngineFields,
    kwargs: Mapping[str, Any],
    tools: Sequence[Mapping[str, Any]],
    form: ToolFormat | None = None,
) -> tuple[Template, ...]:
    """The call's premade responses, else the model's, and the forms of the calls that the bound tools allow."""
    premade = kwargs.get("templates")
    premade = model.templates if premade is None else premade
    return (*(() if premade is None else Templates(premade)), *tool_templates(tools, form))
