"""Large arrays of the token index lie in an unnamed file, match like those in memory, and survive a missing disk."""

from __future__ import annotations

import mmap

import numpy as np
import pytest

from precedent.cache.segments import Scratch
from precedent.drafters.matching.occurrences import HIT, VoteWeights
from precedent.drafters.matching.token_index import TokenIndex, reversed_context, sorted_segment


def is_mapped(array: np.ndarray) -> bool:
    while isinstance(array, np.ndarray):
        array = array.base
    return isinstance(getattr(array, "obj", array), mmap.mmap)


def answers(seed: int, count: int) -> dict[int, list[int]]:
    random = np.random.default_rng(seed)
    return {seed * 1000 + n: random.integers(0, 9, random.integers(1, 40)).tolist() for n in range(count)}


def found(index: TokenIndex, context: list[int]) -> set[tuple[int, int]]:
    weights = VoteWeights(np.array([(-1, 0, 0.0)], dtype=HIT), np.zeros(len(index.sequence_ids) + 1), 0.0)
    places = index.match(reversed_context(context), weights, 1000)
    return {(index.sequence_ids[place["slot"]], int(place["length"])) for place in places}


def test_a_mapped_index_finds_what_one_in_memory_finds(tmp_path):
    """Through loading, appending, merging and forgetting."""
    mapped, plain = TokenIndex(Scratch(tmp_path, mapped_from=1)), TokenIndex()
    for index in (mapped, plain):
        for seed in (1, 2):
            index.load(sorted_segment(answers(seed, 30)))
        for key, tokens in answers(3, 200).items():
            index.append(key, tokens)
        index.forget([1003, 2005, 3007])
        index.take_order(index.merged_order())
    assert is_mapped(mapped._tokens)
    assert is_mapped(mapped._order)
    assert not is_mapped(plain._tokens)
    for context in answers(4, 50).values():
        assert found(mapped, context) == found(plain, context)
    assert list(tmp_path.iterdir()) == [], "the files have no names"


@pytest.mark.parametrize("reason", ["no folder", "no room"])
def test_without_a_disk_arrays_are_in_memory(tmp_path, monkeypatch, reason):
    def full(*_):
        raise OSError(28, "No space left on device")

    folder = tmp_path / "none" if reason == "no folder" else tmp_path
    if reason == "no room":
        monkeypatch.setattr("precedent.cache.segments.os.posix_fallocate", full)
    array = Scratch(folder, mapped_from=1).resized(np.arange(5, dtype=np.int32), 8, -1)
    assert array.tolist() == [0, 1, 2, 3, 4, -1, -1, -1]
    assert not is_mapped(array)


def test_small_arrays_stay_where_they_are(tmp_path):
    array = np.arange(5, dtype=np.int32)
    assert Scratch(tmp_path).placed(array) is array
