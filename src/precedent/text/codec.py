"""Text to token ids and back for drafters: a text gets the ids that it would have inside an answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from precedent.errors import ContextOverflowError
from precedent.runtime.plain_values import checked_ids
from precedent.text.end_tokens import turn_end

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


CHARACTERS_PER_TOKEN = 8
"""Twice what English has: a text of so many may fit, one of more is looked at from its beginning first."""

CUT = 1.1
"""A beginning is too long with this many times the tokens that fit, since cutting a word may give it a few more."""

LONG_TEXT = 4096
"""Characters from which a text is encoded without holding the interpreter's lock, so that other threads go on."""


class TokenizerCodec:
    """A tokenizer as drafters see it. `end_token_id` ends an answer; None if the tokenizer defines no such token."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._ids = _encoder(tokenizer)
        self.end_token_id = turn_end(tokenizer)

    @cached_property
    def fingerprint(self) -> str:
        """See `precedent.cache.tokenizer_fingerprint`."""
        from precedent.cache import tokenizer_fingerprint  # here, since prompts need no cache

        return tokenizer_fingerprint(self._tokenizer)

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token, as the vocabulary writes it."""
        return max(map(len, self._tokenizer.get_vocab()))

    def encode(self, text: str) -> list[int]:
        """Encode a text as it would appear mid-answer."""
        return ids_within_text(text, self._ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Decode ids to text, control tokens included."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))

    def answer_ids(self, answer: str | Sequence[int] | None) -> tuple[int, ...]:
        """The ids of a whole answer: encodes a text and adds its end token, keeps ids as they are. None becomes ()."""
        if not isinstance(answer, str):
            return () if answer is None else tuple(int(token) for token in answer)
        ending = () if self.end_token_id is None else (self.end_token_id,)
        return (*self.encode(answer), *ending) if answer else ()

    def prediction_ids(self, prediction: str | Sequence[int] | None, context_length: int) -> tuple[int, ...]:
        """The first `context_length` of a prediction's `answer_ids`.

        Raises ContextOverflowError, before it encodes anything, for a text of far more tokens than the context holds,
        and ConfigError for anything but a text or a sequence of token ids.
        """
        if prediction is None:
            return ()
        if not isinstance(prediction, str):
            return checked_ids("prediction", prediction, "a text or a list of token ids", context_length)
        most = CHARACTERS_PER_TOKEN * context_length
        if len(prediction) > most:
            raise ContextOverflowError(
                f"prediction has {len(prediction):,} characters, at most {most:,} are allowed (the model's context "
                f"holds {context_length:,} tokens): give only the part that the answer may repeat"
            )
        return self.answer_ids(prediction)[:context_length]


def ids_within_text(text: str, encode: Callable[[str], list[int]]) -> list[int]:
    """Encode a piece from the middle of a text: after a newline, so that the tokenizer adds no leading space."""
    newline, ids = encode("\n"), encode(f"\n{text}")
    return ids[len(newline) :] if ids[: len(newline)] == newline else encode(text)


def _encoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[str], list[int]]:
    """An encoder that adds no special tokens. It uses the Rust backend if there is one, which is ten times faster."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return lambda text: list(tokenizer.encode(text, add_special_tokens=False))

    def encode(text: str) -> list[int]:
        if len(text) < LONG_TEXT:
            return list(backend.encode(text, add_special_tokens=False).ids)
        return list(backend.encode_batch_fast([text], add_special_tokens=False)[0].ids)

    return encode


def check_length(tokenizer: PreTrainedTokenizerBase, text: str, context_length: int) -> None:
    """Refuse a text of far too many tokens without encoding all of it, which takes seconds and gigabytes.

    `context_length` is in tokens. A text that passes may still be too long by a little. Raises ContextOverflowError.
    """
    length = CHARACTERS_PER_TOKEN * context_length
    while length < len(text):
        if len(tokenizer.encode(text[:length], add_special_tokens=False)) > CUT * context_length:
            raise ContextOverflowError(
                f"the prompt is too long: {len(text)} characters and more than {context_length} tokens, which is what "
                "the model's context holds: shorten the conversation or the tool results"
            )
        length *= 2
