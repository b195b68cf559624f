"""A `Llama` as llama-cpp-python 0.3.36 has it around drafts, with a scripted model: no weights, the same calls."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from helpers.services import END

CONTEXT, VOCABULARY = 128, 400


def greedy(ids: Sequence[int], length: int = 12) -> int:
    """The scripted model: its next token depends on every token before, and every `length`-th ends the answer."""
    mixed = zlib.crc32(np.array(ids, dtype=np.int64).tobytes())
    return END if mixed % length == 0 else 3 + mixed % (VOCABULARY - 3)


class FakeLlama:
    """Evaluates rows, samples each of them, and asks its draft model between two steps."""

    def __init__(
        self,
        draft_model: Any = None,
        flash_attn: bool = True,
        vocabulary: dict[str, int] | None = None,
        next_token: Callable[[Sequence[int]], int] = greedy,
    ) -> None:
        self.draft_model, self._next = draft_model, next_token
        self.context_params = SimpleNamespace(flash_attn_type=int(flash_attn))
        texts = {token: text for text, token in (vocabulary or {}).items()}
        self._model = SimpleNamespace(token_get_text=texts.get)
        self._count = max(texts, default=VOCABULARY - 1) + 1
        self.input_ids = np.zeros(CONTEXT, dtype=np.intc)
        self.n_tokens = self.num_steps = 0

    def n_vocab(self) -> int:
        return self._count

    def token_eos(self) -> int:
        return END

    def generate(self, tokens: Sequence[int], **_: Any) -> Any:
        """Yield sampled tokens; drafts are rows of the next step, kept up to the first that is sampled otherwise."""
        self.n_tokens, rows, place = 0, list(tokens), len(tokens) - 1
        while True:
            self.num_steps += 1
            self.input_ids[self.n_tokens : self.n_tokens + len(rows)] = rows
            self.n_tokens += len(rows)
            while place < self.n_tokens:
                token = self._next(self.input_ids[: place + 1].tolist())
                place += 1
                told = yield token
                rows = [token, *(told or ())]
                if place < self.n_tokens and token != self.input_ids[place]:
                    self.n_tokens = place
                    break
            if self.draft_model is not None:
                self.input_ids[self.n_tokens : self.n_tokens + len(rows)] = rows
                drafted = self.draft_model(self.input_ids[: self.n_tokens + len(rows)])
                assert drafted.dtype == np.intc
                rows.extend(drafted.astype(int)[: CONTEXT - self.n_tokens - len(rows)])

    def create_completion(self, prompt: Sequence[int], max_tokens: int = 40, stream: bool = False) -> Any:
        """An answer whose text is its token ids, whole or in chunks of a token."""
        chunks = self._chunks(list(prompt), max_tokens)
        if stream:
            return chunks
        parts = list(chunks)
        return _said(" ".join(part["choices"][0]["text"] for part in parts).strip(), parts[-1])

    def _chunks(self, prompt: list[int], max_tokens: int) -> Iterator[Any]:
        for said, token in enumerate(self.generate(prompt), start=1):
            if token == END:
                yield _said("", "stop")
                return
            yield _said(str(token), None)
            if said == max_tokens:
                break
        yield _said("", "length")


def _said(text: str, finish: Any) -> dict[str, Any]:
    finish = finish["choices"][0]["finish_reason"] if isinstance(finish, dict) else finish
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish}]}
