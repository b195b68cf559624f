"""What a draft model has sampled beyond the committed text: some of it in this step's tree, the rest ahead of it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from precedent.drafters.base import DrawSession
from precedent.sampling.rng import Rng
from precedent.tree import ROOT, CandidateTree, Distribution, Sampled, TreeBuilder


class DrawsAhead(DrawSession):
    """A session that can go on drawing beyond its part of the tree while the target model scores it (PEARL).

    It may then run on another thread than the target model, and never at once with anything else that the drafter does.
    """

    @property
    @abstractmethod
    def at_hand(self) -> int:
        """Samples that no tree has held yet; `draw` takes these before it makes others."""

    @abstractmethod
    def draw_ahead(self, rng: Rng) -> bool:
        """Sample one token more, beyond everything sampled so far; False when nothing may follow."""

    @abstractmethod
    def extended(self, tree: CandidateTree) -> CandidateTree:
        """The tree that was scored, with those samples at hand that its rows can verify: at most one new node."""


class DraftedToken(NamedTuple):
    """A token and the distribution it was sampled from; `Fixed` where it is a function of its row."""

    token_id: int
    distribution: Distribution

    def add_to(self, builder: TreeBuilder, parent: int, source: str) -> int:
        """Add it below `parent`; returns its node."""
        if isinstance(self.distribution, Sampled):
            return builder.add_sampled(parent, self.token_id, self.distribution, source)
        return builder.add_fixed(parent, self.token_id, source)


@dataclass(slots=True)
class Lookahead:
    """A chain that continues the committed text: its first `shown` tokens are in the tree, no tree has held the others.

    No random number of verification depends on an unseen token but the one that tests the first of them. So whatever is
    still unseen after a step whose text went its way is as fresh a sample as any (docs/decisions/0017).
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

    def extended(
        self, tree: CandidateTree, source: str, handed_on: Callable[[DraftedToken], DraftedToken]
    ) -> CandidateTree:
        """The tree with the unseen samples that its rows can verify: those whose parents were scored.

        Only the last of them is a new node, which has no row: where the tree goes on as the chain does, its nodes
        become sampled ones as well. `handed_on` makes a sample ready for whoever verifies.
        """
        builder, node = TreeBuilder.reopened(tree), ROOT
        for drafted in self.chain[: self.shown]:
            below = builder.child(node, drafted.token_id)
            assert below is not None, "what is shown is in the tree"
            node = below
        for drafted in self.chain[self.shown :]:
            node = handed_on(drafted).add_to(builder, node, source)
            if node >= tree.num_scored:
                break
        return builder.build(num_unscored=len(builder) - tree.num_scored)

    def settle(self, token_ids: Sequence[int]) -> None:
        """Keep what is unseen beyond the committed tokens, if the text went the chain's way; forget all else.

        A token that was in the tree is never used again, whatever was committed: its verdict was about it.
        """
        went_its_way = len(token_ids) >= self.shown and self.token_ids[: len(token_ids)] == list(token_ids)
        self.chain = self.chain[len(token_ids) :] if went_its_way else []
        self.shown = 0
