"""SGLang's HTTP interface for external corpora, as version 0.5.23 has it: list, add, remove."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from precedent.errors import PrecedentError

SECONDS = 300.0
"""How long a load may take: SGLang answers when the corpus is built."""

BUSY = "already in progress"
"""In SGLang's answer to a load while another one is under way."""

TRUNCATED = "(truncated:"
"""In SGLang's answer to a load of more tokens than it lets one corpus have."""


class ServerError(PrecedentError):
    """SGLang could not be reached, or refused."""


class LoadInProgress(ServerError):
    """SGLang loads one corpus at a time, and another one is under way: try again later."""


class NoAnswer(ServerError):
    """A request was sent and no answer came: what SGLang made of it is not known."""


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What a server says about itself; `corpus_tokens` bounds the tokens of all its corpora together."""

    version: str
    algorithm: str
    corpus_budget: int
    corpus_tokens: int


@dataclass(frozen=True, slots=True)
class Loaded:
    """A corpus that was added: its tokens, and whether the last documents were left out as too many."""

    tokens: int
    truncated: bool


class SGLangServer:
    """One SGLang server. Every method raises ServerError, with SGLang's own words where it has some.

    Where the server has two keys, corpora need the administrator's and `/server_info` the other one.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        admin_api_key: str | None = None,
        timeout: float = SECONDS,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self.base_url = base_url
        self._key, self._admin_key = api_key, admin_api_key or api_key
        self._client = httpx.Client(base_url=base_url, timeout=timeout, transport=transport)

    def info(self) -> ServerInfo:
        """Version and settings."""
        said = self._asked("GET", "/server_info", self._key)
        return ServerInfo(
            version=str(said.get("version", "")),
            algorithm=str(said.get("speculative_algorithm") or ""),
            corpus_budget=int(said.get("speculative_ngram_external_sam_budget") or 0),
            corpus_tokens=int(said.get("speculative_ngram_external_corpus_max_tokens") or 0),
        )

    def corpora(self) -> dict[str, int]:
        """The tokens of each corpus that is loaded, by its id; one that is still loading is not among them."""
        found = self._asked("GET", "/list_external_corpora", self._admin_key).get("corpus_token_counts")
        return dict(found or {})

    def add(self, corpus_id: str, documents: Sequence[str]) -> Loaded:
        """Load texts as a corpus; returns when it is drafted from.

        Raises LoadInProgress while another one loads, NoAnswer if the load may be under way.
        """
        said = self._asked(
            "POST", "/add_external_corpus", self._admin_key, corpus_id=corpus_id, documents=list(documents)
        )
        return Loaded(int(said.get("loaded_token_count") or 0), TRUNCATED in str(said.get("message", "")))

    def remove(self, corpus_id: str) -> None:
        """Remove a corpus; call it only while none loads."""
        self._asked("POST", "/remove_external_corpus", self._admin_key, corpus_id=corpus_id)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _asked(self, method: str, path: str, key: str | None, **body: Any) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        try:
            answer = self._client.request(method, path, json=body or None, headers=headers)
        except httpx.ConnectError as error:
            raise ServerError(f"SGLang at {self.base_url} cannot be reached: {error}") from error
        except httpx.HTTPError as error:
            raise NoAnswer(f"SGLang at {self.base_url} did not answer {path}: {error!r}") from error
        return _body(answer, path)


def _body(answer: httpx.Response, path: str) -> dict[str, Any]:
    """The JSON of an answer. Raises ServerError for a refusal and for what is not SGLang's."""
    try:
        said = answer.json()
    except ValueError:
        said = None
    if not isinstance(said, dict):
        raise ServerError(f"{path} answered {answer.status_code} without a JSON object: is this an SGLang server?")
    message = str(said.get("message") or said.get("error") or said.get("detail") or "")
    if answer.is_success and said.get("success", True):
        return said
    if BUSY in message:
        raise LoadInProgress(message)
    raise ServerError(f"SGLang refused {path} ({answer.status_code}): {message or 'it did not say why'}")
