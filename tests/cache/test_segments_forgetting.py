"""Forgetting and evicting reach every segment file, and what is sealed meanwhile."""

from __future__ import annotations

from collections import Counter

from helpers.segments import (
    SECRET,
    TENANT,
    TOKENIZER,
    answer,
    as_bytes,
    files_of,
    found_in,
    memory_of,
    raw,
    stored,
    tokens_of,
)

from precedent.cache import Completion, Selection, SQLiteStore
from precedent.drafters.matching.context_order import START


def test_forget_erases_the_tokens_from_every_segment_file(tmp_path):
    """From segments, from files that a killed process left behind, and from a whole tenant's folder."""
    store = stored(tmp_path)
    gone = store.insert(Completion(SECRET, TOKENIZER, "model", TENANT, text="secret"), None, None)
    stored(tmp_path, tenant="quiet").close()
    before = memory_of(store)
    before.seal()
    memory_of(store, "quiet").seal()
    files = files_of(store)
    (files.folder / "0123456789abcdef.tokens.npy").write_bytes(as_bytes(SECRET))
    (files.folder / ".precedent-abcdefgh.new").write_bytes(as_bytes(SECRET))
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
    store.insert(Completion(SECRET, TOKENIZER, "model", TENANT, text="secret"), None, None)
    memory_of(store).seal()
    (file,) = files_of(store).folder.glob("*.tokens.npy")
    with file.open("rb") as opened:
        store.forget(Selection(containing="secret"))
        assert as_bytes(SECRET[:3]) not in opened.read()
    store.close()


def test_what_was_forgotten_meanwhile_is_not_sealed(tmp_path):
    """Another process forgot it: this one's memory holds it still, but looks into the table before it writes."""
    store = stored(tmp_path)
    secret = store.insert(Completion(SECRET, TOKENIZER, "model", TENANT, text="secret"), None, None)
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
    secret = store.insert(Completion(SECRET, TOKENIZER, "model", TENANT), None, None)
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
