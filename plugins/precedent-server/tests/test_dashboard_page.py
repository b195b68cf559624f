"""The dashboard's page: how it is served, and what may not be in it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from precedent.pages.colours import OTHERS, SOURCES
from precedent_server.dashboard import POLICY, assets
from precedent_server.keys import KeyFile, add_key

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


def test_the_policy_forbids_all_but_the_servers_own_files() -> None:
    rules = dict(rule.strip().split(" ", 1) for rule in POLICY.split(";"))
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == rules["frame-ancestors"] == "'none'"
    assert rules["script-src"] == rules["style-src"] == rules["connect-src"] == "'self'"
    assert rules["img-src"] == "'self' data:"


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
