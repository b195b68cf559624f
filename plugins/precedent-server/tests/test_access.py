"""Who reaches a server: hosts, origins, HEAD, redirects, and what is told of failures and models."""

from __future__ import annotations

import logging
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from precedent_server.access import AccessRules
from precedent_server.keys import KeyFile, add_key
from precedent_server.models import ModelPool, Served
from precedent_testing.scripted_model import scripted_model_engine

ASKED = {"model": "scripted", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
CHAT = "/v1/chat/completions"
APP = "https://app.example.org"


@pytest.mark.parametrize(
    ("hosts", "answered", "refused"),
    [
        ((), ("localhost:8000",), ("models.internal:8000",)),
        (("*",), ("evil.org",), ()),
        (
            ("models.internal",),
            ("models.internal:8000", "MODELS.internal", "localhost:8000"),
            ("evil.org", "models.internal.evil.org"),
        ),
    ],
)
@pytest.mark.parametrize("with_key", [False, True])
async def test_a_host_is_answered_if_it_is_allowed(
    serve: Any, path: Path, hosts: Any, answered: Any, refused: Any, with_key: bool
) -> None:
    headers = {"Authorization": f"Bearer {add_key(path, 'desk', 'shop')}"} if with_key else {}
    client = serve(lambda prompt: "x", access=AccessRules(hosts), keys=KeyFile(path) if with_key else None)
    for host in (*answered, *refused):
        answer = await client.post(CHAT, json=ASKED, headers={**headers, "Host": host})
        allowed = host in answered or (with_key and not hosts)
        assert answer.status_code == (200 if allowed else 403), answer.text


@pytest.mark.parametrize("hosts", [(), ("models.internal",)])
async def test_health_is_told_under_any_name_and_without_a_key(serve: Any, path: Path, hosts: Any) -> None:
    add_key(path, "desk", "shop")
    for keys in (None, KeyFile(path)):
        answer = await serve(["x"], access=AccessRules(hosts), keys=keys).get(
            "/health", headers={"Host": "10.0.0.7:8000"}
        )
        assert (answer.status_code, answer.json()) == (200, {"status": "ok"})


@pytest.mark.parametrize(("origin", "allowed"), [(APP, True), ("https://evil.org", False), (f"{APP}.evil.org", False)])
async def test_a_page_of_an_allowed_origin_reads_answers(serve: Any, origin: str, allowed: bool) -> None:
    client = serve(lambda prompt: "x", access=AccessRules(cors_origins=(APP,)))
    wanted = {"Origin": origin, "Access-Control-Request-Method": "POST"}
    asked = {"Access-Control-Request-Headers": "authorization,content-type"}
    before = await client.options(CHAT, headers=wanted | asked)
    answer = await client.post(CHAT, json=ASKED, headers={"Origin": origin})
    assert (before.status_code, answer.status_code) == ((200, 200) if allowed else (400, 403))
    for one in (before, answer):
        assert one.headers.get("access-control-allow-origin") == (APP if allowed else None)


@pytest.mark.parametrize("origin", [APP, "http://127.0.0.1:9", "null"])
async def test_without_origins_no_page_of_another_reads_answers(client: Any, origin: str) -> None:
    for method, path in (("POST", CHAT), ("GET", "/metrics"), ("GET", "/v1/models")):
        answer = await client.request(method, path, json=ASKED, headers={"Origin": origin})
        assert answer.status_code == 403
        assert "access-control-allow-origin" not in answer.headers


async def test_head_is_answered_where_get_is(client: Any) -> None:
    for path in ("/health", "/v1/models", "/v1/models/scripted", "/metrics", "/openapi.json", "/"):
        assert (await client.head(path)).status_code == (await client.get(path)).status_code == 200


@pytest.mark.parametrize("path", ["/health/", "/v1/models/scripted/", "/v1/chat/completions/", "//evil.org/health/"])
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_a_redirect_does_not_lead_to_the_clients_host(client: Any, path: str, method: str) -> None:
    answer = await client.request(method, f"http://127.0.0.1:8000{path}", headers={"Host": "evil.org"})
    place = answer.headers.get("location", "/")
    assert place.startswith("/")
    assert not place.startswith("//")
    assert "evil.org" not in place or path.startswith("//")


async def test_an_unhandled_error_is_logged_as_500_with_its_id(
    serve: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = serve(["x"])
    monkeypatch.setattr(client.serving, "models", None)
    with caplog.at_level(logging.INFO, logger="precedent"):
        answer = await client.post(CHAT, json=ASKED, headers={"X-Request-ID": "mine-1"})
    assert (answer.status_code, answer.headers["x-request-id"]) == (500, "mine-1")
    assert answer.json()["error"]["type"] == "server_error"
    assert "NoneType" not in answer.text
    lines = [record.request for record in caplog.records if hasattr(record, "request")]
    assert [(line["status"], line["request_id"]) for line in lines] == [(500, "mine-1")]
    (failure,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert "mine-1" in failure.getMessage()


async def test_a_model_says_what_it_can_do_and_its_other_names(serve: Any) -> None:
    client = serve(lambda prompt: "x")
    engine = client.serving.models["scripted"].engine
    with closing(scripted_model_engine(lambda prompt: "x", name="other")) as other:
        named = (("desk", engine), ("alias", engine), ("other", other))
        client.serving.models = ModelPool.of({name: Served.of(name, one) for name, one in named})
        found = {one["id"]: one for one in (await client.get("/v1/models")).json()["data"]}
        metrics = (await client.get("/metrics")).text
    assert {name: one["aliases"] for name, one in found.items()} == {"desk": ["alias"], "alias": ["desk"], "other": []}
    assert {one["max_model_len"] for one in found.values()} == {engine.context_length}
    can = {"tools": True, "structured_output": True, "reasoning": False, "embeddings": True}
    assert (found["desk"]["capabilities"], found["other"]["capabilities"]["embeddings"]) == (can, False)
    assert metrics.count("vllm:num_requests_running{") == 2
