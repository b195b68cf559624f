"""Sealed segments: what they hold, who may write them, that none is trusted, and that forgetting reaches them."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock
from hypothesis import given, settings
from hypothesis import strategies as st

from precedent.cache import NewCompletion, Selection, SpeculationCache, SQLiteStore
from precedent.cache.snapshot.partition import MAX_SEGMENTS, Partition
from precedent.cache.snapshot.segment import Segment, is_sound, kept
from precedent.cache.snapshot.segment_files import MANIFEST, SegmentFiles
from precedent.config import SamplingParams
from precedent.drafters import DrafterParts, load_drafters
from precedent.drafters.matching.context_order import START
from precedent.drafters.matching.occurrences import HIT, ROOM, Weights
from precedent.drafters.matching.token_index import TokenIndex, reversed_context, sorted_segment
from precedent.drafters.recall import tenant_memory
from precedent.drafters.recall.drafter import RecallDrafter
from precedent.drafters.recall.nearness import Nearness
from precedent.drafters.recall.tenant_memory import TenantMemory
from precedent.drafters.request import Request
from precedent.errors import CacheError
from precedent.runtime.inline_executor import AtOnce
from precedent.testing.embedders import HashEmbedder

SEQUENCES = st.lists(st.lists(st.integers(0, 3), max_size=30), min_size=1, max_size=8)
CONTEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=30)
Found = Counter[tuple[int, int, tuple[int, ...]]]


def found_in(index: TokenIndex, context: list[int], limit: int = 10_000) -> Found:
    """(sequence id, length, next tokens) of every occurrence, whatever its place in the text."""
    weights = Weights(np.array([(-1, 0, 0.0)], dtype=HIT), np.zeros(len(index.sequence_ids) + 1), 0.0)
    places = index.match(reversed_context(context), weights, limit)
    rows = []
    for place in places:
        text = index.text.tokens[place["position"] + 1 : place["position"] + 6].tolist()
        text = text[: next((at for at, token in enumerate(text) if token < 0), len(text))]
        rows.append((index.sequence_ids[place["slot"]], int(place["length"]), tuple(text)))
    return Counter(rows)


def in_pieces(sequences: dict[int, list[int]], cuts: list[int]) -> TokenIndex:
    """An index of segments that end before `cuts`, and the rest appended one by one."""
    index, keys, begin = TokenIndex(), list(sequences), 0
    for cut in sorted(cuts):
        index.load(sorted_segment({key: sequences[key] for key in keys[begin:cut]}))
        begin = cut
    for key in keys[begin:]:
        index.append(key, sequences[key])
    return index


def whole(sequences: dict[int, list[int]]) -> TokenIndex:
    index = TokenIndex()
    for key, tokens in sequences.items():
        index.append(key, tokens)
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
    assert is_sound(sealed)
    again = TokenIndex()
    again.load(sealed)
    assert found_in(again, context) == found_in(whole(numbered), context)
    assert {key: again.tokens(key).tolist() for key in numbered} == numbered


@settings(max_examples=60, deadline=None)
@given(SEQUENCES, st.data())
def test_dropping_completions_equals_sealing_without_them(sequences: list[list[int]], data: st.DataObject) -> None:
    """A segment that was filtered is, array for array, the one that never held what is gone."""
    stays = data.draw(st.lists(st.booleans(), min_size=len(sequences), max_size=len(sequences)))
    left = kept(sorted_segment(dict(enumerate(sequences))), np.array(stays))
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
    assert is_sound(sound)
    assert not is_sound(spoil(sound))


# on disk

TENANT, TOKENIZER = "shop", "tok"
SECRET = tuple(range(70_001, 70_040))


def answer(number: int) -> tuple[int, ...]:
    return (5, 6, 7, 100 + number, 8, 9, 10 + number % 3, 2)


def stored(folder: Path, count: int = 40, tenant: str = TENANT) -> SQLiteStore:
    store = SQLiteStore.open(folder)
    for number in range(count):
        store.insert(
            NewCompletion(answer(number), TOKENIZER, "model", tenant, prompt_fingerprint=f"p{number}"), None, None
        )
    return store


def memory_of(store: SQLiteStore, tenant: str = TENANT, max_bytes: int = 2**28) -> TenantMemory:
    memory = TenantMemory(store.partition(tenant, TOKENIZER), max_bytes)
    memory.read(store, tenant, TOKENIZER)
    return memory


def tokens_of(memory: TenantMemory) -> dict[int, tuple[int, ...]]:
    return {key: tuple(memory.index.tokens(key).tolist()) for key in sorted(memory.index.lengths())}


def files_of(store: SQLiteStore, tenant: str = TENANT) -> SegmentFiles:
    partition = store.partition(tenant, TOKENIZER)
    assert partition is not None
    return partition._files()


def raw(folder: Path) -> bytes:
    return b"".join(
        file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file() and file.name[-4:] != "-shm"
    )


def as_bytes(tokens: tuple[int, ...]) -> bytes:
    return np.array(tokens, dtype="<i4").tobytes()


class RowsRead:
    """How many completions were read from their rows since."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.number = 0
        read = Partition.completions

        def counted(partition, ids):
            completions = read(partition, ids)
            self.number += len(completions)
            return completions

        monkeypatch.setattr(Partition, "completions", counted)


