"""What the dashboard's page asks for: figures, completions of the caller's own tenant, and forgetting them."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from precedent.cache import SpeculationCache
from precedent.errors import CacheError
from precedent_server.dashboard import MOST_FORGOTTEN, MOST_LISTED, MOST_SKIPPED
from precedent_server.keys import KeyFile, add_key

ROLES = {"use": "shop", "read-cache": "shop", "admin": "shop", "rival": "rival"}
"""Keys by name, with their tenants; the name is the role, and the rival is an administrator."""

Headers = dict[str, dict[str, str]]


def echo(prompt: str) -> str:
    """The script's answer: the last thing the user said."""
    return "You said: " + prompt.rpartition("user\n")[2].partition("<")[0].strip()


@pytest.fixture
def headers(path: Path) -> Headers:
    keys = {name: add_key(path, name, tenant, "admin" if name == "rival" else name) for name, tenant in ROLES.items()}
    return {name: {"Authorization": f"Bearer {key}"} for name, key in keys.items()}


@pytest.fixture
def keyed(serve: Any, path: Path, headers: Headers) -> Any:
    return serve(echo, keys=KeyFile(path), kept_steps=4)


async def say(client: Any, text: str, headers: dict[str, str] | None = None, **more: Any) -> str:
    body = {"model": "scripted", "messages": [{"role": "user", "content": text}], "temperature": 0, **more}
    answer = await client.post("/v1/chat/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


async def listed(client: Any, headers: dict[str, str] | None = None, **params: Any) -> dict[str, Any]:
    answer = await client.get("/dashboard/completions", params=params, headers=headers)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def forget(client: Any, ids: Any, headers: dict[str, str] | None = None) -> Any:
    return await client.post("/dashboard/forget", json={"ids": ids}, headers=headers)


async def test_completions_are_found_and_leafed_through(serve: Any) -> None:
    client = serve(echo)
    said = [await say(client, f"{name} please") for name in ("apples", "Pears", "plums")]
    everything = await listed(client)
    assert [one["text"] for one in everything["completions"]] == said[::-1]
    assert not everything["more"]
    first, rest = await listed(client, limit=2), await listed(client, limit=2, offset=2)
    assert (first["more"], rest["more"]) == (True, False)
    assert first["completions"] + rest["completions"] == everything["completions"]
    (found,) = (await listed(client, query="pEARS"))["completions"]
    assert "Pears please" in found["query"]
    assert found["num_tokens"] > 0
    assert "token_ids" not in found


async def test_a_forgotten_completion_is_gone(serve: Any) -> None:
    client = serve(echo)
    for name in ("apples", "pears"):
        await say(client, name)
    newest, oldest = [one["id"] for one in (await listed(client))["completions"]]
    answer = await forget(client, [oldest, 10**6])
    assert answer.json() == {"forgotten": 1}
    assert [one["id"] for one in (await listed(client))["completions"]] == [newest]


async def test_tenants_neither_see_nor_forget_each_others(keyed: Any, headers: Headers) -> None:
    await say(keyed, "our secret", headers["use"])
    ours = (await listed(keyed, headers["read-cache"]))["completions"]
    assert len(ours) == 1
    for params in ({}, {"query": "secret"}, {"query": "secret", "tenant": "shop"}):
        assert (await listed(keyed, headers["rival"], **params))["completions"] == []
    assert (await forget(keyed, [ours[0]["id"]], headers["rival"])).json() == {"forgotten": 0}
    assert (await listed(keyed, headers["read-cache"]))["completions"] == ours
    assert (await forget(keyed, [ours[0]["id"]], headers["admin"])).json() == {"forgotten": 1}


NEEDED = {
    "/dashboard/figures": "admin",
    "/dashboard/completions": "read-cache",
    "/dashboard/forget": "admin",
    "/dashboard/steps": "admin",
}


@pytest.mark.parametrize("place", NEEDED)
async def test_roles(keyed: Any, headers: Headers, place: str) -> None:
    async def status(of: dict[str, str] | None) -> int:
        if place.endswith("forget"):
            return int((await forget(keyed, [1], of)).status_code)
        return int((await keyed.get(place, headers=of)).status_code)

    names = ["use", "read-cache", "admin"]
    allowed = names[names.index(NEEDED[place]) :]
    assert [await status(headers[name]) for name in names] == [200 if name in allowed else 403 for name in names]
    assert await status(None) == await status({"Authorization": "Bearer pk-wrong"}) == 401


@pytest.mark.parametrize("place", NEEDED)
@pytest.mark.parametrize("stranger", [{"Host": "evil.example"}, {"Origin": "http://evil.example"}])
async def test_without_keys_only_this_machine_may_ask(client: Any, place: str, stranger: dict[str, str]) -> None:
    method = "POST" if place.endswith("forget") else "GET"
    answer = await client.request(method, place, headers=stranger, json={"ids": [1]})
    assert answer.status_code == 403


async def test_figures_add_up(serve: Any) -> None:
    begun = monotonic()
    client = serve(echo)
    await say(client, "x", prediction={"type": "content", "content": "You said: x"})
    await say(client, "x", speculation=False)
    answer = await client.get("/dashboard/figures")
    found = answer.json()
    model = found["models"]["scripted"]
    assert (model["num_requests_finished"], model["num_requests_running"], found["queued"]) == (2, 0, 0)
    assert sum(model["accepted_by_source"].values()) == model["num_accepted_tokens"] > 0
    assert model["accepted_by_source"]["prediction"] > 0
    assert model["tokens_per_step"] == round(model["generation_tokens"] / model["num_request_steps"], 3) > 1
    assert set(model["time_to_first_token_seconds"]) == {"p50", "p95"}
    later = (await client.get("/dashboard/figures")).json()["seconds"]
    assert 0 < found["seconds"] < later <= monotonic() - begun
    assert answer.headers["cache-control"] == "no-store"


async def test_figures_before_the_first_request(serve: Any) -> None:
    found = (await serve(echo).get("/dashboard/figures")).json()["models"]["scripted"]
    assert (found["tokens_per_step"], found["generation_tokens"], found["decode_seconds_saved"]) == (None, 0, 0)


LISTINGS = [
    ({"limit": 0}, "limit"),
    ({"limit": MOST_LISTED + 1}, "limit"),
    ({"limit": "²"}, "limit"),
    ({"limit": "9" * 5000}, "limit"),
    ({"offset": -1}, "offset"),
    ({"offset": MOST_SKIPPED + 1}, "offset"),
    ({"query": "x" * 1001}, "query"),
]


@pytest.mark.parametrize(("params", "param"), LISTINGS, ids=[str(i) for i in range(len(LISTINGS))])
async def test_listings_that_are_refused(client: Any, params: Any, param: str) -> None:
    answer = await client.get("/dashboard/completions", params=params)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


FORGETTINGS: list[tuple[Any, str | None]] = [
    ({}, "ids"),
    ({"ids": []}, "ids"),
    ({"ids": 1}, "ids"),
    ({"ids": [True]}, "ids"),
    ({"ids": ["1"]}, "ids"),
    ({"ids": [0]}, "ids"),
    ({"ids": [2**63]}, "ids"),
    ({"ids": [1] * (MOST_FORGOTTEN + 1)}, "ids"),
    ({"ids": [1], "tenant": "other"}, "tenant"),
    ({"ids": [1], "model": 1}, "model"),
    ([1], None),
]


@pytest.mark.parametrize(("body", "param"), FORGETTINGS, ids=[str(i) for i in range(len(FORGETTINGS))])
async def test_what_cannot_be_forgotten_is_refused(client: Any, body: Any, param: str | None) -> None:
    await say(client, "stays")
    answer = await client.post("/dashboard/forget", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert len((await listed(client))["completions"]) == 1


async def test_another_model_is_a_404(client: Any) -> None:
    answer = await client.get("/dashboard/completions", params={"model": "other"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


async def test_a_failed_forget_says_so_without_naming_files(
    client: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(self: SpeculationCache, **selection: Any) -> int:
        raise CacheError("/srv/cache/completions.db is read-only") from sqlite3.OperationalError()

    monkeypatch.setattr(SpeculationCache, "forget", refuse)
    answer = await forget(client, [1])
    assert (answer.status_code, "/srv" in answer.text) == (409, False)
    assert "/srv/cache" in caplog.text
