"""What `ChatPrecedentServer` refuses, by name and before anything is sent, and what it never reads, shows or sends."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
from helpers.fake_server import FakeServer
from langchain_core.load import dumps
from langchain_openai.chat_models.base import BaseChatOpenAI
from pydantic import SecretStr

from precedent.errors import ConfigError, PromptError, UnsupportedError
from precedent.langchain.synonyms import OF_LOADING, SAME
from precedent_server.client import ChatPrecedentServer
from precedent_server.client.names import FIELDS, OF_THE_CONNECTION, OF_THE_ENGINE

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


def test_an_unusable_message_is_refused_in_our_words() -> None:
    server = FakeServer()
    for messages in ([], [("user", "\ud800")], [{"role": "wizard", "content": "x"}], 7):
        with pytest.raises(PromptError):
            server.client().invoke(messages)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="image_url"):
        server.client().invoke([("user", [{"type": "image_url", "image_url": {"url": "http://x"}}])])
    assert server.requests == []


CANARY = "sk-Zyzzogeton"


def authorization(**fields: Any) -> str:
    """The header that a model of these fields sends, when asked in either way."""
    server = FakeServer()
    llm = server.client(**fields)
    with pytest.raises(Exception, match="expected one of"):
        llm.invoke("hello")
    return str(server.requests[0].headers["authorization"])


def test_the_key_comes_from_our_own_variable_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", CANARY)
    assert authorization() == "Bearer no-key"
    monkeypatch.setenv("PRECEDENT_API_KEY", "ours")
    assert authorization() == "Bearer ours"
    assert authorization(api_key="given") == "Bearer given"
    assert authorization(api_key=lambda: "called") == "Bearer called"


VARIABLES = (
    *("OPENAI_API_KEY", "OPENAI_ADMIN_KEY", "OPENAI_ORG_ID", "OPENAI_ORGANIZATION", "OPENAI_PROJECT_ID"),
    *("OPENAI_WEBHOOK_SECRET", "AZURE_OPENAI_API_KEY", "AZURE_OPENAI_AD_TOKEN"),
    *("LANGSMITH_API_KEY", "LANGSMITH_GATEWAY_API_KEY"),
)


async def test_nothing_that_is_meant_for_openai_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.setenv(name, CANARY)
    monkeypatch.setenv("OPENAI_CUSTOM_HEADERS", f"Authorization: Bearer {CANARY}\nx-secret: {CANARY}")
    for name in ("OPENAI_BASE_URL", "OPENAI_API_BASE", "OPENAI_PROXY"):
        monkeypatch.setenv(name, f"http://{CANARY}.example")
    server = FakeServer()
    llm = server.client()
    with pytest.raises(Exception, match="expected one of"):
        llm.invoke("hello")
    with pytest.raises(Exception, match="expected one of"):
        await llm.ainvoke("hello")
    assert len(server.requests) == 2
    for request in server.requests:
        assert CANARY.lower() not in f"{request.url} {request.headers.raw} {request.content!r}".lower()


def test_the_model_comes_from_the_environment_and_a_missing_url_is_not_openais(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRECEDENT_MODEL", "folder/name")
    assert ChatPrecedentServer(base_url="http://server").model_name == "folder/name"
    for name in ("OPENAI_BASE_URL", "OPENAI_API_BASE"):
        monkeypatch.setenv(name, "http://openai.example")
    with pytest.raises(ConfigError, match="base_url is missing"):
        ChatPrecedentServer(model="smol")


def test_a_key_is_shown_nowhere() -> None:
    llm = made(api_key=CANARY, temperature=0.5)
    shown = [repr(llm), str(llm), dumps(llm), json.dumps(llm._identifying_params, default=str)]
    shown += map(str, (llm._get_ls_params(), llm._get_llm_string(), llm._get_invocation_params()))
    assert [text for text in shown if CANARY in text] == []
    for wrong in (f"{CANARY} x", CANARY.encode(), [CANARY]):
        with pytest.raises(ConfigError) as refused:
            made(api_key=wrong)
        assert CANARY not in str(refused.value)


def test_answer_caches_tell_callers_apart() -> None:
    def key(**fields: Any) -> str:
        return made(**fields)._get_llm_string()

    assert key(api_key="one") == key(api_key="one") != key(api_key="two")
    assert len({key(), key(api_key="one"), key(temperature=0.5), key(seed=1), key(base_url="http://other")}) == 5
    llm = made()
    assert llm._get_llm_string(prediction="x", workflow_step="y") == llm._get_llm_string()
    assert llm._get_llm_string(temperature=1) != llm._get_llm_string()


def test_tokens_are_not_counted_by_another_models_tokenizer() -> None:
    with pytest.raises(UnsupportedError, match="custom_get_token_ids="):
        made().get_num_tokens("hello")
    with pytest.raises(UnsupportedError, match="token_counter='approximate'"):
        made().get_num_tokens_from_messages([])
    assert made(custom_get_token_ids=lambda text: [1, 2]).get_num_tokens("hello") == 2


def test_traces_name_the_provider_and_the_limits() -> None:
    params = made(temperature=0.5, max_tokens=7, stop=["A"])._get_ls_params(stop=["B"], model="other")
    assert {key: value for key, value in params.items() if key.startswith("ls_")} == {
        "ls_provider": "precedent",
        "ls_model_name": "other",
        "ls_model_type": "chat",
        "ls_temperature": 0.5,
        "ls_max_tokens": 7,
        "ls_stop": ["A", "B"],
    }
    assert made()._llm_type == "precedent-server"


def test_a_pickle_or_copy_asks_the_same_server() -> None:
    llm = made(temperature=0.5, api_key="first")
    copied = pickle.loads(pickle.dumps(llm))
    assert copied._default_params == llm._default_params
    assert copied.root_client.api_key == copied.root_async_client.api_key == "first"
    other = llm.model_copy(update={"openai_api_key": SecretStr("second"), "temperature": 0.7})
    assert (other.root_client.api_key, other._default_params["temperature"]) == ("second", 0.7)