def test_a_restart_reads_segments_and_only_the_rows_that_are_in_none(tmp_path, monkeypatch):
    """Tokens, order, prompts and counts are back, and new completions join them."""
    store, rows = stored(tmp_path), RowsRead(monkeypatch)
    first = memory_of(store)
    assert first.seal()
    assert not first.seal()  # nothing is new
    store.insert(NewCompletion(answer(0), TOKENIZER, "model", TENANT, prompt_fingerprint="p0"), None, None)  # counted
    store.insert(NewCompletion(SECRET, TOKENIZER, "model", TENANT), None, None)
    store.close()
    rows.number = 0
    store = SQLiteStore.open(tmp_path)
    second = memory_of(store)
    assert rows.number == 1
    assert tokens_of(second) == {**tokens_of(first), 41: SECRET}
    assert [second.index.sequence_ids[slot] for slot in second.slots_of_prompt("p7")] == [8]
    assert second.log_counts[:3] == pytest.approx([np.log(2), 0, 0])
    assert found_in(second.index, [5, 6]) == found_in(whole(tokens_of(second)), [5, 6])
    assert len(Nearness(second, "p7").order) == len(answer(7))
    store.close()


def test_nothing_is_written_for_a_cache_in_memory_or_a_read_only_file(tmp_path):
    store = SQLiteStore.open()
    assert store.partition(TENANT, TOKENIZER) is None
    assert not TenantMemory(None).seal()
    store.close()
    stored(tmp_path).close()
    store = SQLiteStore.open(tmp_path, read_only=True)
    assert not memory_of(store).seal()
    assert not (tmp_path / "precedent.sqlite-index").exists()
    store.close()


def test_files_may_be_read_by_whoever_may_read_the_cache(tmp_path):
    store = stored(tmp_path)
    memory_of(store).seal()
    assert {file.stat().st_mode & 0o777 for file in files_of(store).folder.iterdir()} == {0o600}
    (tmp_path / "precedent.sqlite").chmod(0o640)
    store.insert(NewCompletion(SECRET, TOKENIZER, "model", TENANT), None, None)
    memory_of(store).seal()
    assert 0o640 in {file.stat().st_mode & 0o777 for file in files_of(store).folder.iterdir()}
    store.close()


def torn(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-3])


def flipped(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-2] ^= 1
    file.write_bytes(content)


def foreign(file: Path) -> None:
    file.write_bytes(b"PK\x03\x04 something else")


def pickled(file: Path) -> None:
    np.save(file, np.array([{"a": 1}], dtype=object), allow_pickle=True)


@pytest.mark.parametrize("damage", [torn, flipped, foreign, pickled, Path.unlink])
@pytest.mark.parametrize("part", ["completions", "tokens", "order"])
def test_a_damaged_segment_is_read_from_its_rows_and_replaced(tmp_path, monkeypatch, damage, part):
    """Whatever happened to a file: the same completions, and the next sealing writes them anew."""
    store, rows = stored(tmp_path), RowsRead(monkeypatch)
    before = memory_of(store)
    before.seal()
    (file,) = files_of(store).folder.glob(f"*.{part}.npy")
    damage(file)
    rows.number = 0
    again = memory_of(store)
    assert rows.number == 40
    assert tokens_of(again) == tokens_of(before)
    assert again.seal()
    rows.number = 0
    assert tokens_of(memory_of(store)) == tokens_of(before)
    assert rows.number == 0
    assert len(list(files_of(store).folder.iterdir())) == 4
    store.close()


