"""What a draft model has drawn behind the committed text: some of it in this step's tree, the rest ahead of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from precedent.tree import ROOT, CandidateTree, Drawn, Law, TreeBuilder


class DraftedToken(NamedTuple):
    """A token and the law it was drawn from; certainty where it is a function of its row."""

    token_id: int
    law: Law

    def add_to(self, builder: TreeBuilder, parent: int, source: str) -> int:
        """Hang it below `parent`; returns its node."""
        if isinstance(self.law, Drawn):
            return builder.add_draw(parent, self.token_id, self.law, source)
        return builder.add_point(parent, self.token_id, source)


@dataclass(slots=True)
class Lookahead:
    """A chain that continues the committed text: its first `shown` tokens are in the tree, the others nobody has seen.

    No coin of verification depends on an unseen token but the one that judges the first of them, so whatever is still
    unseen after a step, behind text that went its way, is a draw as fresh as any (docs/decisions/0017).
    """

    chain: list[DraftedToken] = field(default_factory=list)
    shown: int = 0

    @property
    def token_ids(self) -> list[int]:
        """The whole chain's tokens."""
        return [drafted.token_id for drafted in self.chain]

    @property
    def unseen(self) -> int:
        """Tokens that are in no tree yet."""
        return len(self.chain) - self.shown

    def hung_below(
        self, tree: CandidateTree, source: str, handed_on: Callable[[DraftedToken], DraftedToken]
    ) -> CandidateTree:
        """The tree with the unseen draws that a forward over `tree` can judge: those whose parents it has scored.

        Only the last of them is a new node: where the tree goes on as the chain does, its nodes become draws as well.
        `handed_on` makes a draw ready for whoever verifies.
        """
        builder, node = TreeBuilder.reopened(tree), ROOT
        for drafted in self.chain[: self.shown]:
            below = builder.child(node, drafted.token_id)
            assert below is not None, "what is shown is in the tree"
            node = below
        for drafted in self.chain[self.shown :]:
            node = handed_on(drafted).add_to(builder, node, source)
            if node >= len(tree):
                break
        return builder.build()

    def settle(self, token_ids: Sequence[int]) -> None:
        """Keep what is unseen behind the committed tokens, if the text went the chain's way; forget all else.

        A token that was in the tree is never used again, whatever was committed: its verdict was about it.
        """
        went_its_way = len(token_ids) >= self.shown and self.token_ids[: len(token_ids)] == list(token_ids)
        self.chain = self.chain[len(token_ids) :] if went_its_way else []
        self.shown = 0
