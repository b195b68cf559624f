"""Token ids to text that is safe to show: detokenize, then hold back what could become a stop string."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from transformers import PreTrainedTokenizerBase

from precedent.text.detokenizer import IncrementalDetokenizer
from precedent.text.stop import StopScanner


class TextAssembler:
    """Assembles the text of one request from bursts of tokens; the text does not depend on how the tokens are split.

    `shown_tokens` are special tokens that stay in the text; the others are skipped.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str] = (), shown_tokens: Collection[int] = ()
    ) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, shown_tokens)
        self._scanner = StopScanner(stop) if stop else None
        self.stopped = False

    def push(self, token_ids: Sequence[int]) -> tuple[str, int]:
        """Return the new text and how many of the tokens count (fewer if a stop string ends the answer among them)."""
        if self._scanner is None:
            return self._detokenizer.push(token_ids), len(token_ids)
        shown = ""
        for count, token in enumerate(token_ids, start=1):
            text, self.stopped = self._scanner.push(self._detokenizer.push([token]))
            shown += text
            if self.stopped:
                return shown, count
        return shown, len(token_ids)

    def flush(self) -> str:
        """Return the text still held back at the end of the answer; nothing after a stop string."""
        if self.stopped:
            return ""
        rest = self._detokenizer.flush()
        if self._scanner is None:
            return rest
        text, self.stopped = self._scanner.push(rest)
        return text if self.stopped else text + self._scanner.flush()
