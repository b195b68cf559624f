"""Export and import: what was stored comes back, on another machine, for another tokenizer, for another embedder."""

from __future__ import annotations

import hashlib
import json
import stat
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from precedent.cache import Completion, Selection, SpeculationCache, SQLiteStore
from precedent.cache.embedder import embed_one, identity_of
from precedent.cache.exports import MANIFEST, NO_TEXT, checksum_of, export_cache, import_cache
from precedent.errors import CacheError, CacheMismatchError
from precedent.text.codec import TokenizerCodec
from precedent_testing.embedders import HashEmbedder
from precedent_testing.tiny_models import byte_tokenizer

ALL = Selection()
EMBEDDER = HashEmbedder()


def record(*token_ids: int, query: str = "a query", **fields) -> Completion:
    values = {"tokenizer": "tok", "model": "model", "text": f"text {token_ids}", "created": 1.7e9, **fields}
    vector = embed_one(EMBEDDER, query) if query.strip() else None
    return Completion(token_ids, query=query, vector=vector, **values)


def stored(records) -> SQLiteStore:
    store = SQLiteStore.open()
    store.restore(records, identity_of(EMBEDDER))
    return store


def held(store) -> list[tuple[Completion, bytes | None]]:
    """Everything in a store but the ids."""
    found = store.records(ALL, 0, 10**6)
    return [(replace(one, id=0), None if one.vector is None else one.vector.tobytes()) for one in found]


@pytest.fixture
def exported(tmp_path):
    store = stored([record(1, 2), record(3, query="", tenant="b"), record(5, query="other")])
    export_cache(store, tmp_path / "out", ALL)
    return tmp_path / "out"


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
COUNTERS = st.integers(0, 2**63 - 1)
RECORDS = st.builds(
    lambda ids, query, **fields: record(*ids, query=query, **fields),
    st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=6),
    TEXTS,
    tenant=st.text(st.sampled_from("ab %'_é"), min_size=1, max_size=3),
    tokenizer=st.sampled_from(["tok", "other tok"]),
    model=TEXTS,
    text=TEXTS,
    prompt_fingerprint=TEXTS,
    tools=TEXTS,
    workflow_step=TEXTS,
    created=st.floats(0, 4e9),
    count=st.integers(1, 2**63 - 1),
    hits=COUNTERS,
    accepted=COUNTERS,
    rejected=COUNTERS,
)


@given(records=st.lists(RECORDS, max_size=8))
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_was_exported_comes_back_to_the_last_bit(records, tmp_path_factory):
    folder = tmp_path_factory.mktemp("export") / "out"
    store, other = stored(records), SQLiteStore.open()
    export_cache(store, folder, ALL)
    for expected_new in (len(held(store)), 0):  # the second time changes nothing
        found = import_cache(folder, other)
        assert (found.read, found.filled.stored) == (len(held(store)), expected_new)
        assert held(other) == held(store)
        assert other.embedder() == store.embedder()


def test_importing_into_a_cache_that_went_on_keeps_the_larger_counters(exported):
    store = stored([record(1, 2, count=7, hits=3, accepted=100, created=1.6e9)])
    import_cache(exported, store)
    (known,) = store.list(Selection(containing="text (1, 2)"), None)
    assert (known.count, known.hits, known.accepted, known.created) == (7, 3, 100, 1.6e9)
    assert store.stats().records == 3


def test_a_tokenizer_that_differs_writes_the_texts_anew(tmp_path):
    store = stored([record(1, text="Grüße"), record(2, text=""), record(3, text="x", tokenizer="ours")])
    export_cache(store, tmp_path / "out", ALL)
    codec, other = TokenizerCodec(byte_tokenizer()), SQLiteStore.open()
    found = import_cache(tmp_path / "out", other, tokenizer=codec, embedder=EMBEDDER)
    assert (found.read, found.rewritten, found.filled.stored, found.skipped) == (3, 2, 2, {NO_TEXT: 1})
    for one in other.list(ALL, None):
        assert one.tokenizer == codec.fingerprint
        assert codec.decode(one.token_ids[:-1]) == one.text
        assert one.token_ids[-1] == codec.end_token_id
        assert (one.model, one.prompt_fingerprint) == ("", "")
    again = import_cache(tmp_path / "out", other, tokenizer=codec, embedder=EMBEDDER)
    assert (again.filled.stored, again.filled.known) == (0, 2)


def test_a_tokenizer_that_is_the_same_leaves_the_ids_alone(tmp_path):
    codec = TokenizerCodec(byte_tokenizer())
    ids = (1, 2, 3)  # not what the tokenizer would make of the text: models do not write canonically
    export_cache(stored([record(*ids, tokenizer=codec.fingerprint, text="abc")]), tmp_path / "out", ALL)
    other = SQLiteStore.open()
    assert import_cache(tmp_path / "out", other, tokenizer=codec).rewritten == 0
    assert other.list(ALL, None)[0].token_ids == ids


class CountingEmbedder(HashEmbedder):
    def __init__(self, salt: str) -> None:
        super().__init__(salt=salt)
        self.num_texts = 0

    def embed(self, texts):
        self.num_texts += len(texts)
        return super().embed(texts)


