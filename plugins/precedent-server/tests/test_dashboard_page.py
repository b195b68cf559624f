"""The dashboard's page: how it is served, and what may not be in it."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from precedent.pages.colours import OTHERS, SOURCES
from precedent_server.dashboard import POLICY, assets
from precedent_server.keys import KeyFile, add_key

FILES = {name: content.decode() for name, content in assets().items()}
STYLE = FILES["style.css"]

TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css"}


def places() -> list[str]:
    return ["/", *(f"/assets/{name}" for name in FILES)]


@pytest.mark.parametrize("place", places())
async def test_files_are_sent_with_a_strict_policy(client: Any, place: str) -> None:
    answer = await client.get(place)
    assert answer.status_code == 200
    kind = "html" if place == "/" else place.rpartition(".")[2]
    assert answer.headers["content-type"] == f"{TYPES[kind]}; charset=utf-8"
    assert answer.headers["content-security-policy"] == POLICY
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert answer.text == FILES["index.html" if place == "/" else place.rpartition("/")[2]]


def test_the_policy_forbids_all_but_the_servers_own_files() -> None:
    rules = dict(rule.strip().split(" ", 1) for rule in POLICY.split(";"))
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == rules["frame-ancestors"] == "'none'"
    assert rules["script-src"] == rules["style-src"] == rules["connect-src"] == "'self'"
    assert rules["img-src"] == "'self' data:"


async def test_the_page_needs_no_key(serve: Any, path: Path) -> None:
    add_key(path, "desk", "shop")
    client = serve(["x"], keys=KeyFile(path))
    for place in places():
        answer = await client.get(place, headers={"Host": "models.example"})
        assert answer.status_code == 200


@pytest.mark.parametrize("stranger", [{"Host": "evil.example"}, {"Origin": "http://evil.example"}])
@pytest.mark.parametrize("place", ["/", "/assets/app.js"])
async def test_without_keys_the_page_is_for_this_machine(client: Any, place: str, stranger: dict[str, str]) -> None:
    assert (await client.get(place, headers=stranger)).status_code == 403


OUTSIDE = [
    "../dashboard.py",
    "..%2fdashboard.py",
    "%2e%2e/%2e%2e/engine/engine.py",
    "..%5cdashboard.py",
    "%2fetc%2fpasswd",
    "//etc/passwd",
    "app.js%00",
    "app.js/",
    "./app.js",
    "",
    "nothing.js",
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


def test_the_files_are_in_the_package() -> None:
    names = {file.name for file in files("precedent_server").joinpath("dashboard").iterdir()}
    assert {"index.html", "style.css", "app.js"} <= names == set(FILES)


FORBIDDEN = (
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|createContextualFragment|setHTML|srcdoc",
    r"\beval\b|new Function|setTimeout\(\s*[\"'`]|setInterval\(\s*[\"'`]|\bimport\(",
    r"javascript:|https?://|//[a-z0-9-]+\.[a-z]{2,}",
    r"localStorage|sessionStorage|indexedDB|document\.cookie|pushState|replaceState",
    r"\.style\b|cssText|setAttribute\(\s*[\"']style|@import|url\(",
    r"setAttribute\(\s*[\"']on",
)
"""What would make markup or code of a text, ask another server, or keep a key."""


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("forbidden", FORBIDDEN)
def test_no_file_makes_markup_of_text_or_asks_elsewhere(name: str, forbidden: str) -> None:
    assert re.findall(forbidden, FILES[name]) == []


def test_the_check_sees_what_is_forbidden() -> None:
    for source in ("box.innerHTML = x", "eval(x)", "fetch('https://x.example')", "localStorage.k = 1", "a.style.b = 1"):
        assert any(re.search(forbidden, source) for forbidden in FORBIDDEN), source


def test_the_page_has_neither_scripts_nor_styles_nor_handlers_of_its_own() -> None:
    page = FILES["index.html"]
    assert re.findall(r"<style|\sstyle=|\son\w+\s*=", page) == []
    assert re.findall(r"<script(?![^>]*\ssrc=\"/assets/)", page) == []
    assert set(re.findall(r"(?:src|href)=\"(/[^\"]*)\"", page)) <= {f"/assets/{name}" for name in FILES}


def test_every_field_has_a_label() -> None:
    page = FILES["index.html"]
    fields = re.findall(r"<(?:input|select|textarea)\b[^>]*\bid=\"([^\"]+)\"", page)
    assert len(fields) == len(re.findall(r"<(?:input|select|textarea)\b", page)) > 5
    assert set(fields) <= set(re.findall(r"<label[^>]*\bfor=\"([^\"]+)\"", page))


def colours(theme: str) -> dict[str, str]:
    return dict(re.findall(r"--([\w-]+):\s*(#[0-9a-f]{6})", theme))


LIGHT_TEXT, _, DARK_TEXT = STYLE.partition("@media (prefers-color-scheme: dark)")
LIGHT, DARK = colours(LIGHT_TEXT), colours(DARK_TEXT)

ON = [
    ("text", "paper"),
    ("text", "raised"),
    ("faint", "paper"),
    ("faint", "raised"),
    ("error", "paper"),
    ("error", "raised"),
    ("link", "paper"),
    ("on-accent", "accent"),
    *(("text", f"source-{name}") for name in SOURCES),
    *(("text", f"other-{number}") for number in range(len(OTHERS))),
]
"""Text colours and the backgrounds that they stand on."""


def luminance(colour: str) -> float:
    """Relative luminance by WCAG 2.2."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_contrast_is_computed_as_it_is_defined() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#767676", "#ffffff") == pytest.approx(4.54, abs=0.005)


@pytest.mark.parametrize("palette", [LIGHT, DARK], ids=["light", "dark"])
@pytest.mark.parametrize(("text", "ground"), ON)
def test_text_can_be_read(palette: dict[str, str], text: str, ground: str) -> None:
    assert contrast(palette[text], palette[ground]) >= 4.5


@pytest.mark.parametrize("palette", [LIGHT, DARK], ids=["light", "dark"])
def test_focus_and_edges_can_be_seen(palette: dict[str, str]) -> None:
    for name in ("accent", "edge"):
        assert min(contrast(palette[name], palette[ground]) for ground in ("paper", "raised")) >= 3


def test_both_themes_have_all_colours_and_every_source_has_the_librarys() -> None:
    assert LIGHT.keys() == DARK.keys()
    assert {name: LIGHT[f"source-{name}"] for name in SOURCES} == {name: one.page for name, one in SOURCES.items()}
    assert [LIGHT[f"other-{number}"] for number in range(len(OTHERS))] == [one.page for one in OTHERS]


def test_every_source_is_explained_in_the_librarys_words() -> None:
    for name, colour in SOURCES.items():
        assert f'["{name}", "{colour.meaning}"]' in FILES["sources.js"]
        assert f".source-{name} " in STYLE


def test_motion_and_focus_follow_the_readers_wishes() -> None:
    assert "prefers-reduced-motion" in STYLE
    assert ":focus-visible" in STYLE
    assert not re.search(r"outline:\s*(none|0)", STYLE)
