"""Engines beside a PostgreSQL server: warm at their first request, and answering whether or not it is there."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.forked import run

from precedent.cache import SpeculationCache
from precedent.config import SamplingParams
from precedent.engine.engine import Engine
from precedent.planning.costs import CostCurve
from precedent_testing.embedders import HashEmbedder
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm

pytest.importorskip("precedent_postgres", reason="precedent-postgres is not installed")
from precedent.errors import CacheError
from precedent_postgres import testing

pytestmark = pytest.mark.skipif(testing.why_not() is not None, reason=str(testing.why_not()))


ELSEWHERE = """
import sys
sys.path.insert(0, sys.argv[2])
from test_postgres_engine import answered
accepted, answer = answered(sys.argv[1])
print(accepted, *answer)
"""


def answered(url: str) -> tuple[int, list[int]]:
    """Accepted tokens and answer of the first request of a new engine."""
    with SpeculationCache.open(url, embedder=HashEmbedder()) as cache:
        engine = Engine(tiny_causal_lm(scale=4.0), byte_tokenizer(), name="tiny", cache=cache, cost=CostCurve())
        prompt = list(b"an order, please: ")
        result = engine.submit(prompt, SamplingParams(max_tokens=48), query="an order").result()
        engine.close()
    return result.stats.num_accepted_tokens, list(result.token_ids)


def answered_elsewhere(url: str) -> tuple[int, list[int]]:
    """The same in a process of its own."""
    done = run(["-c", ELSEWHERE, url, Path(__file__).parent])
    assert done.returncode == 0, done.stderr
    accepted, *answer = map(int, done.stdout.split())
    return accepted, answer


def test_an_engine_in_another_process_is_warm_at_its_first_request(url):
    cold, answer = answered(url)
    warm, same = answered_elsewhere(url)
    assert same == answer
    assert warm > cold


def test_a_request_outlives_its_server(url, server):
    """Errors of the server turn drafting from the cache off and fail no generation."""
    target, tokenizer = tiny_causal_lm(scale=4.0), byte_tokenizer()
    with SpeculationCache.open(url, embedder=HashEmbedder()) as cache:
        running = Engine(target, tokenizer, name="tiny", cache=cache, cost=CostCurve())

        def answer():
            return running.submit(list(b"an order"), SamplingParams(max_tokens=24), query="an order").result().token_ids

        before = answer()
        server.stop()
        try:
            during = [answer(), answer()]
        finally:
            server.start()
        running.close()
    assert during == [before, before]


def test_what_another_engine_forgot_leaves_memory_without_a_request_also_after_an_absence(url, server):
    """The bound: one look, and after a failure the half minute for which connections rest."""
    with SpeculationCache.open(url, embedder=HashEmbedder()) as cache:
        running = Engine(tiny_causal_lm(scale=4.0), byte_tokenizer(), name="tiny", cache=cache, cost=CostCurve())
        for tenant in ("shop", "bank"):
            for _ in range(2):
                running.submit(list(b"an order"), SamplingParams(max_tokens=8), query="q", tenant=tenant).result()
        following = pytest.importorskip("precedent_server.following").Following(cache)
        following.look()
        held, _ = running.recall.held()
        server.stop()
        with pytest.raises(CacheError):
            following.look()
        server.start()
        with SpeculationCache.open(url, embedder=HashEmbedder()) as elsewhere:
            assert elsewhere.forget(tenant="shop") == 1
        with pytest.raises(CacheError, match="tried again in less than 30 s"):
            following.look()
        assert running.recall.held()[0] == held
        cache._opened._server._silent_until = 0.0  # the half minute is over
        assert following.look()
        assert running.recall.held()[0] == held - 1
        running.close()
