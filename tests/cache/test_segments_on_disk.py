"""Segments on disk: a restart reads them, few stay, and none is trusted that is damaged or another cache's."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from helpers.quick_store import quick_store
from helpers.segments import (
    SECRET,
    TENANT,
    TOKENIZER,
    RowsRead,
    answer,
    as_bytes,
    files_of,
    found_in,
    memory_of,
    raw,
    stored,
    tokens_of,
    whole,
)

from precedent.cache import Completion, SQLiteStore
from precedent.cache.segments import MANIFEST, MAX_SEGMENTS
from precedent.drafters.recall.tenant_memory import TenantMemory
from precedent.drafters.recall.weights import Nearness


def test_a_restart_reads_segments_and_only_the_rows_that_are_in_none(tmp_path, monkeypatch):
    """Tokens, order, prompts and counts are back, and new completions join them."""
    store, rows = stored(tmp_path), RowsRead(monkeypatch)
    first = memory_of(store)
    assert first.seal()
    assert not first.seal()  # nothing is new
    store.insert(Completion(answer(0), TOKENIZER, "model", TENANT, prompt_fingerprint="p0"), None, None)  # counted
    store.insert(Completion(SECRET, TOKENIZER, "model", TENANT), None, None)
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
    store.insert(Completion(SECRET, TOKENIZER, "model", TENANT), None, None)
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
        other.insert(Completion((900, 901, number), TOKENIZER, "model", TENANT), None, None)
    other.close()
    shutil.copytree(tmp_path / "a" / "precedent.sqlite-index", tmp_path / "b" / "precedent.sqlite-index")
    other = SQLiteStore.open(tmp_path / "b")
    memory = memory_of(other)
    assert tokens_of(memory) == {number + 1: (900, 901, number) for number in range(40)}
    memory.seal()
    assert as_bytes(answer(3)[:4]) not in raw(tmp_path / "b")
    other.close()


def test_the_number_of_segments_stays_small(tmp_path):
    """Sixty sealings leave segments of growing sizes, which hold everything once."""
    store, memory = quick_store(tmp_path), None
    for number in range(60):
        store.insert(Completion(answer(number), TOKENIZER, "model", TENANT), None, None)
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
            Completion(answer(number), TOKENIZER, "model", TENANT, prompt_fingerprint=f"p{number}"), None, None
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
