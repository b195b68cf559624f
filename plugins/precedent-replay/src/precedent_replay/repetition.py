"""Measures how repetitive the answers themselves are. Loops flatter every drafter, so the share is reported too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from precedent_replay.turns import Turn

GRAM = 4


def repeated_tokens(token_ids: Sequence[int]) -> int:
    """How many tokens end a run of `GRAM` tokens that occurred earlier in the same answer."""
    seen: set[tuple[int, ...]] = set()
    repeated = 0
    for end in range(GRAM, len(token_ids) + 1):
        gram = tuple(token_ids[end - GRAM : end])
        repeated += gram in seen
        seen.add(gram)
    return repeated


@dataclass(slots=True)
class Answers:
    """The measured answers of one kind of turn."""

    turns: int = 0
    tokens: int = 0
    exact_repeats: int = 0
    repeated: int = 0

    def add(self, turn: Turn, repeats: bool) -> None:
        """Count one answer; `repeats` says that it is word for word in the pool."""
        self.turns += 1
        self.tokens += len(turn.token_ids)
        self.exact_repeats += repeats
        self.repeated += repeated_tokens(turn.token_ids)

    def as_dict(self) -> dict[str, float]:
        """Counts, and the share of tokens in repeated runs."""
        return {
            "turns": self.turns,
            "tokens": self.tokens,
            "exact_repeats": self.exact_repeats,
            "repetition": round(self.repeated / self.tokens, 4) if self.tokens else 0.0,
        }
