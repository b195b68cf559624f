"""What drafters that think in texts need of a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class TextCodec(Protocol):
    """Text to token ids and back."""

    @property
    def end_token_id(self) -> int | None:
        """The token that ends an answer, if there is one."""

    def encode(self, text: str) -> list[int]:
        """Ids of a text from the middle of another."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of ids."""
