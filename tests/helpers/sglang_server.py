"""SGLang 0.5.23's HTTP interface for external corpora, obeyed to the letter, over `httpx.MockTransport`.

What the real one leaves undefined fails here: a removal during a load. Unknown fields are refused, as are ids that its
listing could not carry. Tokens are words.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx

ADDED = {"corpus_id", "file_path", "documents"}


class FakeSGLangServer:
    """A server with a bound for all corpora; `loading` is called in the middle of each load, on its thread."""

    def __init__(self, max_tokens: int = 1000, key: str | None = None, **info: Any) -> None:
        self.max_tokens, self.key = max_tokens, key
        self.corpora: dict[str, list[str]] = {}
        self.requests: list[tuple[str, Any]] = []
        self.loading: Callable[[], None] = lambda: None
        self.busy = False
        self.told = {
            "version": "0.5.23",
            "speculative_algorithm": "NGRAM",
            "speculative_ngram_external_sam_budget": 4,
            "speculative_ngram_external_corpus_max_tokens": max_tokens,
            **info,
        }

    @property
    def transport(self) -> httpx.MockTransport:
        return httpx.MockTransport(self)

    def asked(self, path: str) -> int:
        """How often a path was asked for."""
        return sum(path == one for one, _ in self.requests)

    def __call__(self, request: httpx.Request) -> httpx.Response:
        path, body = request.url.path, json.loads(request.content) if request.content else None
        self.requests.append((path, body))
        if self.key is not None and request.headers.get("authorization") != f"Bearer {self.key}":
            return httpx.Response(401, json={"error": "Unauthorized"})
        routes = {
            ("GET", "/server_info"): lambda _: httpx.Response(200, json=self.told),
            ("GET", "/list_external_corpora"): self._list,
            ("POST", "/add_external_corpus"): self._add,
            ("POST", "/remove_external_corpus"): self._remove,
        }
        answer = routes.get((request.method, path))
        return httpx.Response(404, json={"detail": "Not Found"}) if answer is None else answer(body)

    def _list(self, _: Any) -> httpx.Response:
        counts = {name: _tokens(documents) for name, documents in self.corpora.items()}
        return httpx.Response(200, json={"success": True, "corpus_token_counts": counts, "message": ""})

    def _add(self, body: Any) -> httpx.Response:
        if not isinstance(body, dict) or body.keys() - ADDED:
            return _refused(f"Unexpected keyword argument {sorted(body.keys() - ADDED)}")
        name, documents = body.get("corpus_id"), body.get("documents")
        if not isinstance(documents, list) or not all(isinstance(one, str) for one in documents):
            return _refused("Either file_path or documents must be provided.")
        assert isinstance(name, str)
        assert name.isprintable(), "listing separates ids by tabs and newlines"
        if self.busy:
            return _refused("Another corpus load is already in progress.")
        taken = [one for end, one in enumerate(documents, 1) if _tokens(documents[:end]) <= self.max_tokens]
        self.busy = True
        try:
            self.loading()
            return self._loaded(name, taken, cut=len(taken) < len(documents))
        finally:
            self.busy = False

    def _loaded(self, name: str, documents: list[str], cut: bool) -> httpx.Response:
        if name in self.corpora:
            return _refused(f"External corpus '{name}' already exists. Remove it before adding a new corpus.")
        tokens, left = _tokens(documents), self.max_tokens - sum(map(_tokens, self.corpora.values()))
        if not tokens:
            return _refused("External corpus is empty — no tokens were loaded.")
        if tokens > left:
            return _refused(
                f"External ngram corpus exceeds the remaining token budget ({left}) after loading 0 tokens."
            )
        self.corpora[name] = documents
        message = f"Loaded corpus '{name}' with {tokens} tokens."
        message += f" (truncated: exceeded {self.max_tokens} token limit)" if cut else ""
        return httpx.Response(
            200, json={"success": True, "corpus_id": name, "message": message, "loaded_token_count": tokens}
        )

    def _remove(self, body: Any) -> httpx.Response:
        assert not self.busy, "removing during a load is undefined in SGLang"
        assert body.keys() == {"corpus_id"}
        if not body["corpus_id"]:
            return _refused("corpus_id is required.")
        self.corpora.pop(body["corpus_id"], None)
        return httpx.Response(200, json={"success": True, "message": f"Removed corpus '{body['corpus_id']}'."})


def on(fake: FakeSGLangServer) -> list[list[str]]:
    """The documents of each corpus of ours."""
    return [documents for name, documents in fake.corpora.items() if name.startswith("precedent:")]


def _tokens(documents: list[str]) -> int:
    """Words, and a separator between documents."""
    return sum(len(one.split()) for one in documents) + max(0, len(documents) - 1)


def _refused(message: str) -> httpx.Response:
    return httpx.Response(400, json={"success": False, "corpus_id": "", "message": message, "loaded_token_count": 0})
