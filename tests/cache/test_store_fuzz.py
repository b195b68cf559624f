"""Hostile records and files: a clear error each or the right answer, and nothing else harmed."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.quick_store import quick_store

from precedent.cache import Completion, EmbedderIdentity, Selection, verify_cache
from precedent.errors import CacheError
from precedent_testing.store_contract import EMBEDDER, completion, unit_vector

HOSTILE_TEXTS = (
    *("", " ", "\x00", "a\x00b", "'; DROP TABLE completion; --", '" OR ""="', "NEAR(a b) AND NOT c*", "%_[^]"),
    *("../../etc/passwd", "..\\..\\windows", "/dev/null", "C:\\", "$(rm -rf /)", "\r\n", "-1", "1e999", "NaN"),
    *("\u202eevil", "\ud800", "e\u0301", "\u0130", "\ufb03", "𝄞" * 50, "x" * 10_000, "{}", "[]", "null"),
)
HOSTILE_IDS = (0, 1, -1, 2**31 - 1, 2**31, 2**63, -(2**31), 2**100)
CANARY = completion(4711, tenant="canary", query="canary", text="canary")


def hostile_completion(choose: random.Random) -> Completion:
    """Each field harmless or hostile."""
    texts = {
        name: choose.choice(HOSTILE_TEXTS) if choose.random() < 0.4 else f"{name} {choose.randrange(100)}"
        for name in ("tokenizer", "model", "tenant", "query", "prompt_fingerprint", "tools", "workflow_step", "text")
    }
    hostile = choose.random() < 0.2
    tokens = tuple(
        choose.choice(HOSTILE_IDS) if hostile else choose.randrange(50_000) for _ in range(choose.randrange(9))
    )
    return Completion(token_ids=tokens, **texts)


def hostile_vector(choose: random.Random) -> tuple[np.ndarray, EmbedderIdentity | None]:
    vector = unit_vector(choose.randrange(1000))
    if choose.random() < 0.7:
        return vector, EMBEDDER
    wrong = (vector[:2], np.zeros((0,), np.float32), np.zeros((4, 4), np.float32), np.ones(9999, np.float32))
    identities = (None, EmbedderIdentity("x", "y", 4), EmbedderIdentity("test", EMBEDDER.fingerprint, 2))
    return (choose.choice(wrong), EMBEDDER) if choose.random() < 0.5 else (vector, choose.choice(identities))


def as_written(new: Completion) -> Completion:
    """A completion with lone surrogates replaced, as the store promises."""
    texts = {
        name: getattr(new, name).encode("utf-8", "replace").decode() for name in ("query", "text", "tools", "model")
    }
    return replace(new, **texts)


def one_line(error: CacheError) -> bool:
    """True; a refusal is one line."""
    assert "\n" not in str(error).strip("\n")
    return True


def fuzz_records(folder: Path, count: int) -> dict[str, int]:
    choose, store, refused, stored = random.Random(1), quick_store(folder / "cache"), 0, 0
    canary = store.insert(CANARY, unit_vector(1), EMBEDDER)
    for _ in range(count):
        new, (vector, embedder) = hostile_completion(choose), hostile_vector(choose)
        try:
            row_id = store.insert(new, vector, embedder)
        except CacheError as error:
            refused += one_line(error)
            continue
        stored += 1
        (found,) = store.list(Selection(ids=(row_id,)))
        expected = as_written(new)
        assert (found.token_ids, found.tenant, found.query) == (expected.token_ids, expected.tenant, expected.query)
        if found.count == 1:
            assert (found.text, found.tools, found.model) == (expected.text, expected.tools, expected.model)
        if expected.query:
            assert row_id in {one.id for one in store.list(Selection(tenant=new.tenant, containing=expected.query))}
    (found,) = store.since("canary", "tok", 0)
    assert (found.id, found.token_ids, found.text) == (canary, (4711,), "canary")
    store.close()
    assert [path.name for path in folder.iterdir()] == ["cache"], "nothing was written elsewhere"
    assert verify_cache(folder / "cache").findings == ()
    return {"records refused": refused, "records stored": stored}


def test_hostile_records(tmp_path):
    counts = fuzz_records(tmp_path, 400)
    assert min(counts.values()) > 50


@pytest.mark.stress
def test_five_thousand_hostile_records(tmp_path):
    print(fuzz_records(tmp_path, 5_000))
