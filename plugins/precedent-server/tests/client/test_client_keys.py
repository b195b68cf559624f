"""Keys and other settings of the connection: where they come from, and where they are never shown or sent."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
from helpers.fake_server import FakeServer
from langchain_core.load import dumps
from pydantic import SecretStr

from precedent.errors import ConfigError, UnsupportedError
from precedent_server.client import ChatPrecedentServer

CANARY = "sk-Zyzzogeton"


def made(**fields: Any) -> ChatPrecedentServer:
    return ChatPrecedentServer(**{"model": "smol", "base_url": "http://server", **fields})


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
