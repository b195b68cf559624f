"""The draft model that llama-cpp-python is given: it holds no model, and drafts from a speculation cache."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from precedent.cache import Embedder, SpeculationCache
from precedent.cache.records import check_tenant
from precedent.cache.store_url import Place
from precedent.errors import CacheMismatchError, ConfigError, UnsupportedError
from precedent.planning.costs import CostCurve
from precedent.text.query import CHARACTERS_PER_MESSAGE, prompt_query
from precedent_engines import DRAFTERS, DraftingService, DraftingSession
from precedent_engines.followed import FollowedRequests
from precedent_engines.tokenizer import read_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Ids = NDArray[np.intc]

RUN = ("0.3.36",)
"""Versions of llama-cpp-python that the tests run."""

FLASH_ATTENTION = 1
"""`LLAMA_FLASH_ATTN_TYPE_ENABLED`."""

LAST_TOKENS = CHARACTERS_PER_MESSAGE // 2
"""Tokens at a prompt's end whose text is looked at for recall's query."""


class Following:
    """One request after the other, told from token ids alone: a draft model is told nothing else.

    A session is begun where the ids do not go on as one step would have them. A step commits the tokens of the last
    draft up to the first that the model chose otherwise, and the model's own one. So ids that go on in another way are
    another request's, even where they begin with all of the last one's, as the next turn of a conversation does.
    """

    def __init__(self, begin: Callable[[Sequence[int]], DraftingSession | None], max_tokens: int) -> None:
        self._begin, self._max_tokens = begin, max_tokens
        self._session: DraftingSession | None = None
        self._known: Ids = np.zeros(0, dtype=np.intc)
        self._drafted: list[int] = []

    def draft(self, ids: Ids) -> list[int]:
        """Tokens to verify after `ids`, prompt and answer so far; the last of them was sampled just now."""
        if not self._goes_on(ids):
            self.end()
            self._session, self._known = self._begin(ids[:-1].tolist()), ids[:-1]
        new, self._known, self._drafted = ids[len(self._known) :].tolist(), ids.copy(), []
        if self._session is not None:
            self._session.committed(new)
            self._drafted = self._session.chain(self._max_tokens)
        return self._drafted

    def end(self, whole: Sequence[int] = ()) -> None:
        """End the request's session; `whole` are prompt and answer, if they are known: the last step's tokens too."""
        session, self._session = self._session, None
        known, self._known, self._drafted = self._known.tolist(), np.zeros(0, dtype=np.intc), []
        if session is not None:
            if known == list(whole[: len(known)]):
                session.committed(whole[len(known) :])
            session.end()

    def _goes_on(self, ids: Ids) -> bool:
        known, grown = len(self._known), len(ids) - len(self._known)
        return (
            known > 0
            and grown > 0
            and np.array_equal(ids[:known], self._known)
            and ids[known:-1].tolist() == self._drafted[: grown - 1]
        )


class PrecedentDraft:
    """`Llama(…, draft_model=draft, flash_attn=True)`, then `draft.attach(model)`; one per model.

    `store` is an open `SpeculationCache`, its folder, file or URL, or None to draft from prompts alone. `tokenizer` is
    the one that the GGUF file's tokens come from: one of transformers, a tokenizer.json or its folder. All requests are
    `tenant`'s; for another one's make another draft model on the same cache. `max_tokens` bounds a draft; what pays is
    learned from the time of the steps, or given as `cost`. Raises what `DraftingService` raises, and ConfigError for a
    store without a tenant.
    """

    def __init__(
        self,
        store: SpeculationCache | Place | None,
        tokenizer: PreTrainedTokenizerBase | str | Path,
        *,
        tenant: str | None = None,
        max_tokens: int = 10,
        drafters: Sequence[str] = DRAFTERS,
        embedder: str | Embedder | None = None,
        cost: CostCurve | Mapping[int, float] | None = None,
        executor: Executor | None = None,
    ) -> None:
        if tenant is not None:
            check_tenant(tenant)
        elif store is not None:
            raise ConfigError("a store needs a tenant: say whose requests these are, or leave the store out")
        found: Any = read_tokenizer(tokenizer) if isinstance(tokenizer, str | Path) else tokenizer
        self._tenant, self._tokenizer, self._model = tenant, found, None
        self._service = DraftingService(store, found, drafters, embedder=embedder, cost=cost, executor=executor)
        self._requests = FollowedRequests(self._service)
        self._following = Following(self._begin, max_tokens)
        self._num_requests = 0

    def attach(self, model: Any) -> Any:
        """Check the `Llama` that has this draft model, and store what it answers; returns it.

        Raises UnsupportedError for a version that is not known, no flash attention or another draft model, and
        CacheMismatchError if the tokenizer is not the model's.
        """
        if self._model is not None:
            raise UnsupportedError("this draft model is attached already: make one for each Llama")
        _check(model, self, self._tokenizer.get_vocab())
        self._model = model
        _watch(model, self._finished)
        return model

    def __call__(self, input_ids: Ids, /, **_: Any) -> Ids:
        """Tokens to verify after `input_ids`, int32; none if drafting fails, which is logged once and counted."""
        if self._model is None:
            raise UnsupportedError("call draft.attach(model) first: it sees whether this Llama verifies drafts exactly")
        return np.array(self._requests.guarded(lambda: self._following.draft(input_ids), []), dtype=np.intc)

    def counts(self) -> dict[str, int]:
        """What was counted so far."""
        return self._requests.counts()

    def close(self) -> None:
        """Store what waits, and close the store if it was given by its place."""
        self._following.end()
        self._requests.close()

    def _begin(self, prompt: Sequence[int]) -> DraftingSession | None:
        self._num_requests += 1
        ends = {token for token in (self._model.token_eos(),) if token >= 0}  # type: ignore[attr-defined]
        return self._requests.begin(
            str(self._num_requests), prompt, tenant=self._tenant, query=self._query(prompt), end_token_ids=ends
        )

    def _finished(self, prompt: list[int], answer: list[int]) -> None:
        self._following.end([*prompt, *answer])
        if self._tenant is not None and self._service.cache is not None and answer:
            self._service.write_back(prompt, answer, tenant=self._tenant, query=self._query(prompt))

    def _query(self, prompt: Sequence[int]) -> str:
        if self._tenant is None:
            return ""
        return prompt_query(self._tokenizer.decode(list(prompt[-LAST_TOKENS:]), skip_special_tokens=True))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _check(model: Any, draft: PrecedentDraft, vocabulary: Mapping[str, int]) -> None:
    """See that a `Llama` verifies drafts of this tokenizer exactly."""
    from llama_cpp import __version__ as version

    if version not in RUN:
        raise UnsupportedError(
            f"precedent-llama-cpp knows llama-cpp-python {', '.join(RUN)}, and this is {version}: install that one, or "
            "a newer precedent-llama-cpp"
        )
    if model.draft_model is not draft:
        raise UnsupportedError("this Llama has another draft model: make it with draft_model= this one")
    if model.context_params.flash_attn_type != FLASH_ATTENTION:
        raise UnsupportedError(
            "this Llama was made without flash_attn=True: greedy answers then differ from those without drafts, "
            "because its attention rounds differently for one row than for several"
        )
    count = model.n_vocab()
    for text, token in vocabulary.items():
        if token >= count or model._model.token_get_text(token) != text:
            found = repr(model._model.token_get_text(token)) if token < count else "not there"
            raise CacheMismatchError(
                f"the tokenizer is not this model's: token {token} is {text!r}, in the GGUF file it is {found}. Give "
                "the tokenizer.json of the model that the file was made from"
            )


def _watch(model: Any, finished: Callable[[list[int], list[int]], None]) -> None:
    """Call `finished` with the token ids of a prompt and its answer once a `Llama` has ended it: nothing else tells.

    Wraps `generate`, which has the ids, and `create_completion`, which says that an answer ended; chats pass through
    both. An answer that fails, or whose stream nobody reads to its end, is not finished.
    """
    generate, create = model.generate, model.create_completion
    answers: list[tuple[list[int], list[int]]] = []

    def generating(tokens: Sequence[int], *arguments: Any, **named: Any) -> Generator[int, Any, None]:
        answer: list[int] = []
        answers[:] = [(list(tokens), answer)]
        inner = generate(tokens, *arguments, **named)
        try:
            token = next(inner)
            while True:
                answer.append(token)
                token = inner.send((yield token))
        except StopIteration:
            return
        finally:
            inner.close()

    def tell(completion: Any) -> Any:
        if answers and completion["choices"][0]["finish_reason"] is not None:
            finished(*answers.pop())
        return completion

    def told(chunks: Iterator[Any]) -> Iterator[Any]:
        for chunk in chunks:
            yield tell(chunk)

    def creating(*arguments: Any, **named: Any) -> Any:
        answers.clear()
        made = create(*arguments, **named)
        return tell(made) if isinstance(made, dict) else told(made)

    model.generate, model.create_completion = generating, creating
