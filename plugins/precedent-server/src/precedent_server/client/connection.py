"""HTTP clients that know only what they are told: `openai` would take keys and headers from OPENAI_… variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, TypeVar
from urllib.parse import urlsplit

import openai
from pydantic import SecretStr

from precedent.errors import ConfigError
from precedent.runtime.plain_values import shown

NO_KEY = "no-key"
"""Sent where there is no key: a server on the loopback address asks for none, but `openai` always sends one."""

FROM_ENVIRONMENT = {"model": "PRECEDENT_MODEL", "api_key": "PRECEDENT_API_KEY"}
"""Fields that are not given, and the environment variables that fill them in."""


def with_environment(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields, completed from the environment."""
    found = {name: os.environ.get(variable) for name, variable in FROM_ENVIRONMENT.items() if fields.get(name) is None}
    return {**fields, **{name: value for name, value in found.items() if value}}


def checked_key(key: Any) -> Any:
    """A key that can stand in a header, as a secret; functions that return one pass. ConfigError never shows it."""
    if key is None or callable(key):
        return key
    text = key.get_secret_value() if isinstance(key, SecretStr) else key
    if not isinstance(text, str):
        raise ConfigError(f"api_key is a {type(key).__name__}: give a text, or a function that returns one")
    if not text or not text.isascii() or not text.isprintable() or " " in text:
        raise ConfigError("api_key is empty, or holds spaces, line breaks or letters that no header may have")
    return SecretStr(text)


def checked_url(url: Any) -> str:
    """The URL below which the server has `/chat/completions`; one without a path gets `/v1`. Raises ConfigError."""
    if url is None:
        raise ConfigError('base_url is missing: give the server\'s, as base_url="http://127.0.0.1:8000"')
    parts = urlsplit(str(url))
    if parts.username or parts.password:
        raise ConfigError("base_url holds a user name or a password: leave them out, and write api_key=")
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ConfigError(f'base_url={shown(str(url))} must be like "http://127.0.0.1:8000"')
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/') or '/v1'}"


Client = TypeVar("Client", openai.OpenAI, openai.AsyncOpenAI)


def connected(kind: type[Client], key: Any, http_client: Any, **settings: Any) -> Client:
    """A client without what `openai` finds in OPENAI_… variables: another company's account, keys and headers."""
    plain = key.get_secret_value() if isinstance(key, SecretStr) else NO_KEY if key is None else key
    client = kind(api_key=plain, http_client=http_client, **settings)
    client.organization = client.project = client.admin_api_key = client.webhook_secret = None
    client._custom_headers = dict(settings.get("default_headers") or {})
    return client
