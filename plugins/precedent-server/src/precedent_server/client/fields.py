"""The fields of `ChatPrecedentServer`, checked before a connection is made, and the connection that they describe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from langchain_core.language_models import ModelProfile
from langchain_openai.chat_models.base import BaseChatOpenAI
from pydantic import Field, model_validator

from precedent import __version__
from precedent.errors import ConfigError
from precedent.langchain.arguments import ChatFields, strictness
from precedent.langchain.wording import settings_in_our_words
from precedent.runtime.plain_values import shown
from precedent_server.client.connection import async_client, checked_key, checked_url, sync_client, with_environment
from precedent_server.client.names import CLIENTS, fields_of
from precedent_server.client.request import plain_speculation, request_fields, template_texts


class ServerFields(ChatFields, BaseChatOpenAI):  # type: ignore[misc]  # the parent's fields are of other types
    """The fields of a chat model behind a server; `ChatPrecedentServer` says what each means."""

    model_name: str = Field(alias="model")
    openai_api_base: str = Field(alias="base_url")
    openai_proxy: str | None = None

    def __init__(self, **kwargs: Any) -> None:
        """Check the settings. Raises ConfigError or UnsupportedError, with what to write instead."""
        fields = BaseChatOpenAI.model_fields.items()
        inherited = {name: field.get_default(call_default_factory=True) for name, field in fields}
        given = with_environment(fields_of(kwargs, inherited, type(self).__name__))
        if given.get("model") is None:
            raise ConfigError("model is missing: give the name under which the server has it as model=…")
        given |= {"base_url": checked_url(given.get("base_url")), "api_key": checked_key(given.get("api_key"))}
        plain = {"speculation": plain_speculation(given.get("speculation", True))}
        plain["templates"] = template_texts(given.get("templates"))
        with settings_in_our_words(given):
            super().__init__(**given | plain)
        strictness({}, self.strict_tools)
        request_fields(self, {})
        if self.output_version not in (None, "v0", "v1"):
            raise ConfigError(f"output_version={shown(self.output_version)} must be 'v0' or 'v1'")

    # Replaces validators of langchain-openai, by their names

    @model_validator(mode="before")
    @classmethod
    def build_extra(cls, values: dict[str, Any]) -> Any:
        """The values as they are: the constructor has refused unknown ones."""
        return values

    @model_validator(mode="before")
    @classmethod
    def validate_temperature(cls, values: dict[str, Any]) -> Any:
        """The values as they are: a model's temperature does not depend on its name."""
        return values

    @model_validator(mode="after")
    def validate_environment(self) -> Self:
        """Make the HTTP clients."""
        self._connect()
        return self

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy with HTTP clients of its own; see pydantic's `BaseModel.model_copy`."""
        copied = super().model_copy(update=update, deep=deep)
        copied._connect()
        return copied

    def __getstate__(self) -> dict[Any, Any]:
        state = super().__getstate__()
        settings = {name: value for name, value in state["__dict__"].items() if name not in CLIENTS}
        return {**state, "__dict__": settings}

    def __setstate__(self, state: dict[Any, Any]) -> None:
        super().__setstate__(state)
        self._connect()

    @model_validator(mode="after")
    def _set_precedent_version(self) -> Self:
        """Add our version to traces; LangChain wants a validator of a name that no other class has."""
        self._add_version("precedent-llm", __version__)
        return self

    def _resolve_model_profile(self) -> ModelProfile | None:
        return None  # langchain-openai would take the profile of OpenAI's model of this name

    def _connect(self) -> None:
        """Make the HTTP clients from the fields alone."""
        settings: dict[str, Any] = {
            "base_url": self.openai_api_base,
            "timeout": self.request_timeout,
            "default_headers": self.default_headers,
            "default_query": self.default_query,
            **({} if self.max_retries is None else {"max_retries": self.max_retries}),
        }
        self.root_client = sync_client(self.openai_api_key, self.http_client, **settings)
        self.root_async_client = async_client(self.openai_api_key, self.http_async_client, **settings)
        self.client, self.async_client = self.root_client.chat.completions, self.root_async_client.chat.completions
