"""Keeps an SGLang server's external corpus filled with what a tenant's coming requests will want."""

from __future__ import annotations

import hashlib
import logging
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Lock
from typing import TYPE_CHECKING, Self
from urllib.parse import quote, unquote

from precedent.cache import Completion, SpeculationCache
from precedent.cache.records import check_tenant
from precedent.errors import CacheError, ConfigError, PrecedentError, UnsupportedError
from precedent_engines.service import StoreHealth, check_tokenizer
from precedent_engines.tokenizer import codec_of
from precedent_sglang.plugin import check_version
from precedent_sglang.server import NoAnswer, ServerError, ServerInfo, SGLangServer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_log = logging.getLogger(__name__)

PREFIX = "precedent"
MAX_TOKENS = 50_000
NEAREST = 64
"""Completions recalled for each query."""

REMEMBERED = 32
"""Queries of coming requests that a background refill looks at."""


@dataclass(frozen=True, slots=True)
class Filled:
    """What a refill left on the server.

    `num_tokens` is SGLang's own count. `truncated` says that it left documents out; `kept` are older corpora that could
    not be removed, because a load may still be under way.
    """

    corpus_id: str | None
    num_documents: int
    num_tokens: int
    truncated: bool = False
    kept: tuple[str, ...] = ()


class Corpora:
    """Fills one external corpus of one SGLang server from one tenant's completions; one client per server.

    SGLang drafts for every request from every corpus, so a server belongs to one tenant, and others are refused.
    `tokenizer` is the one of the store's completions. `max_tokens` bounds the corpus; the server must have room for
    two, since the new one is loaded before the old one goes. Any thread may use it.

    Raises UnsupportedError for an SGLang of another version or without n-gram speculation and a budget for corpora,
    ConfigError for too small a server, CacheMismatchError for a store of other tokenizers only, CacheError for an
    invalid tenant, and ServerError if the server does not answer.
    """

    def __init__(
        self,
        server: SGLangServer | str,
        cache: SpeculationCache,
        tokenizer: PreTrainedTokenizerBase | str | Path,
        *,
        tenant: str,
        max_tokens: int = MAX_TOKENS,
        pause: float = 10.0,
        executor: Executor | None = None,
    ) -> None:
        check_tenant(tenant)
        self.tenant, self.health, self.num_failures = tenant, StoreHealth(), 0
        self._server = SGLangServer(server) if isinstance(server, str) else server
        self._cache, self._max_tokens, self._pause = cache, max_tokens, pause
        _check(self._server.info(), max_tokens)
        self._tokenizer = codec_of(tokenizer)[0].fingerprint
        check_tokenizer(cache, self._tokenizer, self.health)
        self._executor = executor or ThreadPoolExecutor(1, "precedent-corpora")
        self._filling, self._noting, self._closed = Lock(), Lock(), Event()
        self._expected: deque[str] = deque(maxlen=REMEMBERED)
        self._scheduled = self._failing = False
        self._unanswered: str | None = None

    def refill(self, queries: Sequence[str], *, tenant: str) -> Filled:
        """Have the completions nearest to `queries` on the server, and no older corpus of ours; returns when done.

        Queries are texts as `precedent.text.query.recall_query` builds them; without any, the latest completions are
        taken. Raises UnsupportedError for another tenant's name, CacheError if the store fails, LoadInProgress while
        another corpus loads, and ServerError; what was loaded before then stays.
        """
        self._check_tenant(tenant)
        documents = self._chosen(queries)
        with self._filling:
            return self._fill(documents)

    def expect(self, query: str, *, tenant: str) -> None:
        """Note what a coming request is about, and refill in the background: at most once in `pause` seconds.

        A store or a server that is away is logged once and counted. Raises UnsupportedError for another tenant's name.
        """
        self._check_tenant(tenant)
        with self._noting:
            self._expected.append(query)
            if self._scheduled or self._closed.is_set():
                return
            self._scheduled = True
        self._executor.submit(self._refill_expected)

    def close(self) -> None:
        """Finish a refill that is under way, and close the connections; the corpus stays on the server."""
        self._closed.set()
        self._executor.shutdown(wait=True)
        self._server.close()

    def _check_tenant(self, tenant: str) -> None:
        if tenant != self.tenant:
            raise UnsupportedError(
                f"the SGLang server at {self._server.base_url} drafts for tenant {self.tenant!r} only, since every "
                f"request there sees its corpora: give tenant {tenant!r} a server of its own"
            )

    def _chosen(self, queries: Sequence[str]) -> list[str]:
        try:
            found = chosen(
                self._cache, queries, tenant=self.tenant, tokenizer=self._tokenizer, max_tokens=self._max_tokens
            )
        except CacheError as error:
            self.health.note(error)
            raise
        self.health.note(None)
        return found

    def _fill(self, documents: list[str]) -> Filled:
        loaded = self._ours()
        wanted = self._named(documents) if documents else None
        if self._unanswered in loaded:
            self._unanswered = None
        truncated = False
        if wanted is not None and wanted not in loaded:
            loaded[wanted], truncated = self._add(wanted, documents)
        kept = self._removed(loaded.keys() - {wanted})
        return Filled(wanted, len(documents), loaded.get(wanted or "", 0), truncated, kept)

    def _add(self, corpus_id: str, documents: list[str]) -> tuple[int, bool]:
        try:
            added = self._server.add(corpus_id, documents)
        except NoAnswer:
            self._unanswered = corpus_id
            raise
        self._unanswered = None  # SGLang loads one at a time: an earlier load is over as well
        return added.tokens, added.truncated

    def _removed(self, corpus_ids: set[str]) -> tuple[str, ...]:
        """Remove corpora; returns those that must stay, because removing during a load is undefined in SGLang."""
        if self._unanswered is not None:
            return tuple(sorted(corpus_ids))
        for corpus_id in sorted(corpus_ids):
            self._server.remove(corpus_id)
        return ()

    def _ours(self) -> dict[str, int]:
        """Tokens of the corpora of this tenant. Raises UnsupportedError if the server has another tenant's."""
        found = {name: count for name, count in self._server.corpora().items() if name.startswith(f"{PREFIX}:")}
        others = {unquote(name.split(":")[1]) for name in found} - {self.tenant}
        if others:
            raise UnsupportedError(
                f"the SGLang server at {self._server.base_url} drafts for tenant {min(others)!r} already, and every "
                f"request there sees its corpora: give tenant {self.tenant!r} a server of its own"
            )
        return found

    def _named(self, documents: list[str]) -> str:
        """A name of the contents: who fills again after a restart finds them loaded, or loads them."""
        digest = hashlib.sha256()
        for text in sorted(documents):
            digest.update(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest())
        return f"{PREFIX}:{quote(self.tenant, safe='')}:{digest.hexdigest()[:16]}"

    def _refill_expected(self) -> None:
        with self._noting:
            self._scheduled, queries = False, list(self._expected)
        try:
            self.refill(queries, tenant=self.tenant)
            self._failing = False
        except PrecedentError as error:
            self._failed(error)
        self._closed.wait(self._pause)

    def _failed(self, error: PrecedentError) -> None:
        self.num_failures += 1
        if not self._failing and isinstance(error, ServerError | UnsupportedError):
            _log.warning("the corpora of %s were not refilled: %s", self._server.base_url, error)
        self._failing = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _check(info: ServerInfo, max_tokens: int) -> None:
    check_version(info.version)
    if info.algorithm != "NGRAM":
        raise UnsupportedError(
            f"this SGLang speculates with {info.algorithm or 'nothing'}: start it with --speculative-algorithm NGRAM"
        )
    if info.corpus_budget <= 0:
        raise UnsupportedError(
            "this SGLang never drafts from its corpora: start it with --speculative-ngram-external-sam-budget, such as "
            "half of --speculative-num-draft-tokens"
        )
    if max_tokens < 1 or 2 * max_tokens > info.corpus_tokens:
        raise ConfigError(
            f"max_tokens={max_tokens} must be a positive number, and twice that must fit into the server's "
            f"--speculative-ngram-external-corpus-max-tokens, which is {info.corpus_tokens}"
        )


def chosen(
    cache: SpeculationCache, queries: Sequence[str], *, tenant: str, tokenizer: str, max_tokens: int
) -> list[str]:
    """Texts of at most `max_tokens` tokens together, the nearest completion last.

    Last because SGLang prefers the continuation that it saw last. Without queries the tenant's latest completions are
    taken. Raises CacheError.
    """
    ranked = _nearest(cache, queries, tenant, tokenizer) if queries else cache.since(tenant, tokenizer)[::-1]
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


def _fitting(ranked: Iterable[Completion], max_tokens: int) -> Iterator[str]:
    """The texts that fit, each once; a separator counts as a token."""
    seen, left = set[str](), max_tokens
    for one in ranked:
        cost = len(one.token_ids) + 1
        if one.text and one.text not in seen and cost <= left:
            seen.add(one.text)
            left -= cost
            yield one.text
