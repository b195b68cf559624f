"""Mismatches: the places in an answer at which the draft model's likeliest token is not the target's.

The target reads an answer as a chain. If hidden states are wanted, the draft's tokens are leaves beside those that it
disagrees with, so that the features are those that verification would see.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from precedent.sampling.probabilities import largest_id
from precedent.target import TargetModel
from precedent.tree import ROOT, CandidateTree, TreeBuilder, chain
from precedent_research.judge import HIDDEN, Rejected, features_of
from precedent_research.judge_training.reruns import Replaced, TokenIds, Turn

TOKENS_AT_ONCE = 128
"""Tokens of an answer that are scored together; a row of each is as long as the vocabulary."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """At `place` of the answer of turn number `turn` the draft says `token`; `features` are those of both rows."""

    turn: int
    place: int
    token: int
    features: tuple[float, ...]

    def replaced(self, turns: Sequence[Turn]) -> Replaced:
        """The run with the draft's token in the place of the target's."""
        prompt, answer = turns[self.turn].prompt_ids, turns[self.turn].answer_ids
        return Replaced(prompt, (*answer[: self.place], self.token))


class MismatchFinder:
    """Reads answers with both models; the keys and values of what successive prompts share are computed once.

    Both models must be free: no engine may run on them meanwhile. A target whose hidden states are among the features
    must keep them. Rows are cut after `num_tokens`.
    """

    def __init__(self, target: TargetModel, draft: TargetModel, num_tokens: int, features: Sequence[str]) -> None:
        self._target, self._draft = (_Reader(model, num_tokens) for model in (target, draft))
        self._features, self._reads_hidden = features, HIDDEN in features

    def of_run(self, turns: Sequence[Turn]) -> list[Mismatch]:
        """All mismatches of a run, in order."""
        return [each for number, turn in enumerate(turns) for each in self._of_turn(number, turn)]

    def _of_turn(self, number: int, turn: Turn) -> Iterator[Mismatch]:
        for reader in (self._target, self._draft):
            reader.begin(turn.prompt_ids)
        for start in range(0, len(turn.answer_ids), TOKENS_AT_ONCE):
            piece = turn.answer_ids[start : start + TOKENS_AT_ONCE]
            for place, token, features in self._of_piece(piece):
                yield Mismatch(number, start + place, token, features)

    def _of_piece(self, piece: TokenIds) -> list[tuple[int, int, tuple[float, ...]]]:
        """Place, draft's token and features of each mismatch in a piece of an answer; both models move on behind it."""
        drafted = self._draft.rows(chain(piece[:-1]))
        others = [largest_id(row) for row in drafted]
        places = [place for place, (token, said) in enumerate(zip(others, piece, strict=True)) if token != said]
        leaves = [(place, others[place]) for place in places] if self._reads_hidden else []
        tree = _with_leaves(piece[:-1], leaves)
        rows = self._target.rows(tree)
        found = []
        for leaf, place in enumerate(places, start=len(piece) - 1):
            hidden = self._target.hidden(leaf) if self._reads_hidden else None
            seen = Rejected(others[place], rows[place], drafted[place], hidden)
            found.append((place, others[place], tuple(features_of(seen, self._features))))
        for reader, read in ((self._draft, chain(piece[:-1])), (self._target, tree)):
            reader.commit(read, piece)
        return found


def _with_leaves(token_ids: TokenIds, leaves: Sequence[tuple[int, int]]) -> CandidateTree:
    """A chain of tokens, then a leaf with another token at each of the places."""
    builder = TreeBuilder.reopened(chain(token_ids))
    for place, token in leaves:
        builder.add_fixed(place - 1 if place else ROOT, token, "draft")
    return builder.build()


class _Reader:
    """Reads answers with one model."""

    def __init__(self, model: TargetModel, num_tokens: int) -> None:
        self._model, self._slot, self._num_tokens = model, model.new_slot(), num_tokens

    def begin(self, prompt_ids: TokenIds) -> None:
        """Go behind a prompt."""
        self._model.prefill(self._slot, prompt_ids)

    @torch.inference_mode()
    def rows(self, tree: CandidateTree) -> Tensor:
        """The logits before the tree and after each of its nodes, `[num_nodes + 1, num_tokens]`."""
        return self._model.score([(self._slot, tree)])[0][:, : self._num_tokens]

    def hidden(self, node: int) -> Tensor:
        """The hidden state of a node of the tree just scored, `[hidden_size]`."""
        kept, row = self._model.runner.hidden, len(self._slot.token_ids) + 1 + node
        assert kept is not None
        return kept.of(self._slot.kv, row, row + 1)[0]

    def commit(self, tree: CandidateTree, piece: TokenIds) -> None:
        """Keep the first nodes of the tree just scored, which are all but the last token of the piece."""
        self._model.commit(self._slot, tree, range(len(piece) - 1), piece[-1])
