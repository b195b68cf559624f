"""`ChatPrecedentServer`, a LangChain chat model whose weights are in a server's process.

Its HTTP clients know only what they are told: `openai` would take keys and headers from OPENAI_… variables.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit

import openai
from langchain_core.language_models import ModelProfile
from langchain_core.language_models.base import LanguageModelInput
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.messages.tool import tool_call_chunk
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_openai.chat_models.base import BaseChatOpenAI
from pydantic import Field, SecretStr, model_validator

from precedent.errors import ConfigError, UnsupportedError
from precedent.langchain.arguments import ONLY_SPEED
from precedent.langchain.chat_calls import ChatCalls
from precedent.langchain.exceptions import of_both_kinds, settings_in_our_words
from precedent.langchain.messages import media_of
from precedent.runtime.plain_values import shown
from precedent.text.tool_formats.json_text import ARGUMENTS, is_json, seal_of
from precedent_server.client.names import CLIENTS, call_settings, fields_of
from precedent_server.client.request import plain_speculation, request_fields, template_texts, wire_messages

PROVIDER = "precedent"

NO_KEY = "no-key"
"""Sent where there is no key: a server on the loopback address asks for none, but `openai` always sends one."""

FROM_ENVIRONMENT = {"model": "PRECEDENT_MODEL", "api_key": "PRECEDENT_API_KEY"}
"""Fields that are not given, and the environment variables that fill them in."""

Client = TypeVar("Client", openai.OpenAI, openai.AsyncOpenAI)


class ChatPrecedentServer(ChatCalls, BaseChatOpenAI):  # type: ignore[misc]  # the parent's fields are of other types
    """A chat model behind `precedent serve`, with the fields, arguments and answers of `ChatPrecedent`.

    `model` is the name under which the server has the model, and `base_url` where the server is; a URL without a path
    gets `/v1`. `api_key` says the tenant; without one PRECEDENT_API_KEY of the environment is sent, and nothing that
    is meant for OpenAI (OPENAI_API_KEY, OPENAI_BASE_URL and the like) is ever read. `timeout`, `max_retries`,
    `default_headers`, `default_query`, `http_client` and `http_async_client` are those of `ChatOpenAI`. All other
    fields are those of `ChatPrecedent`, without those that say what is loaded: `precedent serve` takes these.

    Answers have `response_metadata["speculation"]` and `additional_kwargs["reasoning_content"]` as those of
    `ChatPrecedent`. A wrong argument raises its ConfigError, PromptError or UnsupportedError before anything is sent;
    what the server or the connection refuses is an error of the `openai` package, as with `ChatOpenAI`.

        llm = ChatPrecedentServer(model="smollm2", base_url="http://127.0.0.1:8000")
        agent = create_agent(llm, tools=[look_up_order])
    """

    model_name: str = Field(alias="model")
    openai_api_base: str = Field(alias="base_url")
    openai_proxy: str | None = None

    def __init__(self, **kwargs: Any) -> None:
        """Check the settings. Raises ConfigError or UnsupportedError, with what to write instead."""
        fields = BaseChatOpenAI.model_fields.items()
        inherited = {name: field.get_default(call_default_factory=True) for name, field in fields}
        given = _with_environment(fields_of(kwargs, inherited, type(self).__name__))
        if given.get("model") is None:
            raise ConfigError("model is missing: give the name under which the server has it as model=…")
        given |= {"base_url": _checked_url(given.get("base_url")), "api_key": _checked_key(given.get("api_key"))}
        plain = {"speculation": plain_speculation(given.get("speculation", True))}
        plain["templates"] = template_texts(given.get("templates"))
        with settings_in_our_words(given):
            super().__init__(**given | plain)
        request_fields(self, {})

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
        self.root_client = _connected(openai.OpenAI, self.openai_api_key, self.http_client, **settings)
        self.root_async_client = _connected(openai.AsyncOpenAI, self.openai_api_key, self.http_async_client, **settings)
        self.client, self.async_client = self.root_client.chat.completions, self.root_async_client.chat.completions

    # What LangChain asks of the model

    @property
    def _llm_type(self) -> str:
        return "precedent-server"

    @property
    def lc_secrets(self) -> dict[str, str]:
        """The environment variable that stands for the key where a model is written down."""
        return {"openai_api_key": "PRECEDENT_API_KEY"}

    @classmethod
    def get_lc_namespace(cls) -> list[str]:
        """The namespace in which LangChain finds the class when it loads a serialized model."""
        return ["precedent_server", "client"]

    @property
    def _default_params(self) -> dict[str, Any]:
        return request_fields(self, {})

    def _get_llm_string(self, stop: list[str] | None = None, **kwargs: Any) -> str:
        """The key of an answer in LangChain's caches, which differs for callers of different API keys."""
        call = {name: value for name, value in kwargs.items() if name not in ONLY_SPEED}
        key = self.openai_api_key
        caller = "" if key is None else str(id(key))
        if isinstance(key, SecretStr):
            caller = hashlib.sha256(key.get_secret_value().encode()).hexdigest()[:16]
        return f"{super()._get_llm_string(stop=stop, **call)}---{caller}"

    def get_token_ids(self, text: str) -> list[int]:
        """Token ids by `custom_get_token_ids`. Raises UnsupportedError without: the tokenizer is the server's."""
        if self.custom_get_token_ids is None:
            raise UnsupportedError(
                "tokens cannot be counted without the model's tokenizer, which the server has: give "
                "custom_get_token_ids=, or to trim_messages token_counter='approximate'"
            )
        return self.custom_get_token_ids(text)

    def get_num_tokens_from_messages(self, messages: Sequence[BaseMessage], *args: Any, **kwargs: Any) -> int:
        """Raises UnsupportedError: the chat template, too, is the server's."""
        raise UnsupportedError(
            "a prompt's tokens cannot be counted without the model's chat template, which the server has: give "
            "trim_messages token_counter='approximate'"
        )

    # One request

    def _use_responses_api(self, payload: dict[str, Any]) -> bool:
        return False

    def _call_settings(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        return call_settings(kwargs)

    def _should_stream_usage(self, stream_usage: bool | None = None, **kwargs: Any) -> bool:
        with of_both_kinds():
            call_settings(kwargs)  # before the parent replaces a `stream_options` that was given
        return True

    @of_both_kinds()
    def _get_request_payload(
        self, input_: LanguageModelInput, *, stop: list[str] | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        of_streams = ("stream", "stream_options") if kwargs.get("stream") is True else ()
        streamed = {name: kwargs.pop(name) for name in of_streams if name in kwargs}
        settings = call_settings(kwargs)
        messages = wire_messages(self._convert_input(input_).to_messages(), media_of(settings, self.media))
        return {"messages": messages, **request_fields(self, settings, stop), **streamed}

    def _create_chat_result(self, response: Any, generation_info: dict[str, Any] | None = None) -> ChatResult:
        result = super()._create_chat_result(response, generation_info)
        answer: Mapping[str, Any] = response if isinstance(response, dict) else response.model_dump(warnings=False)
        for generation, choice in zip(result.generations, answer["choices"], strict=True):
            _complete(generation.message, answer, choice["message"])
            for said, name in (
                (generation.message.additional_kwargs, "refusal"),
                (generation.generation_info, "logprobs"),
            ):
                if said is not None and said.get(name) is None:  # as OpenAI's "logprobs": null
                    said.pop(name, None)
        (result.llm_output or {})["model_provider"] = PROVIDER
        return result

    def _convert_chunk_to_generation_chunk(
        self, chunk: dict[str, Any], default_chunk_class: type, base_generation_info: dict[str, Any] | None
    ) -> ChatGenerationChunk | None:
        made = super()._convert_chunk_to_generation_chunk(chunk, default_chunk_class, base_generation_info)
        if made is not None:
            choices = chunk.get("choices") or [{"delta": {}}]
            _complete(made.message, chunk, choices[0]["delta"])
        return made

    def _stream(self, *args: Any, **kwargs: Any) -> Iterator[ChatGenerationChunk]:
        calls = _StreamedCalls()
        return map(calls.seen, super()._stream(*args, **kwargs))

    async def _astream(self, *args: Any, **kwargs: Any) -> AsyncIterator[ChatGenerationChunk]:
        calls = _StreamedCalls()
        async for chunk in super()._astream(*args, **kwargs):
            yield calls.seen(chunk)


class _StreamedCalls:
    """The pieces of a stream's calls; marks one that `max_tokens` cut, which LangChain would complete by itself."""

    def __init__(self) -> None:
        self._last: int | None = None
        self._arguments = ""

    def seen(self, chunk: ChatGenerationChunk) -> ChatGenerationChunk:
        """The chunk; the one with which the answer was cut seals the call that is open."""
        message = chunk.message
        if not isinstance(message, AIMessageChunk):
            return chunk
        for piece in message.tool_call_chunks:
            if piece["index"] != self._last:
                self._last, self._arguments = piece["index"], ""
            self._arguments += piece["args"] or ""
        was_cut = (chunk.generation_info or {}).get("finish_reason") == "length"
        if was_cut and self._last is not None and not is_json(self._arguments):
            seal = tool_call_chunk(args=seal_of(self._arguments, ARGUMENTS), index=self._last)
            message.tool_call_chunks = [*message.tool_call_chunks, seal]
        return chunk


def _complete(message: BaseMessage, answer: Mapping[str, Any], said: Mapping[str, Any]) -> None:
    """Add to a message what `answer` (a completion or a chunk) and `said` (its message or delta) have of ours."""
    message.response_metadata["model_provider"] = PROVIDER
    if answer.get("speculation") is not None:
        message.response_metadata["speculation"] = answer["speculation"]
    if said.get("reasoning_content"):
        message.additional_kwargs["reasoning_content"] = said["reasoning_content"]
    usage: Any = message.usage_metadata if isinstance(message, AIMessage) else None
    details = (answer.get("usage") or {}).get("completion_tokens_details") or {}
    if usage is not None and (accepted := details.get("accepted_prediction_tokens")) is not None:
        usage["output_token_details"] = {**usage.get("output_token_details", {}), "accepted_prediction": accepted}


def _with_environment(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields, completed from the environment."""
    found = {name: os.environ.get(variable) for name, variable in FROM_ENVIRONMENT.items() if fields.get(name) is None}
    return {**fields, **{name: value for name, value in found.items() if value}}


def _checked_key(key: Any) -> Any:
    """A key that can stand in a header, as a secret; functions that return one pass. ConfigError never shows it."""
    if key is None or callable(key):
        return key
    text = key.get_secret_value() if isinstance(key, SecretStr) else key
    if not isinstance(text, str):
        raise ConfigError(f"api_key is a {type(key).__name__}: give a text, or a function that returns one")
    if not text or not text.isascii() or not text.isprintable() or " " in text:
        raise ConfigError("api_key is empty, or holds spaces, line breaks or letters that no header may have")
    return SecretStr(text)


def _checked_url(url: Any) -> str:
    """The URL below which the server has `/chat/completions`; one without a path gets `/v1`. Raises ConfigError."""
    if url is None:
        raise ConfigError('base_url is missing: give the server\'s, as base_url="http://127.0.0.1:8000"')
    parts = urlsplit(str(url))
    if parts.username or parts.password:
        raise ConfigError("base_url holds a user name or a password: leave them out, and write api_key=")
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ConfigError(f'base_url={shown(str(url))} must be like "http://127.0.0.1:8000"')
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/') or '/v1'}"


def _connected(kind: type[Client], key: Any, http_client: Any, **settings: Any) -> Client:
    """A client without what `openai` finds in OPENAI_… variables: another company's account, keys and headers."""
    plain = key.get_secret_value() if isinstance(key, SecretStr) else NO_KEY if key is None else key
    client = kind(api_key=plain, http_client=http_client, **settings)
    client.organization = client.project = client.admin_api_key = client.webhook_secret = None
    client._custom_headers = dict(settings.get("default_headers") or {})
    return client
