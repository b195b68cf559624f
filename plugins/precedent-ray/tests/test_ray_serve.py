"""Replicas on a real Ray that share a real PostgreSQL: make test-ray.

What is compared comes from plain decoding of the same model in float64, where nothing can tip. The tests of this file
run in their order, on one cluster: each finds replicas and store as the ones before left them.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import openai
import psutil
import pytest
from pytest_socket import enable_socket

pytest.importorskip("ray.serve", reason="make test-ray installs Ray in an environment of its own")

from helpers.ray_cluster import MODEL, Plain, RayCluster, Told, ask, prompt, traffic, until
from helpers.saved_models import saved

from precedent.cache import SpeculationCache
from precedent.engine.engine import Engine
from precedent_postgres.testing import TemporaryServer, why_not
from precedent_ray.routing import preferred
from precedent_server.keys import add_key
from precedent_testing.tiny_models import tiny_causal_lm

pytestmark = pytest.mark.ray

TENANTS = tuple(f"tenant-{number}" for number in range(8))
ANSWERED = "vllm:request_success_total"
HELD = "precedent:completions_in_memory"
AHEAD = "precedent:tenants_read_ahead"


@pytest.fixture(autouse=True)
def _sockets() -> None:
    """Only the loopback address is used."""
    enable_socket()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ray")


@pytest.fixture(scope="module")
def folder(place: Path) -> Path:
    return saved(place / "model", tiny_causal_lm(scale=4.0))


@pytest.fixture(scope="module")
def plain(folder: Path) -> Iterator[Plain]:
    with closing(Engine.load(str(folder))) as engine:
        yield Plain(engine)


@pytest.fixture(scope="module")
def database() -> Iterator[TemporaryServer]:
    assert why_not() is None, why_not()
    with TemporaryServer() as running:
        yield running


@pytest.fixture(scope="module")
def keys(place: Path) -> dict[str, str]:
    return {tenant: add_key(place / "keys.json", f"key-{tenant}", tenant) for tenant in TENANTS}


@pytest.fixture(scope="module")
def settings(folder: Path, database: TemporaryServer, place: Path, keys: dict[str, str]) -> dict[str, object]:
    shared = {"cache": database.url, "api_keys": place / "keys.json", "num_cpus": 0.5, "grace_seconds": 20}
    return {"model": f"{MODEL}={folder}", "min_replicas": 2, "max_replicas": 2, **shared}


@pytest.fixture(scope="module")
def cluster(place: Path, settings: dict[str, object]) -> Iterator[RayCluster]:
    enable_socket()
    with RayCluster(place / "log") as running:
        running.deploy(**settings)
        yield running


def by_replica(cluster: RayCluster, key: str, name: str) -> Counter[str]:
    return Counter({replica: int(found[name]) for replica, found in cluster.figures(key).items()})


def test_200_streams_of_8_tenants_are_those_of_plain_decoding_and_tenants_stay_put(
    cluster: RayCluster, keys: dict[str, str], plain: Plain
) -> None:
    """Every request names a random session, which changes nothing."""
    key = keys[TENANTS[0]]
    before = by_replica(cluster, key, ANSWERED)
    told = traffic(cluster, keys, range(25), plain)
    assert (len(told.answered), told.wrong, told.errors) == (200, [], [])
    answered = by_replica(cluster, key, ANSWERED) - before
    homes = Counter(preferred(f"tenant {tenant}", before)[0] for tenant in TENANTS)
    assert answered == Counter({replica: 25 * number for replica, number in homes.items()})
    again = traffic(cluster, keys, range(5), plain)
    assert again.wrong == []
    assert again.recalled > 0.5 * 40 * 20


def test_what_one_replica_stores_is_drafted_by_another(
    cluster: RayCluster, keys: dict[str, str], plain: Plain, database: TemporaryServer
) -> None:
    """A killed replica's tenants go to the other one, which was never asked for them and has read what they stored."""
    key = keys[TENANTS[0]]
    ours = {TENANTS[0]: key}
    assert traffic(cluster, ours, range(100, 105), plain).errors == []
    (home, _) = preferred(f"tenant {TENANTS[0]}", by_replica(cluster, key, ANSWERED))
    pid = pid_of(cluster, home)
    os.kill(pid, signal.SIGKILL)
    told = traffic(cluster, ours, range(100, 105), plain)
    assert told.wrong == []
    assert told.recalled > 0.5 * 5 * 20
    until(lambda: len(cluster.figures(key)) == 2, "a replica in the place of the killed one")


def pid_of(cluster: RayCluster, replica: str) -> int:
    """The process of a replica, whose log file is named after it."""
    for pid in cluster.replicas():
        if any(replica in file.path for file in psutil.Process(pid).open_files()):
            return pid
    raise AssertionError(f"no process of replica {replica!r}")


