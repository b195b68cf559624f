"""Sealed segments find what one index finds: in pieces, merged, sampled, with completions dropped."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.segments import found_in, whole
from hypothesis import given, settings
from hypothesis import strategies as st

from precedent.drafters.matching.context_order import START
from precedent.drafters.matching.occurrences import ROOM
from precedent.drafters.matching.token_index import TokenIndex, sorted_segment

SEQUENCES = st.lists(st.lists(st.integers(0, 3), max_size=30), min_size=1, max_size=8)
CONTEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=30)


def in_pieces(sequences: dict[int, list[int]], cuts: list[int]) -> TokenIndex:
    """An index of segments that end before `cuts`, and the rest appended one by one."""
    index, keys, begin = TokenIndex(), list(sequences), 0
    for cut in sorted(cuts):
        index.load(sorted_segment({key: sequences[key] for key in keys[begin:cut]}))
        begin = cut
    for key in keys[begin:]:
        index.append(key, sequences[key])
    return index


@settings(max_examples=120, deadline=None)
@given(SEQUENCES, CONTEXTS, st.booleans(), st.data())
def test_segments_and_a_tail_find_what_one_index_finds(
    sequences: list[list[int]], context: list[int], from_start: bool, data: st.DataObject
) -> None:
    """However the completions are spread, before and after merging, forgetting, and sealing everything anew."""
    context = [START, *context] if from_start else context
    numbered = dict(enumerate(sequences, 7))
    cuts = data.draw(st.lists(st.integers(0, len(sequences)), max_size=4))
    index = in_pieces(numbered, cuts)
    assert found_in(index, context) == found_in(whole(numbered), context)
    index.take_order(index.merged_order())
    assert found_in(index, context) == found_in(whole(numbered), context)
    gone = data.draw(st.sampled_from(sorted(numbered)))
    index = in_pieces(numbered, cuts)
    index.forget([gone])
    del numbered[gone]
    assert found_in(index, context) == found_in(whole(numbered), context)
    sealed = index.segment(list(numbered))
    assert sealed.is_sound
    again = TokenIndex()
    again.load(sealed)
    assert found_in(again, context) == found_in(whole(numbered), context)
    assert {key: again.tokens(key).tolist() for key in numbered} == numbered


@settings(max_examples=60, deadline=None)
@given(SEQUENCES, st.data())
def test_dropping_completions_equals_sealing_without_them(sequences: list[list[int]], data: st.DataObject) -> None:
    """A segment that was filtered is, array for array, the one that never held what is gone."""
    stays = data.draw(st.lists(st.booleans(), min_size=len(sequences), max_size=len(sequences)))
    left = sorted_segment(dict(enumerate(sequences))).kept(np.array(stays))
    expected = sorted_segment({key: tokens for key, tokens in enumerate(sequences) if stays[key]})
    assert all((a == b).all() for a, b in zip(left, expected, strict=True))


def test_a_crowd_is_sampled_from_every_segment() -> None:
    """More equal places than are looked at: as many as from one index, and evenly over the segments."""
    crowd = {number: [1, 2, 1000 + number] for number in range(3000)}
    found = found_in(in_pieces(crowd, [300, 1800, 3000]), [1, 2])
    assert sum(found.values()) == sum(found_in(in_pieces(crowd, [3000]), [1, 2]).values()) == ROOM
    numbers = np.array(sorted(key for key, _, _ in found))
    assert [int(((numbers >= a) & (numbers < b)).sum()) for a, b in ((0, 300), (300, 1800), (1800, 3000))] == [
        25,
        128,
        103,
    ]


def test_many_segments_are_merged_before_they_slow_down_matching() -> None:
    numbered = {number: [number % 7, 3, number % 5] for number in range(60)}
    index = in_pieces(numbered, list(range(1, 61)))
    assert index.num_runs <= 16
    assert found_in(index, [3]) == found_in(whole(numbered), [3])


@pytest.mark.parametrize(
    "spoil",
    [
        lambda s: s._replace(order=s.order[:-1]),
        lambda s: s._replace(order=np.where(s.order == s.order[0], np.int32(10**6), s.order)),
        lambda s: s._replace(order=np.where(s.order == s.order[0], s.order[1], s.order)),
        lambda s: s._replace(order=np.where(s.order == s.order[0], np.int32(s.tokens.size - 1), s.order)),
        lambda s: s._replace(tokens=np.abs(s.tokens)),
        lambda s: s._replace(completions=s.completions[1:]),
    ],
    ids=["short", "outside", "twice", "last", "no marks", "a completion less"],
)
def test_arrays_that_lead_outside_are_noticed(spoil) -> None:
    sound = sorted_segment({1: [1, 2, 3], 2: [4, 5]})
    assert sound.is_sound
    assert not spoil(sound).is_sound
