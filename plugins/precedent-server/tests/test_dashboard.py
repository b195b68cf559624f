"""The dashboard: what its page asks for, each tenant its own, how the page is served, and what may not be in it."""

from __future__ import annotations

import re
import sqlite3
from pathlib import Path
from typing import Any
from urllib.parse import unquote
from xml.etree import ElementTree

import pytest

from precedent.cache import SpeculationCache
from precedent.errors import CacheError
from precedent.pages.colours import OTHERS, SOURCES
from precedent_server.dashboard import MOST_FORGOTTEN, MOST_LISTED, MOST_SKIPPED, POLICY, assets
from precedent_server.keys import KeyFile, add_key

ROLES = {"use": "shop", "read-cache": "shop", "admin": "shop", "rival": "rival"}
"""Keys by name, with their tenants; the name is the role, and the rival is an administrator."""

NEEDED = {
    "/dashboard/figures": "admin",
    "/dashboard/completions": "read-cache",
    "/dashboard/forget": "admin",
    "/dashboard/steps": "admin",
}
ANSWER = "Order 1042 was sent on Monday."
Headers = dict[str, dict[str, str]]


def echo(prompt: str) -> str:
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


async def test_completions_are_found_leafed_through_and_forgotten(serve: Any) -> None:
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
    assert (await forget(client, [found["id"], 10**6])).json() == {"forgotten": 1}
    assert [one["text"] for one in (await listed(client))["completions"]] == [said[2], said[0]]


async def test_tenants_neither_see_nor_forget_each_others(keyed: Any, headers: Headers) -> None:
    await say(keyed, "our secret", headers["use"])
    ours = (await listed(keyed, headers["read-cache"]))["completions"]
    assert len(ours) == 1
    for params in ({}, {"query": "secret"}, {"query": "secret", "tenant": "shop"}):
        assert (await listed(keyed, headers["rival"], **params))["completions"] == []
    assert (await forget(keyed, [ours[0]["id"]], headers["rival"])).json() == {"forgotten": 0}
    assert (await listed(keyed, headers["read-cache"]))["completions"] == ours
    assert (await forget(keyed, [ours[0]["id"]], headers["admin"])).json() == {"forgotten": 1}


@pytest.mark.parametrize("place", NEEDED)
async def test_roles_and_without_keys_only_this_machine(keyed: Any, client: Any, headers: Headers, place: str) -> None:
    async def status(asked: Any, of: dict[str, str] | None) -> int:
        if place.endswith("forget"):
            return int((await forget(asked, [1], of)).status_code)
        return int((await asked.get(place, headers=of)).status_code)

    names = ["use", "read-cache", "admin"]
    allowed = names[names.index(NEEDED[place]) :]
    assert [await status(keyed, headers[name]) for name in names] == [200 if name in allowed else 403 for name in names]
    assert await status(keyed, None) == await status(keyed, {"Authorization": "Bearer pk-wrong"}) == 401
    for stranger in ({"Host": "evil.example"}, {"Origin": "http://evil.example"}):
        assert await status(client, stranger) == 403


async def test_figures_add_up(serve: Any) -> None:
    client = serve(echo)
    before = (await client.get("/dashboard/figures")).json()
    assert before["models"]["scripted"]["tokens_per_step"] is None
    await say(client, "x", prediction={"type": "content", "content": "You said: x"})
    answer = await client.get("/dashboard/figures")
    found, model = answer.json(), answer.json()["models"]["scripted"]
    assert (model["num_requests_finished"], model["num_requests_running"], found["queued"]) == (1, 0, 0)
    assert sum(model["accepted_by_source"].values()) == model["num_accepted_tokens"] > 0
    assert model["tokens_per_step"] == round(model["generation_tokens"] / model["num_request_steps"], 3) > 1
    assert set(model["time_to_first_token_seconds"]) == {"p50", "p95"}
    assert 0 < before["seconds"] < found["seconds"]
    assert answer.headers["cache-control"] == "no-store"


BAD_LISTS: list[dict[str, Any]] = [
    *({"limit": wrong} for wrong in (0, MOST_LISTED + 1, "²", "9" * 5000)),
    *({"offset": wrong} for wrong in (-1, MOST_SKIPPED + 1)),
    {"query": "x" * 1001},
    {"model": "other"},
]
BAD_FORGETTINGS: list[tuple[Any, str | None]] = [
    *(({"ids": wrong}, "ids") for wrong in ([], 1, [True], ["1"], [0], [2**63], [1] * (MOST_FORGOTTEN + 1))),
    ({}, "ids"),
    ({"ids": [1], "tenant": "other"}, "tenant"),
    ({"ids": [1], "model": 1}, "model"),
    ([1], None),
]


async def test_what_cannot_be_listed_or_forgotten_is_refused(serve: Any) -> None:
    client = serve(echo)
    await say(client, "stays")
    for params in BAD_LISTS:
        answer, (param,) = await client.get("/dashboard/completions", params=params), params
        assert (answer.status_code, answer.json()["error"]["param"]) == (404 if param == "model" else 400, param)
    for body, wrong in BAD_FORGETTINGS:
        answer = await client.post("/dashboard/forget", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, wrong)
    assert len((await listed(client))["completions"]) == 1


