"""When two lists of settings name the same thing: engines are shared by these keys."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest

from precedent.engine.options import key_of


class Quantisation:
    """As transformers' configs: equal by its settings, without a hash."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, bits: int) -> None:
        self.bits = bits

    def to_dict(self) -> dict[str, Any]:
        return {"bits": self.bits, "skip": ["lm_head"]}


class Weights:
    """Equal to nothing but itself."""


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": 1, "b": [1, {"c": 2}]}, {"b": [1, {"c": 2}], "a": 1}),
        (Path("x") / ".." / "y", Path("y")),
        (Quantisation(4), Quantisation(4)),
        (["a", None], ("a", None)),
    ],
)
def test_equal_settings_have_equal_keys(one: Any, other: Any) -> None:
    assert key_of(one) == key_of(other)
    assert hash(key_of(one)) == hash(key_of(other))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": 1}, {"a": 2}),
        ("x", Path("x")),
        (Quantisation(4), Quantisation(8)),
        (Weights(), Weights()),
        ({"cache": bytearray()}, {"cache": bytearray()}),
    ],
)
def test_others_have_others(one: Any, other: Any) -> None:
    assert key_of(one) != key_of(other)
    assert key_of(one) == key_of(one)


def test_a_key_keeps_its_object_so_that_no_other_gets_its_place() -> None:
    weights = Weights()
    there, key = weakref.ref(weights), key_of({"target": weights})
    del weights
    gc.collect()
    assert there() is not None, key
