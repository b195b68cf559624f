"""The arguments of a deployment: read from a command line, checked before anything starts."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

pytest.importorskip("precedent_ray.settings", reason="precedent-ray is not installed")
from precedent.errors import ConfigError
from precedent_ray.settings import Settings
from precedent_server.keys import add_key


def test_texts_of_a_command_line_are_read_as_what_they_stand_for() -> None:
    settings = Settings.of(
        {"model": "tiny=/models/tiny, big=org/big", "max_replicas": "8", "bitwise": "true", "grace_seconds": "2.5"}
    )
    assert settings.models == {"tiny": "/models/tiny", "big": "org/big"}
    assert (settings.max_replicas, settings.bitwise, settings.limits.grace_seconds) == (8, True, 2.5)
    assert settings.options.bitwise
    assert settings.shutdown_seconds > settings.grace_seconds


def test_a_model_without_a_name_is_served_under_its_target() -> None:
    assert Settings.of({"model": "org/model"}).models == {"org/model": "org/model"}


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"modle": "x"}, "no argument 'modle'; known: model"),
        ({}, "model: Field required"),
        ({"model": "x", "max_replicas": "many"}, "max_replicas: "),
        ({"model": "x", "max_queued": "0"}, "max_queued: "),
        ({"model": " , "}, "model is empty"),
        ({"model": "a=x,a=y"}, "given twice"),
        ({"model": "x", "min_replicas": "5"}, "max_replicas=4 is below min_replicas=5"),
        ({"model": "x", "cache": "orders.db"}, "is a file"),
        ({"model": "x", "cache": "postgresql://me:pw@db/x"}, "holds a password"),
        ({"model": "x", "cache": "postgresql://me@db/x?password=pw"}, "holds a password"),
        ({"model": "x", "api_keys": "keys.json"}, "absolute path"),
        ({"model": "x", "api_keys": "/nowhere/keys.json"}, "keys.json"),
    ],
)
def test_what_does_not_fit_is_said_in_one_line(args: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        Settings.of(args)
    assert said in str(raised.value)
    assert "pw" not in str(raised.value).replace("password", "")
    assert "\n" not in str(raised.value)


def test_one_replica_may_use_a_file() -> None:
    assert Settings.of({"model": "x", "cache": "orders.db", "max_replicas": "1"}).cache == "orders.db"


def test_they_travel_to_the_replicas(tmp_path: Path) -> None:
    add_key(tmp_path / "keys.json", "desk", "shop")
    settings = Settings.of({"model": "x", "cache": "postgresql://me@db/x", "api_keys": str(tmp_path / "keys.json")})
    assert pickle.loads(pickle.dumps(settings)) == settings