@pytest.mark.parametrize(
    "manifest",
    [b"", b"{", b"[]", b'{"format": 2, "segments": []}', b'{"format": 1, "segments": [{"name": "../x"}]}', b"\xff"],
)
def test_a_manifest_that_cannot_be_read_counts_for_nothing(tmp_path, manifest):
    store = stored(tmp_path)
    before = memory_of(store)
    before.seal()
    (files_of(store).folder / MANIFEST).write_bytes(manifest)
    again = memory_of(store)
    assert tokens_of(again) == tokens_of(before)
    assert again.seal()
    assert len(files_of(store).listed()) == 1
    store.close()


def test_segments_of_another_cache_are_not_believed(tmp_path):
    """A file put in the place of another has the same ids, but not the same rows."""
    first = stored(tmp_path / "a")
    memory_of(first).seal()
    first.close()
    other = SQLiteStore.open(tmp_path / "b")
    for number in range(40):
        other.insert(NewCompletion((900, 901, number), TOKENIZER, "model", TENANT), None, None)
    other.close()
    shutil.copytree(tmp_path / "a" / "precedent.sqlite-index", tmp_path / "b" / "precedent.sqlite-index")
    other = SQLiteStore.open(tmp_path / "b")
    memory = memory_of(other)
    assert tokens_of(memory) == {number + 1: (900, 901, number) for number in range(40)}
    memory.seal()
    assert as_bytes(answer(3)[:4]) not in raw(tmp_path / "b")
    other.close()


def test_forget_erases_the_tokens_from_every_segment_file(tmp_path):
    """From segments, from files that a killed process left behind, and from a whole tenant's folder."""
    store = stored(tmp_path)
    gone = store.insert(NewCompletion(SECRET, TOKENIZER, "model", TENANT, text="secret"), None, None)
    stored(tmp_path, tenant="quiet").close()
    before = memory_of(store)
    before.seal()
    memory_of(store, "quiet").seal()
    files = files_of(store)
    (files.folder / "0123.tokens.npy").write_bytes(as_bytes(SECRET))
    (files.folder / ".abc.new").write_bytes(as_bytes(SECRET))
    assert raw(tmp_path / "precedent.sqlite-index").count(as_bytes(SECRET)) == 3
    assert store.forget(Selection(containing="secret")) == 1
    assert as_bytes(SECRET) not in raw(tmp_path)
    assert as_bytes(SECRET[5:7]) not in raw(tmp_path)
    after = memory_of(store)
    assert gone not in after.index
    assert len(after.index.lengths()) == 40
    assert found_in(after.index, [START]) == Counter({(key, 1, answer(key - 1)[:5]): 1 for key in range(1, 41)})
    quiet = files_of(store, "quiet").folder
    assert quiet.exists()
    store.forget(Selection(tenant="quiet"))
    assert not quiet.exists()
    assert len(files.listed()) == 1
    store.close()


def test_a_file_that_is_still_open_elsewhere_is_overwritten(tmp_path):
    store = SQLiteStore.open(tmp_path)
    store.insert(NewCompletion(SECRET, TOKENIZER, "model", TENANT, text="secret"), None, None)
    memory_of(store).seal()
    (file,) = files_of(store).folder.glob("*.tokens.npy")
    with file.open("rb") as opened:
        store.forget(Selection(containing="secret"))
        assert as_bytes(SECRET[:3]) not in opened.read()
    store.close()


def test_what_was_forgotten_meanwhile_is_not_sealed(tmp_path):
    """Another process forgot it: this one's memory holds it still, but looks into the table before it writes."""
    store = stored(tmp_path)
    secret = store.insert(NewCompletion(SECRET, TOKENIZER, "model", TENANT, text="secret"), None, None)
    memory = memory_of(store)
    store.forget(Selection(ids=(secret,)))
    assert secret in memory.index
    assert memory.seal()
    assert as_bytes(SECRET) not in raw(tmp_path)
    memory.read(store, TENANT, TOKENIZER)
    assert secret not in memory.index
    store.close()