def test_another_embedder_makes_the_vectors_anew_and_each_text_once(exported):
    other, embedder = SQLiteStore.open(), CountingEmbedder("another")
    import_cache(exported, other, embedder=embedder)
    assert (other.embedder(), embedder.num_texts) == (identity_of(embedder), 2)
    for one in other.records(ALL, 0, 9):
        if one.vector is not None:
            np.testing.assert_allclose(one.vector, embed_one(embedder, one.query), atol=1e-6)
    import_cache(exported, other, embedder=embedder)
    assert embedder.num_texts == 2 + 2  # what `embed_one` above has asked, and nothing more


def test_an_embedder_that_is_not_the_caches_own_is_refused(exported):
    other = SQLiteStore.open()
    theirs = HashEmbedder(salt="theirs")
    other.insert(Completion((9,), "tok", "model"), embed_one(theirs, "q"), identity_of(theirs))
    with pytest.raises(CacheMismatchError):
        import_cache(exported, other, embedder=EMBEDDER)
    assert other.stats().records == 1


def test_vectors_that_fit_are_taken_without_loading_an_embedder(exported):
    other = SQLiteStore.open()
    import_cache(exported, other, embedder=None)  # the default one is not even there to be loaded
    assert other.embedder() == identity_of(EMBEDDER)
    with SpeculationCache(other, EMBEDDER) as cache:
        assert len(cache.recall("other", tenant="default", tokenizer="tok")) == 2


def test_a_tenant_may_take_the_place_of_the_recorded_one(exported):
    other = SQLiteStore.open()
    import_cache(exported, other, tenant="moved")
    assert {one.tenant for one in other.list(ALL, None)} == {"moved"}
    with pytest.raises(CacheError, match="not printable"):
        import_cache(exported, other, tenant="a\nb")


def test_only_the_selected_are_exported(tmp_path):
    store = stored([record(1, tenant="a"), record(2, tenant="b"), record(3, tenant="b", created=1e9)])
    export_cache(store, tmp_path / "out", Selection(tenant="b", before=1.5e9))
    other = SQLiteStore.open()
    import_cache(tmp_path / "out", other)
    assert [one.token_ids for one in other.list(ALL, None)] == [(3,)]


def test_many_records_make_several_parts(tmp_path):
    store, other, seen = stored([record(n, query=f"q {n}") for n in range(10)]), SQLiteStore.open(), []
    manifest = export_cache(store, tmp_path / "out", ALL, seen.append, records_of_part=4)
    assert ([part["records"] for part in manifest["parts"]], seen) == ([4, 4, 2], [4, 4, 2])
    import_cache(tmp_path / "out", other)
    assert held(other) == held(store)


def test_an_export_is_for_its_owner_only_and_never_overwrites(exported):
    assert all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in exported.iterdir())
    assert stat.S_IMODE(exported.stat().st_mode) == 0o700
    with pytest.raises(CacheError, match="not empty"):
        export_cache(SQLiteStore.open(), exported, ALL)


@pytest.mark.parametrize("name", ["part-00001.jsonl", "part-00001.safetensors", MANIFEST])
@pytest.mark.parametrize("harm", ["cut", "flip", "gone", "empty"])
def test_a_damaged_export_is_one_clear_error(exported, name, harm):
    file = exported / name
    content = bytearray(file.read_bytes())
    if harm == "flip":
        content[len(content) // 3] ^= 0x20
    if harm == "gone":
        file.unlink()
    else:
        file.write_bytes({"cut": content[:-7], "flip": content, "empty": b""}[harm])
    store = SQLiteStore.open()
    with pytest.raises(CacheError) as raised:
        import_cache(exported, store)
    assert str(exported) in str(raised.value) or "damaged" in str(raised.value)
    assert "\n" not in str(raised.value)
    assert store.stats().records == 0


def write_manifest(exported, manifest):
    (exported / MANIFEST).write_text(json.dumps({**manifest, "sha256": checksum_of(manifest)}))


def rewritten(exported, change):
    """An export whose manifest agrees with what somebody has made of its records."""
    lines = [json.loads(line) for line in (exported / "part-00001.jsonl").read_bytes().splitlines()]
    content = b"".join(json.dumps(change(line)).encode() + b"\n" for line in lines)
    (exported / "part-00001.jsonl").write_bytes(content)
    manifest = json.loads((exported / MANIFEST).read_text())
    manifest["parts"][0]["sha256"]["jsonl"] = hashlib.sha256(content).hexdigest()
    write_manifest(exported, manifest)


@pytest.mark.parametrize(
    "harm",
    [
        {"tenant": 5}, {"tenant": ""}, {"tenant": "a\nb"}, {"count": 0}, {"count": True}, {"count": 2**63},
        {"hits": -1}, {"created": "now"}, {"created": float("nan")}, {"text": None}, {"id": "x"},
    ],
)  # fmt: skip
def test_a_record_of_another_kind_is_refused_whoever_wrote_it(exported, harm):
    rewritten(exported, lambda line: {**line, **harm})
    store = SQLiteStore.open()
    with pytest.raises(CacheError):
        import_cache(exported, store)
    assert store.stats().records == 0


def test_a_newer_export_and_a_path_in_a_parts_name_are_refused(exported):
    manifest = json.loads((exported / MANIFEST).read_text())
    write_manifest(exported, {**manifest, "version": 2})
    with pytest.raises(CacheMismatchError, match="format 2"):
        import_cache(exported, SQLiteStore.open())
    manifest["parts"][0]["name"] = "../out/part-00001"
    write_manifest(exported, manifest)
    with pytest.raises(CacheError, match="damaged"):
        import_cache(exported, SQLiteStore.open())
