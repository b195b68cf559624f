"""One text of metrics for all replicas, and how many replicas are wanted."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

pytest.importorskip("precedent_ray.settings", reason="precedent-ray is not installed")
from hypothesis import given
from hypothesis import strategies as st

from precedent_ray.merging import merged
from precedent_ray.replica import gauges
from precedent_ray.scaling import QUEUE_SECONDS, Scaling
from precedent_server.prometheus import prometheus_text
from precedent_testing.pytest_plugin import EngineMaker


def test_every_series_says_its_replica_and_every_name_is_described_once(precedent_engine: EngineMaker) -> None:
    text = prometheus_text([precedent_engine(lambda prompt: "x")]) + gauges({"precedent:own": (3.0, "Its own.")})
    found = merged({"a": text, "b": text}).splitlines()
    series = [line for line in text.splitlines() if not line.startswith("#")]
    assert [line for line in found if line.startswith("#")] == [line for line in text.splitlines() if line[0] == "#"]
    assert len([line for line in found if not line.startswith("#")]) == 2 * len(series)
    assert 'precedent:own{replica="b"} 3.0' in found
    for line in series:
        assert line in {one.replace('replica="a",', "").replace('{replica="a"}', "") for one in found}


def test_series_of_a_name_stand_together_below_their_head() -> None:
    """As the format asks: a name's lines must be one group."""
    text = '# HELP up Up.\n# TYPE up gauge\nup{x="1"} 1\nup{x="2"} 2\n# HELP z Z.\n# TYPE z counter\nz 0\n'
    names = [
        line.split(" ")[2] if line[0] == "#" else line.partition("{")[0]
        for line in merged({"b": text, "a": text}).splitlines()
    ]
    assert names == ["up"] * 6 + ["z"] * 4


def test_no_replica_tells_nothing() -> None:
    assert merged({}) == ""


@dataclass
class Now:
    current_num_replicas: int
    total_num_requests: float
    aggregated_metrics: dict[str, dict[str, float]] | None = field(default_factory=dict)


@given(current=st.integers(0, 50), requests=st.floats(0, 5000), waits=st.lists(st.floats(0, 100), max_size=4))
def test_enough_replicas_for_the_requests_and_one_more_for_a_long_queue(
    current: int, requests: float, waits: list[float]
) -> None:
    metrics = {QUEUE_SECONDS: dict(zip("abcd", waits, strict=False))}
    wanted, state = Scaling(16, 2.0)(Now(current, requests, metrics))
    assert state == {}
    assert wanted >= 1
    assert wanted * 16 >= requests
    if max(waits, default=0) > 2.0:
        assert wanted >= current + 1
    else:
        assert (wanted - 1) * 16 < max(requests, 1)


def test_replicas_that_told_nothing_yet_count_by_requests_alone() -> None:
    assert Scaling(4, 1.0)(Now(1, 9, None)) == (3, {})