def test_what_was_evicted_is_masked_at_once_and_erased_by_the_next_sealing(tmp_path):
    store = stored(tmp_path)
    secret = store.insert(NewCompletion(SECRET, TOKENIZER, "model", TENANT), None, None)
    memory_of(store).seal()
    with store._database.write() as connection:
        connection.execute("DELETE FROM completion WHERE id = ?", (secret,))
    assert as_bytes(SECRET) in raw(tmp_path / "precedent.sqlite-index")
    memory = memory_of(store)
    assert secret not in memory.index
    assert not memory.seal()
    assert as_bytes(SECRET) not in raw(tmp_path / "precedent.sqlite-index")
    assert tokens_of(memory_of(store)) == tokens_of(memory)
    store.close()


def test_the_loser_skips_sealing_and_a_forgetful_one_says_so(tmp_path, monkeypatch):
    """Somebody else holds the lock: sealing is left to them, forgetting reports what it could not erase."""
    monkeypatch.setattr("precedent.cache.snapshot.sealing.LOCK_SECONDS", 0.05)
    store = stored(tmp_path)
    memory = memory_of(store)
    memory.seal()
    store.insert(NewCompletion(SECRET, TOKENIZER, "model", TENANT), None, None)
    memory.read(store, TENANT, TOKENIZER)
    with FileLock(tmp_path / "precedent.sqlite-index" / "lock"):
        assert not memory.seal()
        with pytest.raises(CacheError, match="run forget again"):
            store.forget(Selection(ids=(1,)))
    assert 1 not in [row.id for row in store.list()]
    assert as_bytes(answer(0)[:4]) in raw(tmp_path / "precedent.sqlite-index")
    assert store.forget(Selection(ids=(1,))) == 0
    assert as_bytes(answer(0)[:4]) not in raw(tmp_path / "precedent.sqlite-index")
    assert memory.seal()
    store.close()


def test_two_memories_of_one_file_complete_each_other(tmp_path):
    """As two processes would: each reads what the other sealed, and neither loses or doubles anything."""
    store, other = stored(tmp_path), SQLiteStore.open(tmp_path)
    mine, theirs = memory_of(store), memory_of(other)
    assert mine.seal()
    assert not theirs.seal()  # all of it is sealed already
    other.insert(NewCompletion(SECRET, TOKENIZER, "model", TENANT), None, None)
    theirs.read(other, TENANT, TOKENIZER)
    assert theirs.seal()
    again = memory_of(store)
    assert tokens_of(again) == tokens_of(theirs)
    assert len(tokens_of(again)) == 41
    store.close()
    other.close()


@pytest.mark.parametrize("broken", ["write", "publish"])
def test_a_sealing_that_breaks_off_leaves_what_was(tmp_path, monkeypatch, broken):
    """A full disk at the worst moment: the earlier segments count, the rest is in the rows, its files go next time."""
    store = stored(tmp_path)
    memory_of(store).seal()
    store.insert(NewCompletion(SECRET, TOKENIZER, "model", TENANT), None, None)
    memory, before = memory_of(store), files_of(store).listed()
    with monkeypatch.context() as patched:
        patched.setattr(SegmentFiles, broken, full_disk if broken == "publish" else half_written)
        with pytest.raises(OSError, match="full"):
            memory.seal()
    assert files_of(store).listed() == before
    assert tokens_of(memory_of(store)) == tokens_of(memory)
    assert memory.seal()
    listed = files_of(store).listed()
    assert [sealed.completions for sealed in listed] == [40, 1]
    assert len(list(files_of(store).folder.iterdir())) == 7
    store.close()


def full_disk(*_: object) -> None:
    raise OSError("the disk is full")


def half_written(files: SegmentFiles, segment: Segment) -> None:
    (files.folder / "77.tokens.npy").write_bytes(segment.tokens.tobytes())
    raise OSError("the disk is full")


def test_the_number_of_segments_stays_small(tmp_path):
    """Sixty sealings leave segments of growing sizes, which hold everything once."""
    store, memory = SQLiteStore.open(tmp_path), None
    store._database._writer.execute("PRAGMA synchronous=OFF")
    for number in range(60):
        store.insert(NewCompletion(answer(number), TOKENIZER, "model", TENANT), None, None)
        memory = memory or memory_of(store)
        memory.read(store, TENANT, TOKENIZER)
        memory.seal()
    listed = files_of(store).listed()
    assert len(listed) <= min(6, MAX_SEGMENTS)
    assert sum(sealed.completions for sealed in listed) == 60
    assert tokens_of(memory_of(store)) == tokens_of(memory)
    store.close()