def test_a_replica_killed_in_the_middle_loses_nothing_that_was_acknowledged(
    cluster: RayCluster, keys: dict[str, str], plain: Plain, database: TemporaryServer
) -> None:
    """The others go on; cut streams end in errors that a client's retry heals; each answer that was whole is stored."""
    cut: list[openai.APIError] = []

    def kill_one(told: Told) -> None:
        until(lambda: len(told.answered) >= 20, "the first answers")
        cut.append(cut_stream(cluster, TENANTS[0], keys[TENANTS[0]]))

    told = traffic(cluster, keys, range(200, 210), plain, meanwhile=kill_one, tokens=96)
    assert (len(told.answered), told.wrong) == (80, [])
    assert set(told.kinds) <= {"replica_lost", "InternalServerError"}, told.kinds
    assert [error.code for error in cut] == ["replica_lost"]
    assert "send the request again" in str(cut[0])
    with SpeculationCache.open(database.url) as cache:
        stored = {one.text for one in cache.list(limit=None)}
    assert {plain(asked, 96) for asked in told.answered} <= stored
    until(lambda: len(cluster.figures(keys[TENANTS[0]])) == 2, "a replica in the place of the killed one")


def cut_stream(cluster: RayCluster, tenant: str, key: str) -> openai.APIError:
    """Kill the replica that answers a tenant, in the middle of a stream; what the client of this stream gets."""
    pid = pid_of(cluster, preferred(f"tenant {tenant}", cluster.figures(key))[0])
    stream = cluster.client(key).completions.create(
        model=MODEL, prompt=prompt(tenant, 0), max_tokens=900, temperature=0, stream=True
    )
    next(iter(stream))
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(openai.APIError) as raised:
        list(stream)
    return raised.value


def test_a_rolling_update_loses_no_request(
    cluster: RayCluster, keys: dict[str, str], plain: Plain, settings: dict[str, object]
) -> None:
    before = set(cluster.figures(keys[TENANTS[0]]))

    def update(told: Told) -> None:
        cluster.deploy(**settings, request_seconds=601)

    told = traffic(cluster, keys, range(300, 360), plain, meanwhile=update)
    assert (len(told.answered), told.wrong, told.kinds) == (480, [], Counter())
    assert not before & set(cluster.figures(keys[TENANTS[0]]))


def test_a_database_that_goes_away_and_comes_back(
    cluster: RayCluster, keys: dict[str, str], plain: Plain, database: TemporaryServer
) -> None:
    """Requests are answered without it; it is used again by itself, and what was forgotten meanwhile is followed."""
    key = keys[TENANTS[0]]
    database.stop()
    try:
        told = traffic(cluster, keys, range(400, 402), plain)
    finally:
        database.start()
    assert (len(told.answered), told.wrong, told.errors) == (16, [], [])
    with SpeculationCache.open(database.url) as cache:
        assert cache.forget(tenant=TENANTS[1]) > 0
        left = len(cache.list(limit=None))
        until(lambda: max(by_replica(cluster, key, HELD).values()) <= left, "what was forgotten left every memory")
        stored = lambda: prompt_stored(cluster, keys, plain, cache)  # noqa: E731
        until(stored, "a completion stored again")


def prompt_stored(cluster: RayCluster, keys: dict[str, str], plain: Plain, cache: SpeculationCache) -> bool:
    """Whether an answer given now reaches the store."""
    text, _ = ask(cluster.client(keys[TENANTS[1]]), prompt(TENANTS[1], 500))
    assert text == plain(prompt(TENANTS[1], 500))
    return any(one.text == text for one in cache.list(tenant=TENANTS[1]))


def test_replicas_come_and_go_with_the_load(
    cluster: RayCluster, keys: dict[str, str], plain: Plain, settings: dict[str, object]
) -> None:
    """1, 2, 1; no request is lost when one is taken away."""
    key = keys[TENANTS[0]]
    delays = {"upscale_seconds": 1, "downscale_seconds": 1, "target_ongoing_requests": 1}
    cluster.deploy(**{**settings, "min_replicas": 1, **delays})
    until(lambda: len(cluster.figures(key)) == 1, "one replica")
    busy = Told()

    def two_replicas() -> bool:
        loud = traffic(cluster, keys, range(600, 602), plain, tokens=400)
        busy.wrong.extend(loud.wrong)
        busy.errors.extend(loud.errors)
        return len(cluster.figures(key)) == 2

    until(two_replicas, "a second replica")
    assert (busy.wrong, busy.errors) == ([], [])
    calm = Told()

    def one_replica_again() -> bool:
        quiet = traffic(cluster, {TENANTS[2]: keys[TENANTS[2]]}, [600], plain)
        calm.wrong.extend(quiet.wrong)
        calm.errors.extend(quiet.errors)
        return len(cluster.figures(key)) == 1

    until(one_replica_again, "one replica again")
    assert (calm.wrong, calm.errors) == ([], [])
