"""Which stored completions a corpus holds: those with the requests nearest to the coming ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from precedent.cache import Completion, SpeculationCache

NEAREST = 64
"""Completions recalled for each query."""


def chosen(
    cache: SpeculationCache, queries: Sequence[str], *, tenant: str, tokenizer: str, max_tokens: int
) -> list[str]:
    """Texts of at most `max_tokens` tokens together, the nearest completion last.

    Last because SGLang prefers the continuation that it saw last. Without queries the tenant's latest completions are
    taken. Raises CacheError.
    """
    ranked = _nearest(cache, queries, tenant, tokenizer) if queries else _latest(cache, tenant, tokenizer)
    return list(_fitting(ranked, max_tokens))[::-1]


def _nearest(cache: SpeculationCache, queries: Sequence[str], tenant: str, tokenizer: str) -> Iterator[Completion]:
    similarity: dict[int, float] = {}
    for query in dict.fromkeys(queries):
        for hit in cache.recall(query, tenant=tenant, tokenizer=tokenizer, k=NEAREST):
            similarity[hit.completion_id] = max(hit.similarity, similarity.get(hit.completion_id, -1.0))
    found = {one.id: one for one in cache.among(similarity, tenant=tenant)}
    for completion_id in sorted(similarity, key=lambda each: (-similarity[each], -each)):
        if completion_id in found:  # else it was forgotten meanwhile
            yield found[completion_id]


def _latest(cache: SpeculationCache, tenant: str, tokenizer: str) -> list[Completion]:
    return cache.since(tenant, tokenizer)[::-1]


def _fitting(ranked: Iterable[Completion], max_tokens: int) -> Iterator[str]:
    """The texts that fit, each once; a separator counts as a token."""
    seen, left = set[str](), max_tokens
    for one in ranked:
        cost = len(one.token_ids) + 1
        if one.text and one.text not in seen and cost <= left:
            seen.add(one.text)
            left -= cost
            yield one.text