def test_a_memory_holds_the_newest_completions_that_fit(tmp_path):
    """The oldest leave the index; their rows stay, and so it is after a restart."""
    store = stored(tmp_path, 200)
    bound = 60_000
    memory = memory_of(store, max_bytes=bound)
    assert max(tokens_of(memory)) == 200
    assert min(tokens_of(memory)) > 100
    assert bound / 2 < memory.num_bytes < bound
    for number in range(200, 240):
        store.insert(
            NewCompletion(answer(number), TOKENIZER, "model", TENANT, prompt_fingerprint=f"p{number}"), None, None
        )
    memory.read(store, TENANT, TOKENIZER)
    assert memory.outgrown
    fresh = memory.renewed()
    assert not fresh.outgrown
    assert max(tokens_of(fresh)) == 240
    assert min(tokens_of(fresh)) > min(tokens_of(memory))
    assert [fresh.index.sequence_ids[slot] for slot in fresh.slots_of_prompt("p239")] == [240]
    assert found_in(fresh.index, [5, 6]) == found_in(whole(tokens_of(fresh)), [5, 6])
    assert len(store.list(limit=None)) == 240
    store.close()


def test_a_segment_that_is_replaced_while_it_is_read_is_read_again(tmp_path, monkeypatch):
    """Another process merges what this one is about to open: nothing has to come from the rows."""
    store, rows = stored(tmp_path), RowsRead(monkeypatch)
    memory, listed, times = memory_of(store), SegmentFiles.listed, []
    memory.seal()

    def listed_too_early(files):
        found = listed(files)
        if not times:
            times.append(1)
            monkeypatch.setattr(SegmentFiles, "listed", listed)
            for sealed in found:
                files.publish([files.write(files.read(sealed))])
            files.erase_unlisted()
            monkeypatch.setattr(SegmentFiles, "listed", listed_too_early)
        return found

    monkeypatch.setattr(SegmentFiles, "listed", listed_too_early)
    rows.number = 0
    assert tokens_of(memory_of(store)) == tokens_of(memory)
    assert rows.number == 0
    store.close()


def test_many_who_seal_and_forget_at_once_agree_in_the_end(tmp_path):
    """Each with its own connection, as processes have: nothing is doubled, lost, or brought back."""
    stored(tmp_path, 1).close()
    forgotten: list[int] = []

    def work(number: int) -> None:
        store = SQLiteStore.open(tmp_path)
        store._database._writer.execute("PRAGMA synchronous=OFF")
        memory = TenantMemory(store.partition(TENANT, TOKENIZER))
        for turn in range(6):
            key = store.insert(
                NewCompletion((number, turn, 80_000 + 10 * number + turn), TOKENIZER, "m", TENANT), None, None
            )
            memory.read(store, TENANT, TOKENIZER)
            memory.seal()
            if turn % 3 == 2:
                with contextlib.suppress(CacheError):  # another one reads: the bytes in SQLite's log go later
                    store.forget(Selection(ids=(key,)))
                forgotten.append(key)
        store.close()

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    store = SQLiteStore.open(tmp_path)
    memory = memory_of(store)
    assert len(tokens_of(memory)) == 1 + 24 - 8
    memory.seal()
    in_segments = [
        key for sealed in files_of(store).listed() for key in files_of(store).completions(sealed)["id"].tolist()
    ]
    assert sorted(in_segments) == sorted(tokens_of(memory))
    assert not set(in_segments) & set(forgotten)
    store.close()


# behind the recall drafter

END = 2


def request(tenant: str = TENANT) -> Request:
    return Request("r", (1, 2, 3), SamplingParams(), tenant, "q", end_token_ids=frozenset({END}))


def cache_in(folder: Path, **settings: int) -> SpeculationCache:
    return SpeculationCache.open(folder, embedder=HashEmbedder(), **settings)


def recall_from(cache: SpeculationCache) -> RecallDrafter:
    (drafter,) = load_drafters(["recall"], DrafterParts(TOKENIZER, AtOnce(), cache))
    assert isinstance(drafter, RecallDrafter)
    return drafter


