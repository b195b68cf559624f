"""Replicas without Ray: what one reads ahead, when it is healthy, whom it answers; the metrics and number of all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

pytest.importorskip("precedent_ray.settings", reason="precedent-ray is not installed")
from helpers.saved_models import saved

from precedent.cache import SpeculationCache, TenantStats
from precedent.drafters.recall.tenant_memory import cost
from precedent.engine.health import EngineHealth
from precedent.errors import CacheError
from precedent_ray.replica import Replica, StuckError, merged, read_ahead, worth_reading
from precedent_ray.scaling import QUEUE_SECONDS, Scaling
from precedent_ray.settings import Settings
from precedent_server.prometheus import metric_text, prometheus_text
from precedent_testing.embedders import HashEmbedder
from precedent_testing.pytest_plugin import EngineMaker
from precedent_testing.store_contract import completion
from precedent_testing.tiny_models import tiny_causal_lm

ASKED = {"model": "tiny", "prompt": "order 17: ", "max_tokens": 24, "temperature": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("model"), tiny_causal_lm(scale=4.0))


@pytest.fixture(autouse=True)
def _quick_embedder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("precedent.cache.speculation_cache.resolve", lambda chosen: HashEmbedder())


@pytest.fixture
def settings(folder: Path, tmp_path: Path) -> Settings:
    cache = str(tmp_path / "cache.db")
    return Settings.of({"model": f"tiny={folder}", "cache": cache, "max_replicas": 1, "stuck_seconds": 9})


@pytest.fixture
def replica(settings: Settings) -> Iterator[Replica]:
    with Replica(settings, "one") as running:
        yield running


def client(replica: Replica, **settings: Any) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app=replica.app(replica.metrics), raise_app_exceptions=False, **settings)
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000")


async def recalled(replica: Replica) -> int:
    answer = (await client(replica).post("/v1/completions", json=ASKED)).json()
    return int(answer["speculation"]["accepted_by_source"].get("recall", 0))


async def figure(replica: Replica, name: str) -> float:
    lines = (await replica.metrics()).splitlines()
    return float(next(line for line in lines if line.startswith(f"{name} ")).rpartition(" ")[2])


async def test_a_new_replica_drafts_from_the_shared_memory_at_its_first_request(settings: Settings) -> None:
    with Replica(settings, "one") as first:
        assert await recalled(first) == 0
        assert await figure(first, "precedent:tenants_read_ahead") == 0
    with Replica(settings, "two") as second:
        assert await figure(second, "precedent:tenants_read_ahead") == 1
        assert await figure(second, "precedent:completions_in_memory") == 1
        assert await recalled(second) > 0


async def test_what_is_forgotten_elsewhere_leaves_its_memory_without_a_request(settings: Settings) -> None:
    with Replica(settings, "one") as first:
        await recalled(first)
    with Replica(settings, "two") as second:
        following = second._serving.following
        assert following is not None
        following.close()  # here a test looks in its place
        with SpeculationCache.open(settings.cache, embedder=HashEmbedder()) as elsewhere:
            assert elsewhere.forget(tenant="default") == 1
        following.look()
        assert await figure(second, "precedent:completions_in_memory") == 0


@pytest.mark.parametrize("reason", ["", "3 of the 4 requests of the last minute ended in internal errors"])
async def test_it_is_as_healthy_as_its_engines(replica: Replica, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (served,) = replica._serving.models.values()
    given = list[float]()

    def health(stalled_seconds: float) -> EngineHealth:
        given.append(stalled_seconds)
        return EngineHealth(reason, degraded=("recall",))

    monkeypatch.setattr(served.engine, "health", health)
    with pytest.raises(StuckError, match=f"'tiny': {reason}") if reason else nullcontext():
        replica.check_health()
    assert given == [9], "stuck_seconds"


async def test_the_autoscaler_learns_how_long_requests_wait(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    (served,) = replica._serving.models.values()
    monkeypatch.setattr(served.engine, "longest_wait", lambda: 5.0)
    assert replica.load() == {QUEUE_SECONDS: 5.0}


async def test_without_keys_another_machine_is_refused(replica: Replica) -> None:
    """Whatever host it names."""
    assert (await client(replica).get("/v1/models")).status_code == 200
    refused = await client(replica, client=("203.0.113.9", 1234)).get("/v1/models")
    assert (refused.status_code, refused.json()["error"]["type"]) == (403, "permission_error")


def test_tenants_that_saved_most_are_read_first_as_far_as_they_fit() -> None:
    tenants = [TenantStats(name, 10, tokens, 0, 0, accepted, 0) for name, tokens, accepted in
               (("new", 500, 0), ("busy", 300, 90), ("large", 9000, 50))]  # fmt: skip
    assert list(worth_reading(tenants, 10**9)) == ["busy", "large", "new"]
    assert list(worth_reading(tenants, cost(10, 300) + cost(10, 9000))) == ["busy", "large"]
    assert list(worth_reading(tenants, cost(10, 299))) == []


class Away:
    """A cache whose store is away."""

    max_index_bytes = 1

    def stats(self) -> Any:
        raise CacheError("the server is away")


def test_a_store_that_is_away_keeps_no_replica_from_starting(caplog: pytest.LogCaptureFixture) -> None:
    assert read_ahead([], Away(), 60) == 0  # type: ignore[arg-type]
    assert "read with the first requests" in caplog.text


class Recorded:
    """An engine that notes which tenants it reads."""

    def __init__(self) -> None:
        self.recall, self.tenants = self, list[str]()

    def read_ahead(self, tenant: str) -> None:
        self.tenants.append(tenant)


def test_reading_ends_in_time(tmp_path: Path) -> None:
    ticks = iter([0.0, 5.0, 11.0])
    with SpeculationCache.open(tmp_path / "cache", embedder=HashEmbedder()) as cache:
        for number, tenant in enumerate(("a", "b", "c")):
            cache.insert(completion(number, tenant=tenant))
        engine = Recorded()
        assert read_ahead([engine], cache, 10, clock=lambda: next(ticks)) == 1  # type: ignore[list-item]
    assert engine.tenants == ["a"]


# Metrics of all replicas, and how many are wanted


def test_every_series_says_its_replica_and_every_name_is_described_once(precedent_engine: EngineMaker) -> None:
    text = prometheus_text([precedent_engine(lambda prompt: "x")]) + metric_text(
        "precedent:own", "gauge", "Its own.", 3.0
    )
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


@pytest.mark.parametrize(
    ("current", "requests", "waits", "wanted"),
    [(0, 0, {}, 1), (3, 32, {"a": 2.0}, 2), (3, 33, {}, 3), (3, 33, {"a": 0.0, "b": 2.1}, 4), (2, 100, {"a": 9.0}, 7)],
)
def test_enough_replicas_for_the_requests_and_one_more_for_a_long_queue(
    current: int, requests: float, waits: dict[str, float], wanted: int
) -> None:
    for metrics in ({QUEUE_SECONDS: waits}, *([] if waits else [None])):
        now = SimpleNamespace(current_num_replicas=current, total_num_requests=requests, aggregated_metrics=metrics)
        assert Scaling(16, 2.0)(now) == (wanted, {})
