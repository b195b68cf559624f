"""Checks requests against the `openai` package's own types: every key is known, supported and of the right shape.

A key that is not supported is refused by name. Habits are accepted without effect: clients send them as a matter of
habit, and they cannot change an answer. So are values that ask for nothing (`best_of: 1`) and nulls at any depth.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Collection, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from types import UnionType
from typing import Annotated, Any, NoReturn, Union

from openai.types.chat import chat_completion_assistant_message_param as assistant
from openai.types.chat import chat_completion_developer_message_param as developer
from openai.types.chat import chat_completion_system_message_param as system
from openai.types.chat import chat_completion_tool_message_param as tool
from openai.types.chat import chat_completion_user_message_param as user
from pydantic import FailFast, Field, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails, from_json

from precedent.runtime.plain_values import shown
from precedent_server.errors import ApiError

MOST_VALUES = 262_144
"""Values in a request, keys not counted. Reading more in one go would make all threads wait."""

MOST_MESSAGES = 16_384
"""Messages of a conversation; each takes some tokens of a context, however short it is."""

MOST_ENTRIES = 16_384
"""Entries of an object such as `logit_bias`: pydantic lists every error in it, and all threads wait for that."""

MOST_NAME = 100
"""Characters of a key that an answer repeats."""

Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]
"""A request's metadata, with the bounds of OpenAI's API."""

HABITS: Mapping[str, Any] = {
    **dict.fromkeys(("user", "store", "service_tier", "safety_identifier")),
    **dict.fromkeys(("prompt_cache_key", "prompt_cache_retention")),
    "metadata": Metadata,
}
"""Keys that clients send as a habit and that cannot change an answer; their values are checked all the same.

None is OpenAI's own type.
"""

SAMPLING = ("temperature", "top_p", "frequency_penalty", "presence_penalty", "seed", "logprobs", "stop")
OWN_SAMPLING: Mapping[str, Any] = {
    "top_k": int,
    "min_p": float,
    "repetition_penalty": float,
    "stop_token_ids": list[int],
}
"""How tokens are chosen, on the routes of chats and of texts: keys of OpenAI's types, and our own with their types."""

_STRING_OR_SEPARATOR = re.compile(rb'"(?:(?:\\.)++|[^"\\]++)*+"|[\[{,]', re.DOTALL)
_QUOTE = ord('"')

_Message = (
    system.ChatCompletionSystemMessageParam
    | developer.ChatCompletionDeveloperMessageParam
    | user.ChatCompletionUserMessageParam
    | assistant.ChatCompletionAssistantMessageParam
    | tool.ChatCompletionToolMessageParam
)

Messages = Annotated[list[Annotated[_Message, Field(discriminator="role")]], Field(min_length=1)]
"""The type of a conversation."""

MESSAGE_KINDS: dict[str, Any] = {
    typing.get_args(typing.get_type_hints(kind)["role"])[0]: kind for kind in typing.get_args(_Message)
}
"""The type of a message by its role."""

