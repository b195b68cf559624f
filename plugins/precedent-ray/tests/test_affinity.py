"""Which replica a key prefers, and when it moves on."""

from __future__ import annotations

import math
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from precedent_ray.affinity import SLACK, preferred, with_room

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


def test_nothing_to_choose_from() -> None:
    assert with_room([], {}, spread_from=1) == []
