"""Whose request it is, as the proxy sees it."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("precedent_ray.settings", reason="precedent-ray is not installed")
from precedent_ray.tenants import scope_of, tenant_of
from precedent_server.keys import KeyFile, add_key


class Sent:
    """Stands for what Ray's proxy sends to a replica."""

    def __init__(self, scope: dict[str, Any]) -> None:
        self.asgi_scope = scope


def scope(**headers: str) -> dict[str, Any]:
    named = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http", "path": "/", "headers": [(b"host", b"127.0.0.1"), *named]}


@pytest.fixture
def keys(tmp_path: Path) -> tuple[KeyFile, dict[str, str]]:
    owners = (("desk", "shop"), ("night", "shop"), ("lab", "clinic"))
    found = {name: add_key(tmp_path / "keys.json", name, tenant) for name, tenant in owners}
    return KeyFile(tmp_path / "keys.json"), found


def test_the_key_says_the_tenant_and_nothing_else_does(keys: tuple[KeyFile, dict[str, str]]) -> None:
    file, found = keys
    for name, tenant in (("desk", "shop"), ("night", "shop"), ("lab", "clinic")):
        asked = scope(authorization=f"Bearer {found[name]}", x_session_id="clinic", x_tenant="clinic")
        assert tenant_of(asked, file) == tenant


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer pk-wrong"}, {"authorization": "Basic x"}])
def test_a_request_that_will_be_refused_has_no_tenant(
    keys: tuple[KeyFile, dict[str, str]], headers: dict[str, str]
) -> None:
    assert tenant_of(scope(x_session_id="shop", **headers), keys[0]) is None


def test_without_keys_this_machine_is_one_tenant() -> None:
    assert tenant_of(scope(x_session_id="shop"), None) == "default"
    assert tenant_of({**scope(), "headers": [(b"host", b"elsewhere")]}, None) is None


def test_the_scope_is_read_from_what_the_proxy_sends() -> None:
    asked = scope()
    assert scope_of([pickle.dumps(Sent(asked))]) == asked
    assert scope_of([]) is None
    assert scope_of(["a call of another deployment"]) is None
    assert scope_of([pickle.dumps(Sent({"type": "websocket"}))]) is None
    assert scope_of([pickle.dumps({"no": "request"})]) is None