_CALLERS_OWN = ("messages", "parameters", "schema", "input_schema", "metadata", "chat_template_kwargs", "arguments")
"""Keys whose values may hold nulls that mean something, or whose nulls are removed elsewhere."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "min_tokens": (0,),
    "top_k": (-1,),
    "length_penalty": (1,),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "ignore_eos": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "priority": (0,),
    "verbosity": ("medium",),
}
"""Values that ask for what happens anyway, of parameters that are not supported; `top_k` is off with 0 here."""


@dataclass(frozen=True, slots=True)
class Keys:
    """What one route takes: a client's type of its body, the keys of it that are supported, and keys with own types.

    `habits` are keys without effect, and `neutral` values that ask for what happens anyway. A dialect may ignore all
    other keys (`ignores_others`).
    """

    reference: Any
    required: Collection[str]
    supported: Collection[str]
    own: Mapping[str, Any]
    instead: Mapping[str, str] = field(default_factory=dict)
    ignores_others: bool = False
    habits: Mapping[str, Any] = field(default_factory=lambda: HABITS)
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=lambda: NEUTRAL)

    @property
    def known(self) -> tuple[str, ...]:
        """Every key that a request may have, once."""
        return tuple(dict.fromkeys((*self.supported, *self.own, *(() if self.ignores_others else self.habits))))

    @property
    def kinds(self) -> Mapping[str, Any]:
        """The type of every key that a request may have; of a key that is not supported, None: a null."""
        hints, ours = _hints(self.reference), {**self.habits, **self.own}
        known = {name: ours.get(name) or hints.get(name, Any) for name in self.known}
        return {**dict.fromkeys(sorted(hints.keys() - known)), **known}


def parsed(raw: bytes) -> dict[str, Any]:
    """A request's body. Raises ApiError for anything but a JSON object, for NaN, deep nesting and too many values."""
    if _values_over(raw, MOST_VALUES):
        raise ApiError(f"the body holds more than {MOST_VALUES:,} values: send less at once")
    try:
        found = from_json(raw, allow_inf_nan=False, cache_strings="keys")  # a tenth of the time of json.loads
    except ValueError as error:
        raise ApiError(f"the body is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ApiError("the body must be a JSON object")
    return found


def _values_over(raw: bytes, most: int) -> bool:
    """Whether a JSON text has more than `most` values, without reading them."""
    if sum(raw.count(separator) for separator in (b"[", b"{", b",")) <= most:
        return False
    separators = (1 for found in _STRING_OR_SEPARATOR.finditer(raw) if raw[found.start()] != _QUOTE)
    return sum(islice(separators, most + 1)) > most


def checked(body: Mapping[str, Any], keys: Keys) -> dict[str, Any]:
    """The body without keys of habit and without nulls. Raises ApiError that names the key."""
    said, kinds, known = dict[str, Any](), keys.kinds, keys.known
    if keys.ignores_others:
        body = {name: value for name, value in body.items() if name in known}
    for name, value in without_nulls(body).items():
        neutral = any(
            value == one and isinstance(value, bool) == isinstance(one, bool) for one in keys.neutral.get(name, ())
        )
        if name not in known and not neutral:
            _refuse(name, keys)
        if isinstance(value, dict):
            check_most(name, value, MOST_ENTRIES, "entries")
        if name in known and name != "messages":
            fits(value, kinds[name], name)
        if name in known and name not in keys.habits:
            said[name] = 0 if neutral and name == "top_k" else value
    for name in body.keys() - kinds.keys() - keys.neutral.keys():
        _refuse(name, keys)  # also if it is null: nobody knows it
    for name in keys.required:
        if name not in said:
            raise ApiError(f"{name} is missing", param=name, code="missing_required_parameter")
    return said


def check_most(name: str, values: Sized, most: int, what: str) -> None:
    """Raise ApiError for more than `most` values of a key."""
    if len(values) > most:
        raise ApiError(f"{name} has {len(values):,} {what}: at most {most:,} are allowed", param=name)


def unsupported(message: str, param: str) -> ApiError:
    """A value that this server does not take."""
    return ApiError(message, param=param, code="unsupported_value")


def _refuse(name: str, keys: Keys) -> NoReturn:
    """Raise ApiError for a key that is not supported."""
    hint = keys.instead.get(name) or f"known: {', '.join(sorted(keys.known))}"
    param = name if len(name) <= MOST_NAME else None
    raise ApiError(f"{shown(name)} is not supported: {hint}", param=param, code="unsupported_parameter")


def biases(given: Mapping[str, Any]) -> dict[int, Any]:
    """A checked `logit_bias` by token id. Raises ApiError for a key that is no whole number."""
    try:
        return {int(token): bias for token, bias in given.items()}
    except ValueError:
        raise ApiError("the keys of logit_bias must be token ids", param="logit_bias") from None


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)  # without the marks of required keys


def without_nulls(value: Any) -> Any:
    """The value without keys that are null, at any depth: they ask for nothing."""
    if isinstance(value, dict):
        return {
            key: part if key in _CALLERS_OWN else without_nulls(part) for key, part in value.items() if part is not None
        }
    return [without_nulls(part) for part in value] if isinstance(value, list) else value


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(_until_first_error(kind))


class _UntilFirstError(FailFast):
    """pydantic's mark, which cannot be part of a union because it has no hash."""

    def __hash__(self) -> int:
        return hash(type(self))


def _until_first_error(kind: Any) -> Any:
    """The type, with lists that are checked up to their first error: listing all of them makes all threads wait."""
    arguments = tuple(_until_first_error(part) for part in typing.get_args(kind))
    if typing.get_origin(kind) in (list, Sequence):
        return Annotated[list[arguments], _UntilFirstError()]  # type: ignore[valid-type]
    return Union[arguments] if typing.get_origin(kind) in (Union, UnionType) else kind  # noqa: UP007 (built at run time)


def fits(value: Any, kind: Any, place: str) -> None:
    """Raise ApiError, which names `place`, unless `value` has the shape of `kind`."""
    try:
        _read_whole(_adapter(kind).validate_python(value, strict=True))
    except ValidationError as error:
        errors = error.errors(include_url=False)
        not_meant = {one["loc"][:-1] for one in errors if one["type"] == "literal_error"}  # a union's other members
        first = min(errors, key=lambda one: (-len(one["loc"]), one["loc"][:-1] in not_meant))
        inside = _path(value, first)
        wrong = dict.fromkeys(one["msg"] for one in (first, *errors) if _path(value, one) == inside)
        said = " or ".join(message.removeprefix(_SHOULD_BE) if n else message for n, message in enumerate(wrong))
        raise ApiError(f"{place}{inside}: {said}", param=place, code="invalid_type") from None


_SHOULD_BE = "Input should be "


def _path(value: Any, error: ErrorDetails) -> str:
    """Where in a value an error is; pydantic's names of a union's members lead nowhere and are left out."""
    found = ""
    for part in error["loc"]:
        if isinstance(part, int) and isinstance(value, list) and part < len(value):
            found, value = f"{found}[{part}]", value[part]
        elif isinstance(part, str) and isinstance(value, dict) and part in value and len(part) <= MOST_NAME:
            found, value = f"{found}.{part}", value[part]
    return f"{found}.{error['loc'][-1]}" if error["type"] == "missing" else found


def _read_whole(value: Any) -> None:
    """Read lists to their ends: pydantic checks the items of an `Iterable` only when it is read."""
    if isinstance(value, Mapping):
        for part in value.values():
            _read_whole(part)
    elif isinstance(value, Iterable) and not isinstance(value, str | bytes):
        for part in value:
            _read_whole(part)
