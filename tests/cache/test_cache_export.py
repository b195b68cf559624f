"""Export and import: what was stored comes back, for another tokenizer or embedder too; hostile files are refused."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.cache_commands import run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from precedent.cache import Completion, Selection, SpeculationCache, SQLiteStore
from precedent.cache.embedder import embed_one, identity_of
from precedent.cache.exports import FILE, NO_TEXT, Imported, export_cache, import_cache, read_export
from precedent.errors import CacheError, CacheMismatchError
from precedent.text.codec import TokenizerCodec
from precedent_testing.embedders import HashEmbedder
from precedent_testing.tiny_models import byte_tokenizer

ALL = Selection()
EMBEDDER = HashEmbedder()


def record(*token_ids: int, query: str = "a query", **fields: Any) -> Completion:
    values = {"tokenizer": "tok", "model": "model", "text": f"text {token_ids}", "created": 1.7e9, **fields}
    vector = embed_one(EMBEDDER, query) if query.strip() else None
    return Completion(token_ids, query=query, vector=vector, **values)


def stored(records: list[Completion]) -> SQLiteStore:
    store = SQLiteStore.open()
    store.restore(records, identity_of(EMBEDDER))
    return store


def imported(folder: Path, store: SQLiteStore, **options: Any) -> Imported:
    return import_cache(read_export(folder), store, **options)


def held(store: SQLiteStore) -> list[tuple[Completion, bytes | None]]:
    """Everything in a store but the ids."""
    return [(replace(one, id=0), one.vector_bytes) for one in store.records(ALL, 0, 10**6)]


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    store = stored([record(1, 2), record(3, query="", tenant="b"), record(5, query="other")])
    assert export_cache(store, tmp_path / "out", ALL) == 3
    return tmp_path / "out"


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
COUNTERS = st.integers(0, 2**63 - 1)
RECORDS = st.builds(
    lambda ids, query, **fields: record(*ids, query=query, **fields),
    st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=6),
    TEXTS,
    tenant=st.text(st.sampled_from("ab %'_é"), min_size=1, max_size=3),
    tokenizer=st.sampled_from(["tok", "other tok"]),
    created=st.floats(0, 4e9),
    count=st.integers(1, 2**63 - 1),
    **dict.fromkeys(("model", "text", "prompt_fingerprint", "tools", "workflow_step"), TEXTS),
    **dict.fromkeys(("hits", "accepted", "rejected"), COUNTERS),
)


@given(records=st.lists(RECORDS, max_size=8))
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_was_exported_comes_back_to_the_last_bit(
    records: list[Completion], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("export") / "out"
    store, other = stored(records), SQLiteStore.open()
    export_cache(store, folder, ALL)
    for expected_new in (len(held(store)), 0):  # the second time changes nothing
        found = imported(folder, other)
        assert (found.read, found.filled.stored) == (len(held(store)), expected_new)
        assert held(other) == held(store)
        assert other.embedder() == store.embedder()


def test_a_tokenizer_that_differs_writes_the_texts_anew(tmp_path: Path) -> None:
    """Ids of its own stay, even those that it would not write: models do not write canonically."""
    codec, other = TokenizerCodec(byte_tokenizer()), SQLiteStore.open()
    own = record(1, 2, 3, tokenizer=codec.fingerprint, text="abc")
    export_cache(stored([record(1, text="Grüße"), record(2, text=""), own]), tmp_path / "out", ALL)
    found = imported(tmp_path / "out", other, tokenizer=codec, embedder=EMBEDDER)
    assert (found.read, found.rewritten, found.filled.stored, found.skipped) == (3, 1, 2, {NO_TEXT: 1})
    (anew,) = other.list(Selection(containing="Grüße"), None)
    assert (anew.tokenizer, anew.model, anew.prompt_fingerprint) == (codec.fingerprint, "", "")
    assert (codec.decode(anew.token_ids[:-1]), anew.token_ids[-1]) == (anew.text, codec.end_token_id)
    assert other.list(Selection(containing="abc"), None)[0].token_ids == (1, 2, 3)
    again = imported(tmp_path / "out", other, tokenizer=codec, embedder=EMBEDDER)
    assert (again.filled.stored, again.filled.known) == (0, 2)


class CountingEmbedder(HashEmbedder):
    num_texts = 0

    def embed(self, texts):
        self.num_texts += len(texts)
        return super().embed(texts)


def test_another_embedder_makes_the_vectors_anew_and_each_text_once(exported: Path) -> None:
    other, embedder = SQLiteStore.open(), CountingEmbedder(salt="another")
    for _ in range(2):
        imported(exported, other, embedder=embedder)
        assert (other.embedder(), embedder.num_texts) == (identity_of(embedder), 2)
    for one in other.records(ALL, 0, 9):
        if one.vector is not None:
            np.testing.assert_allclose(one.vector, embed_one(embedder, one.query), atol=1e-6)


def test_an_embedder_that_is_not_the_caches_own_is_refused(exported: Path) -> None:
    other, theirs = SQLiteStore.open(), HashEmbedder(salt="theirs")
    other.insert(Completion((9,), "tok", "model"), embed_one(theirs, "q"), identity_of(theirs))
    with pytest.raises(CacheMismatchError):
        imported(exported, other, embedder=EMBEDDER)
    assert other.stats().records == 1


def test_a_tenant_may_take_the_place_of_the_recorded_one(exported: Path) -> None:
    other = SQLiteStore.open()
    imported(exported, other, tenant="moved")
    assert {one.tenant for one in other.list(ALL, None)} == {"moved"}
    with pytest.raises(CacheError, match="not printable"):
        imported(exported, other, tenant="a\nb")


def test_only_the_selected_are_exported(tmp_path: Path) -> None:
    store = stored([record(1, tenant="a"), record(2, tenant="b"), record(3, tenant="b", created=1e9)])
    export_cache(store, tmp_path / "out", Selection(tenant="b", before=1.5e9))
    other = SQLiteStore.open()
    imported(tmp_path / "out", other)
    assert [one.token_ids for one in other.list(ALL, None)] == [(3,)]


def test_an_export_is_for_its_owner_only_and_never_overwrites(exported: Path) -> None:
    assert [(file.name, stat.S_IMODE(file.stat().st_mode)) for file in exported.iterdir()] == [(FILE, 0o600)]
    assert stat.S_IMODE(exported.stat().st_mode) == 0o700
    with pytest.raises(CacheError, match="not empty"):
        export_cache(SQLiteStore.open(), exported, ALL)


def test_a_folder_that_cannot_be_made_is_named(exported: Path) -> None:
    with pytest.raises(CacheError, match=f"cannot export into {exported / FILE / 'out'}: .*[Nn]ot a directory"):
        export_cache(SQLiteStore.open(), exported / FILE / "out", ALL)


# --- damaged and hostile files ---------------------------------------------------------------------------------------


def refused(exported: Path) -> str:
    """The one line with which the command ends; nothing is stored."""
    other = exported.with_name("other")
    result = run("import", other, exported)
    assert result.exit_code == 2, result
    assert result.stderr.count("\n") == 1, result.stderr
    assert len(result.stderr) < 1000
    if other.exists():
        with SpeculationCache.open(other, embedder=EMBEDDER) as cache:
            assert cache.stats().records == 0
    return result.stderr


def rewritten(exported: Path, change: Callable[[list[Any]], object]) -> None:
    """Change the lines of an export, and give it the checksum that it then has."""
    lines = [json.loads(line) for line in (exported / FILE).read_bytes().splitlines()][:-1]
    change(lines)
    content = b"".join((line if isinstance(line, str) else json.dumps(line)).encode() + b"\n" for line in lines)
    trailer = {"records": len(lines) - 1, "sha256": hashlib.sha256(content).hexdigest()}
    (exported / FILE).write_bytes(content + json.dumps(trailer).encode() + b"\n")


@pytest.mark.parametrize("harm", ["cut", "cut in a line", "flip", "empty"])
def test_a_damaged_export_is_one_clear_error(exported: Path, harm: str) -> None:
    content = (exported / FILE).read_bytes()
    flipped = bytearray(content)
    flipped[len(content) // 3] ^= 0x20
    cut = b"".join(content.splitlines(keepends=True)[:-1])
    (exported / FILE).write_bytes({"cut": cut, "cut in a line": content[:-7], "flip": flipped, "empty": b""}[harm])
    assert "completions.jsonl is not what an export wrote" in refused(exported)
    (exported / FILE).unlink()
    assert "is not a finished export" in refused(exported)


DEEP = "[" * 100_000 + "]" * 100_000
NOT_FINITE = base64.b64encode(np.full(EMBEDDER.dimension, np.nan, "<f4").tobytes()).decode()


@pytest.mark.parametrize(
    "harm",
    [
        {"tenant": 5}, {"tenant": ""}, {"tenant": "a\nb"}, {"count": 0}, {"count": True}, {"count": 2**63},
        {"hits": -1}, {"created": "now"}, {"created": float("nan")}, {"text": None}, {"id": "x"}, {"query": 1e999},
        {"token_ids": None}, {"token_ids": [[1, 2]]}, {"token_ids": [1.0]}, {"token_ids": [True]}, {"token_ids": [-1]},
        {"token_ids": [2**31]}, {"token_ids": []}, {"vector": "x"}, {"vector": 7}, {"vector": "AAAA"},
        {"vector": "AADAfw=="}, {"vector": "AACAPw=="}, {"vector": NOT_FINITE},
    ],
)  # fmt: skip
def test_a_record_of_another_kind_is_refused_whoever_wrote_it(exported: Path, harm: dict[str, Any]) -> None:
    rewritten(exported, lambda lines: lines[1].update(harm))
    refused(exported)


@pytest.mark.parametrize("line", [DEEP, "[]", "7", "null", '"text"', '{"query": ' + DEEP + "}"])
@pytest.mark.parametrize("place", [0, 1], ids=["the first line", "a record"])
def test_a_line_of_another_kind_is_refused(exported: Path, line: str, place: int) -> None:
    rewritten(exported, lambda lines: lines.__setitem__(place, line))
    assert "completions.jsonl is not what an export wrote" in refused(exported)


@pytest.mark.parametrize(
    "embedder", [{}, [], "x", {"name": 1, "fingerprint": "x", "dimension": -4}, {"deep": [[[[]]]]}]
)
def test_an_embedder_of_another_kind_is_refused(exported: Path, embedder: Any) -> None:
    rewritten(exported, lambda lines: lines[0].update(embedder=embedder))
    assert "its record of the embedder is" in refused(exported)


def test_another_format_is_refused(exported: Path) -> None:
    rewritten(exported, lambda lines: lines[0].update(version=2))
    with pytest.raises(CacheMismatchError, match="format 2"):
        read_export(exported)
    rewritten(exported, lambda lines: lines[0].update(format="notes"))
    assert "another format" in refused(exported)


@pytest.mark.skipif(os.name != "posix", reason="sparse files, pipes and links")
@pytest.mark.parametrize("kind", ["pipe", "link", "folder", "sparse"])
def test_what_is_no_plain_file_of_bounded_lines_is_not_read(exported: Path, kind: str) -> None:
    """Thirty gigabytes of nothing take no room on the disk, and a pipe that nobody writes to never ends."""
    file = exported / FILE
    file.unlink()
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "link":
        file.symlink_to("/dev/zero")
    elif kind == "folder":
        file.mkdir()
    else:
        with file.open("wb") as opened:
            opened.truncate(30 * 10**9)
    assert FILE in refused(exported)
