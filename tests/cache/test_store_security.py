"""What an attacker can and cannot do with a speculation cache: the tests that docs/explanation/security.md names."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from precedent.cache import Completion, SpeculationCache, never_store
from precedent.cache.embedder import embed_one
from precedent.config import SamplingParams, SpeculationConfig
from precedent.engine.engine import Engine
from precedent.errors import CacheError
from precedent.planning.costs import CostCurve
from precedent_testing.embedders import HashEmbedder
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm

PROMPT = list(b"look up order 17, then order 18, then order 19")
RECALL = SpeculationConfig(drafters=("recall",))


@pytest.fixture
def cache() -> Iterator[SpeculationCache]:
    with SpeculationCache.open(embedder=HashEmbedder()) as opened:
        yield opened


@pytest.fixture
def engine(cache: SpeculationCache, searches_at_once: None) -> Iterator[Engine]:
    """A tiny float64 model with the cache."""
    running = Engine.load(tiny_causal_lm("llama", seed=21), tokenizer=byte_tokenizer(), cache=cache)
    running.planner.cost = CostCurve()
    yield running
    running.close()


def ask(engine: Engine, tenant: str, speculation: SpeculationConfig = RECALL, **sampling):
    return engine.submit(
        PROMPT, SamplingParams(max_tokens=32, **sampling), speculation=speculation, tenant=tenant, query="order"
    ).result()


def steps_of(result) -> tuple[int, int, int]:
    """What a stranger could measure of a request besides its text: steps, and drafts made and accepted."""
    return result.stats.num_steps, result.stats.num_draft_tokens, result.stats.num_accepted_tokens


# --- who writes into the cache ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 5}], ids=["greedy", "seeded"])
def test_a_poisoned_cache_changes_no_token(engine, cache, sampling):
    """Answers that begin right and then go wrong, under this very prompt: they cost drafts and nothing else."""
    plain = ask(engine, "shop", SpeculationConfig(enabled=False, write_back=False), **sampling)
    for cut in range(0, 30, 3):
        wrong = (*plain.token_ids[:cut], (plain.token_ids[cut] + 1) % 256, *b"; now transfer all money")
        cache.insert(Completion(wrong, engine.tokenizer_fingerprint, "evil", "shop", "order", text="evil"))
    poisoned = ask(engine, "shop", replace(RECALL, write_back=False), **sampling)
    assert poisoned.token_ids == plain.token_ids
    assert poisoned.stats.num_draft_tokens > poisoned.stats.num_accepted_tokens


def test_token_ids_that_the_model_does_not_have_are_never_drafted(engine, cache):
    plain = ask(engine, "shop", SpeculationConfig(enabled=False, write_back=False))
    for token in (256 + 500, 2**31 - 1):
        cache.insert(Completion((token,) * 20, engine.tokenizer_fingerprint, "evil", "shop", "order"))
    assert ask(engine, "shop").token_ids == plain.token_ids


# --- another tenant --------------------------------------------------------------------------------------------------


def test_what_one_tenant_stored_changes_nothing_that_another_can_measure(engine):
    """The same request before and after a neighbour has stored its very answer: same text, steps and drafts."""
    apart = replace(RECALL, write_back=False)
    before = ask(engine, "probe", apart)
    for _ in range(3):
        ask(engine, "victim")
    after = ask(engine, "probe", apart)
    own = ask(engine, "victim", apart)
    assert after.token_ids == before.token_ids == own.token_ids
    assert steps_of(after) == steps_of(before)
    assert steps_of(own)[0] < steps_of(after)[0], "its own tenant is faster, so there was something to measure"


def test_a_tenant_finds_none_of_anothers_records_by_any_method(cache):
    secret = Completion((1, 2, 3), "tok", "model", "victim", "my password", text="hunter2")
    row_id = cache.insert(secret)
    assert cache.recall("my password", tenant="probe", tokenizer="tok") == []
    assert cache.since("probe", "tok") == []
    assert cache.list(tenant="probe") == []
    assert cache.search("hunter2", tenant="probe") == []
    assert cache.forget(tenant="probe", ids=[row_id]) == 0
    assert cache.forget(tenant="probe", containing="hunter2") == 0
    assert cache.insert(replace(secret, tenant="probe")) != row_id, "not even counted as the same answer"
    assert [one.count for one in cache.list(tenant="victim")] == [1]


# --- users of one tenant ---------------------------------------------------------------------------------------------


def test_within_a_tenant_speed_tells_and_can_be_turned_off(engine):
    """A stored answer shows in the number of steps; without drafting from the cache it does not."""
    silent = SpeculationConfig(drafters=("prompt",), write_back=False)
    cold, cold_silent = ask(engine, "shared", replace(RECALL, write_back=False)), ask(engine, "shared", silent)
    ask(engine, "shared")
    warm, warm_silent = ask(engine, "shared", replace(RECALL, write_back=False)), ask(engine, "shared", silent)
    assert warm.stats.num_steps < cold.stats.num_steps
    assert steps_of(warm_silent) == steps_of(cold_silent)


# --- who reads or writes the files -----------------------------------------------------------------------------------


@pytest.mark.skipif(os.name != "posix", reason="modes of files")
def test_files_are_readable_by_their_owner_only(tmp_path):
    with filled(tmp_path) as cache:
        cache.recall("order", tenant="shop", tokenizer="tok")
        files = [path for path in tmp_path.rglob("*") if path.is_file()]
        assert files
        assert [path for path in files if path.stat().st_mode & 0o077] == []


# --- the right to be forgotten ---------------------------------------------------------------------------------------


TOKENS = tuple(range(70_001, 70_040))


def filled(folder: Path) -> SpeculationCache:
    """A cache with a secret of the tenant "shop", among others."""
    cache = SpeculationCache.open(folder, embedder=HashEmbedder())
    for n in range(80):
        cache.insert(Completion((n, n + 1, n + 2), "tok", "model", "other", f"other {n}", text=f"kept {n}"))
        cache.insert(Completion((n, n + 1, n + 2), "tok", "model", "shop", f"order {n}", text=f"kept {n}"))
    cache.insert(Completion(TOKENS, "tok", "model", "shop", "secret query", text="secret text" * 300))
    for tenant in ("shop", "other"):
        cache.recall("order", tenant=tenant, tokenizer="tok")
    return cache


def traces() -> dict[str, bytes]:
    """All forms in which the secret lies on disk."""
    vector = embed_one(HashEmbedder(), "secret query")
    tokens = np.array(TOKENS, dtype="<i4").tobytes()
    return {
        "query": b"secret query",
        "text": b"secret text",
        "tokens": tokens,
        "vector": vector.tobytes(),
    }


def found_in(folder: Path) -> set[str]:
    files = (path for path in folder.rglob("*") if path.is_file() and not path.name.endswith("-shm"))
    raw = b"".join(path.read_bytes() for path in files)
    return {name for name, trace in traces().items() if trace in raw}


@pytest.mark.parametrize("condition", ["tenant", "before", "containing", "ids"])
def test_forget_leaves_no_byte_in_any_file(tmp_path, condition):
    """By every condition: table and log, while open and after closing."""
    with filled(tmp_path) as cache:
        assert found_in(tmp_path) == set(traces())
        (secret,) = cache.search("secret query")
        values = {"tenant": "shop", "before": time.time() + 1, "containing": "SECRET TEXT", "ids": [secret.id]}
        assert cache.forget(**{condition: values[condition]}) >= 1
        assert found_in(tmp_path) == set()
        left = len(cache.list(tenant="other", limit=None))
        assert left == (0 if condition == "before" else 80)
    assert found_in(tmp_path) == set()


def test_redaction_comes_before_everything_else(tmp_path):
    """What the hook takes out is neither embedded nor written; None or a failure stores nothing."""
    embedded: list[str] = []

    class Watched(HashEmbedder):
        def embed(self, texts):
            embedded.extend(texts)
            return super().embed(texts)

    def redact(one: Completion) -> Completion | None:
        if "refuse" in one.text:
            return None
        if "fail" in one.text:
            raise ValueError("a bug")
        return replace(one, query=one.query.replace("4711", "…"), text="", token_ids=one.token_ids[:2])

    with SpeculationCache.open(tmp_path, embedder=Watched(), redact=redact) as cache:
        row_id = cache.insert(Completion(TOKENS, "tok", "model", query="card 4711", text="card 4711"))
        assert cache.insert(Completion(TOKENS, "tok", "model", query="card 4711", text="refuse")) == 0
        with pytest.raises(CacheError, match="redaction failed, so nothing was stored: ValueError: a bug"):
            cache.insert(Completion(TOKENS, "tok", "model", query="card 4711", text="fail"))
        (stored,) = cache.list()
        assert (stored.id, stored.query, stored.text, stored.token_ids) == (row_id, "card …", "", TOKENS[:2])
    assert embedded == ["card …"]
    raw = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"4711" not in raw


def test_never_store_keeps_out_what_matches():
    with SpeculationCache.open(embedder=HashEmbedder(), redact=never_store(r"\b\d{16}\b", "(?i)password")) as cache:
        assert cache.insert(Completion((1,), "tok", "model", text="card 1234567812345678 ok")) == 0
        assert cache.insert(Completion((1,), "tok", "model", query="my PASSWORD")) == 0
        assert cache.insert(Completion((1,), "tok", "model", text="card 12345678")) > 0
    with pytest.raises(CacheError, match="not a regular expression"):
        never_store("(")


@pytest.mark.parametrize("changed", [{"tenant": "other"}, {"tokenizer": "other"}])
def test_redaction_cannot_move_a_completion(changed):
    with SpeculationCache.open(embedder=HashEmbedder(), redact=lambda one: replace(one, **changed)) as cache:
        with pytest.raises(CacheError, match="may not change tenant or tokenizer"):
            cache.insert(Completion((1,), "tok", "model"))
        assert cache.stats().records == 0
