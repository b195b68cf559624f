"""What `ChatPrecedentServer` refuses, by name and before anything is sent, and what it never reads."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from helpers.fake_server import FakeServer
from hypothesis import given, settings
from hypothesis import strategies as st
from langchain_core.exceptions import ModelInvalidRequestError
from langchain_openai.chat_models.base import BaseChatOpenAI

from precedent.errors import ConfigError, PromptError, UnsupportedError
from precedent.langchain.synonyms import HINTS, OF_LOADING, SAME
from precedent_server.client import ChatPrecedentServer
from precedent_server.client.names import FIELDS, OF_THE_CONNECTION, OF_THE_ENGINE, OF_THE_REQUEST

TO_THE_SERVER = "give it to `precedent serve`"
BY_THE_KEY = "the API key says the tenant"


def made(**fields: Any) -> ChatPrecedentServer:
    return ChatPrecedentServer(**{"model": "smol", "base_url": "http://server", **fields})


@pytest.mark.parametrize(
    ("name", "why"),
    [
        *((name, TO_THE_SERVER) for name in (*OF_THE_ENGINE, *OF_LOADING, "num_gpu", "keep_alive", "sampling")),
        *((name, BY_THE_KEY) for name in ("tenant", "tenant_from", "user", "cache_salt")),
        *(
            (name, "a Precedent server has no such setting")
            for name in ("service_tier", "openai_proxy", "organization")
        ),
        ("learning", "the server stores its answers itself"),
        ("extra_body", "write its entries as arguments"),
        ("temprature", "known: "),
    ],
)
def test_a_name_that_is_not_ours_is_refused(name: str, why: str) -> None:
    server = FakeServer()
    value: Any = {"x": "y"}
    with pytest.raises(ConfigError, match=rf"ChatPrecedentServer takes no '{name}'.*{why}"):
        made(**{name: value})
    with pytest.raises(ConfigError, match=rf"a call takes no '{name}'.*{why}"):
        list(server.client().stream("hello", **{name: value}))
    assert server.requests == []


def test_where_a_name_belongs_is_said() -> None:
    for name in ("max_nodes", "prediction", "workflow_step", "response_format"):
        with pytest.raises(ConfigError, match=rf"it belongs in a call: write bind\({name}=…\)"):
            made(**{name: "x"})
    for name in (*OF_THE_CONNECTION, "streaming"):
        with pytest.raises(ConfigError, match=r"write ChatPrecedentServer\(model=…, "):
            FakeServer().client().invoke("hello", **{name: "x"})
    with pytest.raises(ConfigError, match="write bind_tools"):
        made(tools=[])


@pytest.mark.parametrize("name", [name for name in BaseChatOpenAI.model_fields if name not in FIELDS])
def test_every_other_field_of_langchain_openai_is_refused_or_has_our_name(name: str) -> None:
    """With a value of one's own: LangChain copies a model with the defaults of all its fields."""
    ours = {"model_name", "openai_api_key", "openai_api_base", "request_timeout"}
    if name in ours or name in SAME or name in {"client", "async_client", "root_client", "root_async_client"}:
        return
    with pytest.raises((ConfigError, UnsupportedError), match=name):
        made(**{name: {"x": "y"}})


@pytest.mark.parametrize("name", [name for name in HINTS if name not in (*FIELDS, *BaseChatOpenAI.model_fields)])
def test_no_hint_sends_a_reader_to_a_field_that_is_refused(name: str) -> None:
    with pytest.raises((ConfigError, UnsupportedError)) as refused:
        made(**{name: "x"})
    assert not any(f"{field}=" in str(refused.value).split(":", 1)[1] for field in (*OF_THE_ENGINE, "tenant"))


WRONG: dict[str, tuple[Any, ...]] = {
    "temperature": (-1, "warm"),
    "max_tokens": (1.5, 0),
    "top_p": (0,),
    "top_k": (True,),
    "top_logprobs": (3,),
    "logit_bias": ({"a": 1},),
    "stop": ([""],),
    "speculation": ("yes", {"nodes": 3}),
    "drafters": ("prompt",),
    "templates": ("one text", ["{hole}"]),
    "strict_tools": ("yes",),
    "reasoning": (3,),
    "chat_template_kwargs": ({1: 2},),
    "output_version": ("responses/v1",),
    "streaming": ("yes",),
    "base_url": (None, "server:8000", "ftp://server", "http://", "http://server/v1?key=1", "http://me:secret@server"),
    "model": (None, ""),
    "api_key": ("", "two words", "line\n", "schlüssel"),
    "max_retries": ("many",),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_value_is_refused_before_a_connection_is_made(name: str) -> None:
    says = {"strict_tools": "strict='yes' must be 'auto', True or False", "templates": "template"}.get(name, name)
    for value in WRONG[name]:
        with pytest.raises((ConfigError, UnsupportedError), match=f"(?i){says}"):
            made(**{name: value})


@settings(max_examples=40)
@given(st.sampled_from(OF_THE_REQUEST), st.from_type(object) | st.lists(st.integers()) | st.text() | st.floats())
def test_any_value_is_sent_or_refused(name: str, value: object) -> None:
    """Nothing comes out but our errors, which are LangChain's too."""
    with contextlib.suppress(ModelInvalidRequestError):
        made()._get_request_payload("hello", **{name: value})


def test_an_unusable_message_is_refused_in_our_words() -> None:
    server = FakeServer()
    for messages in ([], [("user", "\ud800")], [{"role": "wizard", "content": "x"}], 7):
        with pytest.raises(PromptError):
            server.client().invoke(messages)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="image_url"):
        server.client().invoke([("user", [{"type": "image_url", "image_url": {"url": "http://x"}}])])
    assert server.requests == []