def test_an_engine_that_closes_seals_and_the_next_one_drafts_the_same(tmp_path, monkeypatch):
    rows, drafted = RowsRead(monkeypatch), []
    for _ in range(2):
        with cache_in(tmp_path) as cache:
            if not drafted:
                for number in range(20):
                    cache.insert(NewCompletion(answer(number), TOKENIZER, "model", TENANT, query=f"question {number}"))
            drafter, rows.number = recall_from(cache), 0
            session = drafter.begin(request())
            drafted.append(session.match(32).nodes.tolist())
            session.end()
            drafter.close()
    assert rows.number == 0
    assert drafted[0] == drafted[1] != []


def test_a_grown_memory_is_sealed_at_the_end_of_a_request(tmp_path, monkeypatch):
    """Not before there is enough of it, and not while the request runs."""
    monkeypatch.setattr(tenant_memory, "SEAL_TOKENS", 30)
    with cache_in(tmp_path) as cache:
        drafter, sealed = recall_from(cache), []
        for number in range(6):
            cache.insert(NewCompletion(answer(number), TOKENIZER, "model", TENANT))
            session = drafter.begin(request())
            before = len(list(tmp_path.rglob("*.tokens.npy")))
            session.end()
            sealed.append((before, len(list(tmp_path.rglob("*.tokens.npy")))))
        assert sealed == [(0, 0), (0, 0), (0, 0), (0, 1), (1, 1), (1, 1)]
        drafter.close()


def test_forget_reaches_a_running_request_at_once(tmp_path):
    """No other request has to begin: when `forget` returns, nothing of it is drafted any more."""
    with cache_in(tmp_path) as cache:
        cache.insert(NewCompletion(SECRET, TOKENIZER, "model", TENANT, text="secret"))
        drafter = recall_from(cache)
        session = drafter.begin(request())
        session.match(8)
        session.committed(SECRET[:3])
        assert tuple(session.match(4).token_ids[:2]) == SECRET[3:5]
        assert cache.forget(containing="secret") == 1
        assert len(session.match(8)) == 0
        drafter.close()
        assert as_bytes(SECRET[:2]) not in raw(tmp_path)


def test_tenants_share_one_bound_and_come_back_from_their_segments(tmp_path):
    """The least recently used tenant's memory goes, but a request that began with it goes on, and forgets as well."""
    bound = 4 * (20 * 700)
    with cache_in(tmp_path, max_index_bytes=bound) as cache:
        for tenant in "abcdef":
            for number in range(20):
                cache.insert(NewCompletion(answer(number), TOKENIZER, "model", tenant))
        drafter = recall_from(cache)
        running = drafter.begin(request("a"))
        for tenant in "bcdef":
            drafter.begin(request(tenant)).end()
            assert sum(memory.num_bytes for memory in drafter._memories._memories.values()) <= bound
        assert "a" not in drafter._memories._memories
        assert len(running.match(8)) > 0
        cache.forget(tenant="a")
        assert len(running.match(8)) == 0
        assert len(drafter.begin(request("b")).match(8)) > 0
        drafter.close()


def test_a_bound_that_holds_nothing_is_refused(tmp_path):
    with pytest.raises(CacheError, match="max_index_bytes=0 must be at least 1"):
        cache_in(tmp_path, max_index_bytes=0)


def test_a_process_killed_while_sealing_loses_nothing(tmp_path):
    """Its segment's files are there, but no manifest lists them: they count for nothing, and opening erases them."""
    code = """
        import os, signal, sys
        from precedent.cache import NewCompletion, SQLiteStore
        from precedent.cache.snapshot.segment_files import SegmentFiles
        from precedent.drafters.recall.tenant_memory import TenantMemory
        store = SQLiteStore.open(sys.argv[1])
        for number in range(30):
            store.insert(NewCompletion((5, 6, number), "tok", "model", "shop"), None, None)
        SegmentFiles.publish = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        memory = TenantMemory(store.partition("shop", "tok"))
        memory.read(store, "shop", "tok")
        memory.seal()
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)]
    assert subprocess.run(command, env=environment, check=False).returncode == -signal.SIGKILL
    assert len(list(tmp_path.rglob("*.tokens.npy"))) == 1
    store = SQLiteStore.open(tmp_path)
    assert list(tmp_path.rglob("*.npy")) == []
    memory = memory_of(store)
    assert tokens_of(memory) == {number + 1: (5, 6, number) for number in range(30)}
    assert memory.seal()  # the dead process's lock went with it
    assert len(files_of(store).listed()) == 1
    store.close()
