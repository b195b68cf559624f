"""Where a request goes: whose it is, as the proxy sees it, which replica a tenant prefers, and when it moves on."""

from __future__ import annotations

import math
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("precedent_ray.settings", reason="precedent-ray is not installed")
from hypothesis import given
from hypothesis import strategies as st

from precedent_ray.routing import SLACK, preferred, scope_of, tenant_of, with_room
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


NAMES = st.lists(st.text(max_size=8), min_size=1, max_size=12, unique=True)
LOADS = st.dictionaries(st.integers(0, 11), st.integers(0, 40))


@given(key=st.text(), replicas=NAMES, data=st.data())
def test_the_order_depends_on_names_alone(key: str, replicas: list[str], data: st.DataObject) -> None:
    shuffled = data.draw(st.permutations(replicas))
    assert preferred(key, shuffled) == preferred(key, replicas)
    assert sorted(preferred(key, replicas)) == sorted(replicas)


@given(key=st.text(), replicas=NAMES, data=st.data())
def test_a_replica_that_leaves_moves_its_own_keys_only(key: str, replicas: list[str], data: st.DataObject) -> None:
    gone = data.draw(st.sampled_from(replicas))
    assert preferred(key, set(replicas) - {gone}) == [one for one in preferred(key, replicas) if one != gone]


def test_keys_are_spread_evenly() -> None:
    replicas = [f"replica-{number}" for number in range(10)]
    firsts = Counter(preferred(f"tenant-{number}", replicas)[0] for number in range(10_000))
    assert set(firsts) == set(replicas)
    assert max(firsts.values()) < 1.15 * 1000  # five standard deviations


@given(loads=LOADS, number=st.integers(1, 12), spread_from=st.integers(1, 30))
def test_the_first_has_room_and_none_before_it_had(loads: dict[int, int], number: int, spread_from: int) -> None:
    order = [str(place) for place in range(number)]
    load = {str(place): held for place, held in loads.items()}
    found = with_room(order, load, spread_from=spread_from)
    held = [load.get(name, 0) for name in order]
    most = max(spread_from, math.ceil(SLACK * (sum(held) + 1) / number))
    assert sorted(found) == sorted(order)
    assert found[0] == next(name for name, count in zip(order, held, strict=True) if count < most)


def test_a_tenant_stays_where_it_is_below_the_bound_and_spreads_above_it() -> None:
    order = ["a", "b", "c"]
    assert with_room(order, {"a": 7}, spread_from=8) == order
    assert with_room(order, {"a": 8}, spread_from=8) == ["b", "c", "a"]
    assert with_room(order, {"a": 8, "b": 9, "c": 8}, spread_from=8) == order  # everybody is busy: stay
    assert with_room([], {}, spread_from=1) == []
