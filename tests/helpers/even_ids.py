"""A grammar of one rule, which shapes the rows of a whole tree together as a real one does."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from precedent.config import SamplingParams
from precedent.grammar import GrammarConstraint
from precedent.grammar.guidance import Words
from precedent.sampling.constraints import constraints_for
from precedent.sampling.row_shaper import RowShaper


class EvenIds:
    """Even and odd ids in turns."""

    def __init__(self) -> None:
        self._taken = 0

    def allowed(self) -> Words:
        return np.full(8, 0x55555555 << self._taken % 2, dtype=np.uint32).view(np.int32)

    def advance(self, token_ids: Sequence[int]) -> int:
        for number, token in enumerate(token_ids):
            if token % 2 != self._taken % 2:
                return number
            self._taken += 1
        return len(token_ids)

    def go_back(self, num_tokens: int) -> None:
        self._taken -= num_tokens

    def forced(self) -> list[int]:
        return []


def grammar_and_penalties(prompt_ids: Sequence[int]) -> RowShaper:
    """The grammar, a bias and all penalties."""
    params = SamplingParams(
        repetition_penalty=1.2, frequency_penalty=0.3, presence_penalty=0.2, logit_bias={4: 1, 5: -1}
    )
    found = constraints_for(params, prompt_ids, GrammarConstraint(EvenIds(), [0]))
    assert found is not None
    return found
