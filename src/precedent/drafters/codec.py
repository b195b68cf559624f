"""The part of a tokenizer that text-based drafters need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class TextCodec(Protocol):
    """Text to token ids and back."""

    @property
    def end_token_id(self) -> int | None:
        """The token that ends an answer, or None."""

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, without special tokens: it may come from the middle of a longer text."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of `token_ids`."""
