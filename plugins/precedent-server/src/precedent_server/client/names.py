"""The names that `ChatPrecedentServer` takes, and what to write instead of those that belong to the server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from langchain_core.language_models.chat_models import BaseChatModel

from precedent.errors import ConfigError
from precedent.langchain.arguments import OF_THE_CALL, ChatFields, checked_arguments, checked_fields
from precedent.langchain.synonyms import IN_A_CALL, OF_A_SERVER, OF_LOADING, WITH_TOOLS

OF_THE_REQUEST = tuple(name for name in OF_THE_CALL if name not in ("tenant", "learning"))
"""Settings that one request carries."""

OF_THE_CONNECTION = (
    *("base_url", "api_key", "timeout", "max_retries", "default_headers", "default_query"),
    *("http_client", "http_async_client", "stream_chunk_timeout", "include_response_headers"),
)
"""Fields that say how the server is reached."""

FIELDS = ("model", *ChatFields.model_fields, *OF_THE_CONNECTION, *BaseChatModel.model_fields)
"""Every argument of the constructor."""

OF_THE_ENGINE = (
    *("draft_model", "speculation_cache", "embedder", "device", "draft_device", "dtype", "model_kwargs"),
    *("quantization", "accurate", "backend", "n_gpu_layers", "chat_template"),
    *("bitwise", "cuda_graphs", "loop", "keep_prefixes"),
)
"""Fields of `ChatPrecedent` that say what is loaded."""

_OTHERS_NAMES_FOR_LOADING = (
    *("num_gpu", "n_gpu_layers", "num_thread", "n_threads", "num_ctx", "n_ctx", "max_model_len", "keep_alive"),
    *("trust_remote_code", "load_in_4bit", "load_in_8bit", "attn_implementation", "pipeline", "tokenizer", "llm"),
    *("huggingfacehub_api_token", "hf_token", "use_auth_token", "validate_model_on_init", "batch_size", "engines"),
)
_NOT_OFFERED = (
    *(name for name in OF_A_SERVER if name not in OF_THE_CONNECTION),
    *("openai_proxy", "http_socket_options", "context_management", "prompt_cache_options", "store"),
)
CLIENTS = ("client", "async_client", "root_client", "root_async_client")
"""Fields with which LangChain copies a model; its clients hold its own key and URL, so a copy makes new ones."""

_IN_PYTHON = {
    "model_name": "model",
    "openai_api_key": "api_key",
    "openai_api_base": "base_url",
    "request_timeout": "timeout",
}
"""The names of fields that langchain-openai gives another name in the constructor."""

_ALWAYS = {
    **dict.fromkeys(("learning",), "the server stores its answers itself: leave it out"),
    **dict.fromkeys(_NOT_OFFERED, "a Precedent server has no such setting: leave it out"),
    **dict.fromkeys(
        (*OF_THE_ENGINE, *OF_LOADING, *_OTHERS_NAMES_FOR_LOADING, "sampling"),
        "it says how the model is loaded or decoded: give it to `precedent serve`",
    ),
    **dict.fromkeys(
        ("tenant", "tenant_from", "user", "cache_salt"),
        "the API key says the tenant: write api_key= with a key of it",
    ),
    **dict.fromkeys(("headers", "extra_headers"), "write default_headers= in the constructor"),
}
_ELSEWHERE_THAN_IN_A_CALL = {
    **_ALWAYS,
    **dict.fromkeys(
        (*OF_THE_CONNECTION, "streaming"),
        "it belongs in the constructor: write ChatPrecedentServer(model=…, {name}=…)",
    ),
}
_NOT_IN_THE_CONSTRUCTOR = {**_ALWAYS, **dict.fromkeys(OF_THE_REQUEST, IN_A_CALL), **WITH_TOOLS}


def fields_of(given: Mapping[str, Any], inherited: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The constructor's arguments under the names that pydantic reads; `inherited` are defaults of langchain-openai.

    Raises ConfigError or UnsupportedError, with what to write instead.
    """
    asked: dict[str, Any] = {}
    for name, value in given.items():
        ours = _IN_PYTHON.get(name, name)
        if ours in asked and asked[ours] is not value:
            raise ConfigError(f"{name}= and another name of {ours}= are both given: give one of the two")
        if ours not in CLIENTS and (ours in FIELDS or name not in inherited or value != inherited[name]):
            asked[ours] = value
    return checked_fields(asked, FIELDS, where, _NOT_IN_THE_CONSTRUCTOR)


def call_settings(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """A call's arguments under our names; None leaves the model's own setting.

    Raises ConfigError or UnsupportedError for an argument that the server would not take.
    """
    return checked_arguments(kwargs, OF_THE_REQUEST, _ELSEWHERE_THAN_IN_A_CALL)
