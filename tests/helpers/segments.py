"""Sealed segments on disk: caches to seal, what was read of them, and what their files hold."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from precedent.cache import Completion, SQLiteStore
from precedent.cache.segments import Partition, SegmentFiles
from precedent.drafters.matching.occurrences import HIT, VoteWeights
from precedent.drafters.matching.token_index import TokenIndex, reversed_context
from precedent.drafters.recall.tenant_memory import TenantMemory

Found = Counter[tuple[int, int, tuple[int, ...]]]


def found_in(index: TokenIndex, context: list[int], limit: int = 10_000) -> Found:
    """(sequence id, length, next tokens) of every occurrence, whatever its place in the text."""
    weights = VoteWeights(np.array([(-1, 0, 0.0)], dtype=HIT), np.zeros(len(index.sequence_ids) + 1), 0.0)
    places = index.match(reversed_context(context), weights, limit)
    rows = []
    for place in places:
        text = index.text.tokens[place["position"] + 1 : place["position"] + 6].tolist()
        text = text[: next((at for at, token in enumerate(text) if token < 0), len(text))]
        rows.append((index.sequence_ids[place["slot"]], int(place["length"]), tuple(text)))
    return Counter(rows)


def whole(sequences: dict[int, list[int]]) -> TokenIndex:
    index = TokenIndex()
    for key, tokens in sequences.items():
        index.append(key, tokens)
    return index


TENANT, TOKENIZER = "shop", "tok"
SECRET = tuple(range(70_001, 70_040))


def answer(number: int) -> tuple[int, ...]:
    return (5, 6, 7, 100 + number, 8, 9, 10 + number % 3, 2)


def stored(folder: Path, count: int = 40, tenant: str = TENANT) -> SQLiteStore:
    store = SQLiteStore.open(folder)
    for number in range(count):
        store.insert(
            Completion(answer(number), TOKENIZER, "model", tenant, prompt_fingerprint=f"p{number}"), None, None
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