async def test_a_failed_forget_says_so_without_naming_files(
    client: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(self: SpeculationCache, **selection: Any) -> int:
        raise CacheError("/srv/cache/completions.db is read-only") from sqlite3.OperationalError()

    monkeypatch.setattr(SpeculationCache, "forget", refuse)
    answer = await forget(client, [1])
    assert (answer.status_code, "/srv" in answer.text) == (409, False)
    assert "/srv/cache" in caplog.text


@pytest.mark.parametrize("text", [ANSWER, "<script>alert(1)</script> & more"])
async def test_the_last_steps_retell_the_answer(serve: Any, text: str) -> None:
    client = serve(lambda prompt: text, kept_steps=2)
    for _ in range(2):
        await say(client, "Where?", max_tokens=100)
    steps = (await client.get("/dashboard/steps", params={"model": "scripted"})).json()["steps"]
    assert len(steps) == 2 < steps[0]["number"] == steps[1]["number"] + 1
    newest = steps[0]
    accepted = [node for node in newest["nodes"] if node["accepted"]]
    assert len(accepted) == newest["num_accepted"] > 3
    assert "".join(node["text"] for node in accepted) in text + "<|im_end|>"
    assert {node["sources"][0] for node in accepted} == {"recall"}
    for node in newest["nodes"]:
        above = 1.0 if node["parent"] < 0 else newest["nodes"][node["parent"]]["path_probability"]
        assert node["path_probability"] == pytest.approx(above * node["estimate"], abs=2e-4)
    drawn = "".join(ElementTree.fromstring(newest["picture"]).itertext())
    assert "".join(node["text"] for node in accepted)[:20].replace(" ", "·") in drawn


# The page

FILES = {name: content.decode() for name, content in assets().items()}
PAGE, STYLE = FILES["index.html"], FILES["style.css"]
TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css"}
PLACES = {"/": "index.html", **{f"/assets/{name}": name for name in FILES}}


async def test_files_are_sent_with_a_strict_policy_and_without_a_key(serve: Any, path: Path) -> None:
    add_key(path, "desk", "shop")
    client = serve(["x"], keys=KeyFile(path))
    for place, name in PLACES.items():
        answer = await client.get(place, headers={"Host": "models.example"})
        assert (answer.status_code, answer.text) == (200, FILES[name])
        assert answer.headers["content-type"] == f"{TYPES[name.rpartition('.')[2]]}; charset=utf-8"
        assert answer.headers["content-security-policy"] == POLICY
        assert (answer.headers["x-content-type-options"], answer.headers["referrer-policy"]) == (
            *("nosniff", "no-referrer"),
        )


@pytest.mark.parametrize("stranger", [{"Host": "evil.example"}, {"Origin": "http://evil.example"}])
@pytest.mark.parametrize("place", ["/", "/assets/app.js"])
async def test_without_keys_the_page_is_for_this_machine(client: Any, place: str, stranger: dict[str, str]) -> None:
    assert (await client.get(place, headers=stranger)).status_code == 403


OUTSIDE = [
    *("../dashboard.py", "..%2fdashboard.py", "%2e%2e/%2e%2e/engine/engine.py", "..%5cdashboard.py", "%2fetc%2fpasswd"),
    *("//etc/passwd", "app.js%00", "app.js/", "./app.js", "", "nothing.js"),
]


@pytest.mark.parametrize("name", OUTSIDE)
async def test_nothing_but_the_pages_own_files_is_sent(client: Any, name: str) -> None:
    """The path goes to the server as it stands: a client of HTTP would tidy it up."""
    sent = list[dict[str, Any]]()
    scope = {
        "type": "http", "method": "GET", "path": "/assets/" + unquote(name), "raw_path": f"/assets/{name}".encode(),
        "query_string": b"", "headers": [(b"host", b"127.0.0.1")], "http_version": "1.1", "scheme": "http",
        "server": ("127.0.0.1", 80), "client": ("127.0.0.1", 1), "root_path": "",
    }  # fmt: skip

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(dict(message))

    await client.app(scope, receive, send)
    assert sent[0]["status"] == 404
    assert b"import" not in b"".join(message.get("body", b"") for message in sent)


FORBIDDEN = (
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|createContextualFragment|setHTML|srcdoc",
    r"\beval\b|new Function|setTimeout\(\s*[\"'`]|setInterval\(\s*[\"'`]|\bimport\(",
    r"javascript:|https?://|//[a-z0-9-]+\.[a-z]{2,}",
    r"localStorage|sessionStorage|indexedDB|document\.cookie|pushState|replaceState",
    r"\.style\b|cssText|setAttribute\(\s*[\"']style|@import|url\(|setAttribute\(\s*[\"']on",
    r"<style|\sstyle=|\son\w+\s*=\s*\"|<script(?![^>]*\ssrc=\"/assets/)",
)
"""What would make markup or code of a text, ask another server, or keep a key; and what the policy would stop."""


def test_no_file_makes_markup_of_text_or_asks_elsewhere() -> None:
    for forbidden in FORBIDDEN:
        assert [name for name, text in FILES.items() if re.search(forbidden, text)] == []
    for source in ("box.innerHTML = x", "eval(x)", "fetch('https://x.example')", "localStorage.k = 1", "a.style.b = 1"):
        assert any(re.search(forbidden, source) for forbidden in FORBIDDEN), source
    assert set(re.findall(r"(?:src|href)=\"(/[^\"]*)\"", PAGE)) <= PLACES.keys()


def test_every_source_is_coloured_and_explained_as_in_the_library() -> None:
    themes = STYLE.split("@media (prefers-color-scheme: dark)")
    light, dark = (dict(re.findall(r"--([\w-]+):\s*(#[0-9a-f]{6})", theme)) for theme in themes)
    assert light.keys() == dark.keys()
    for name, colour in SOURCES.items():
        assert light[f"source-{name}"] == colour.page
        assert f'["{name}", "{colour.meaning}"]' in FILES["sources.js"]
        assert f".source-{name} " in STYLE
    assert [light[f"other-{number}"] for number in range(len(OTHERS))] == [one.page for one in OTHERS]
