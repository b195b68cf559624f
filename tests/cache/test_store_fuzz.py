"""Hostile records: a clear error each or the right answer, and nothing else harmed."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.quick_store import quick_store

from precedent.cache import Completion, EmbedderIdentity, Selection, verify_cache
from precedent.cache.records import TEXTS
from precedent.errors import CacheError
from precedent_testing.store_contract import EMBEDDER, completion, unit_vector

HOSTILE_TEXTS = (
    *("", " ", "\x00", "a\x00b", "'; DROP TABLE completion; --", '" OR ""="', "NEAR(a b) AND NOT c*", "%_[^]"),
    *("../../etc/passwd", "..\\..\\windows", "/dev/null", "C:\\", "$(rm -rf /)", "\r\n", "-1", "1e999", "NaN"),
    *("\u202eevil", "\ud800", "e\u0301", "\u0130", "\ufb03", "𝄞" * 50, "x" * 10_000, "{}", "[]", "null"),
)
HOSTILE_IDS = (0, 1, -1, 2**31 - 1, 2**31, 2**63, -(2**31), 2**100)
VECTORS = (unit_vector(1)[:2], np.zeros((0,), np.float32), np.zeros((4, 4), np.float32), np.ones(9999, np.float32))
IDENTITIES = (None, EmbedderIdentity("x", "y", 4), EmbedderIdentity("test", EMBEDDER.fingerprint, 2))


def hostile(choose: random.Random) -> tuple[Completion, np.ndarray, EmbedderIdentity | None]:
    """A completion, its vector and whose it is, each harmless or hostile."""
    texts = {name: choose.choice((f"{name} {choose.randrange(100)}", choose.choice(HOSTILE_TEXTS))) for name in TEXTS}
    ids = HOSTILE_IDS if choose.random() < 0.2 else range(50_000)
    tokens = tuple(choose.choice(ids) for _ in range(choose.randrange(9)))
    vector = unit_vector(choose.randrange(1000)) if choose.random() < 0.85 else choose.choice(VECTORS)
    return Completion(tokens, **texts), vector, EMBEDDER if choose.random() < 0.85 else choose.choice(IDENTITIES)


def fuzz(folder: Path, count: int) -> tuple[int, int]:
    """Records refused and stored."""
    choose, store, refusals = random.Random(1), quick_store(folder / "cache"), []
    canary = store.insert(completion(4711, tenant="canary"), unit_vector(1), EMBEDDER)
    for _ in range(count):
        new, vector, embedder = hostile(choose)
        try:
            row_id = store.insert(new, vector, embedder)
        except CacheError as error:
            refusals.append(str(error))
            continue
        (found,) = store.list(Selection(ids=(row_id,)))
        expected = replace(new, **{name: getattr(new, name).encode("utf-8", "replace").decode() for name in TEXTS})
        assert (found.token_ids, found.tenant, found.query) == (expected.token_ids, expected.tenant, expected.query)
        if found.count == 1:
            assert (found.text, found.tools, found.model) == (expected.text, expected.tools, expected.model)
        if expected.query:
            assert row_id in {one.id for one in store.list(Selection(tenant=new.tenant, containing=expected.query))}
    (found,) = store.since("canary", "tok", 0)
    assert (found.id, found.token_ids) == (canary, (4711,))
    store.close()
    assert [path.name for path in folder.iterdir()] == ["cache"], "nothing was written elsewhere"
    assert verify_cache(folder / "cache").findings == ()
    assert not any("\n" in refusal.strip("\n") for refusal in refusals), "each is one line"
    return len(refusals), count - len(refusals)


@pytest.mark.parametrize("count", [400, pytest.param(5_000, marks=pytest.mark.stress)])
def test_hostile_records(tmp_path: Path, count: int) -> None:
    assert min(fuzz(tmp_path, count)) > count / 15
