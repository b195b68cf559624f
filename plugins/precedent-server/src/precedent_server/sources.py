"""Which drafter each piece of a streamed answer came from."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from precedent.decoding.sequence import Emission
from precedent.text.assembly import IncrementalDetokenizer, hidden_tokens, special_token_ids

if TYPE_CHECKING:
    from precedent.text.answers import AnswerSyntax

Sources = list[tuple[str, str]]
"""Texts, each with the name of its source. Together they are the answer as the model wrote it, markup included."""


class SourceTexts:
    """Divides the text of one answer among its tokens.

    A token is told once all it adds to the answer has come: a text that may become a stop string is held back, and
    what the stop string cuts off is no part of the answer. A token that only begins a character adds an empty text.
    Hidden special tokens are left out.
    """

    def __init__(self, syntax: AnswerSyntax) -> None:
        tokenizer, shown = syntax.tokenizer, syntax.shown_tokens
        self._detokenizer = IncrementalDetokenizer(tokenizer, shown)
        hidden = hidden_tokens(tokenizer, shown)
        self._hidden = frozenset(special_token_ids(tokenizer)) if hidden is None else hidden
        self._untold: deque[tuple[int, str]] = deque()
        self._text, self._last = "", ""

    def push(self, emission: Emission) -> Sources:
        """The tokens whose text is complete."""
        self._text += emission.text
        for token, source in zip(emission.token_ids, emission.sources, strict=True):
            length = len(self._detokenizer.push([token]))
            if length or token not in self._hidden:
                self._untold.append((length, source))
        found = Sources()
        while self._untold and self._untold[0][0] <= len(self._text):
            found.append(self._next())
        return found

    def finish(self) -> Sources:
        """The rest of the answer: part of a token before a stop string, or the replacement of half a character."""
        rest, self._text = self._text, ""
        source = self._untold[0][1] if self._untold else self._last
        return [(rest, source)] if rest else []

    def _next(self) -> tuple[str, str]:
        length, self._last = self._untold.popleft()
        text, self._text = self._text[:length], self._text[length:]
        return text, self._last
