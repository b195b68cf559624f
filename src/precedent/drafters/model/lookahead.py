"""What a draft model has sampled beyond the committed text: partly in this step's tree, the rest ahead of it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from precedent.drafters.base import DrawSession
from precedent.sampling.rng import Rng
from precedent.tree import ROOT, CandidateTree, Distribution, Sampled, TreeBuilder


class DrawsAhead(DrawSession):
    """A session that can continue drawing beyond its part of the tree while the target model scores it (PEARL).

    It may then run on another thread than the target model, but never concurrently with other work of the drafter.
    """

    @property
    @abstractmethod
    def at_hand(self) -> int:
        """Number of samples that no tree has held yet; `draw` uses these before it makes new ones."""

    @abstractmethod
    def draw_ahead(self, rng: Rng) -> bool:
        """Sample one more token beyond all samples so far; False if none may follow."""

    @abstractmethod
    def extended(self, tree: CandidateTree) -> CandidateTree:
        """The scored tree, extended by the samples at hand that its rows can verify: at most one new node."""


class DraftedToken(NamedTuple):
    """A token and the distribution it was sampled from; `Fixed` if the token is a function of its row."""

    token_id: int
    distribution: Distribution

    def add_to(self, builder: TreeBuilder, parent: int, source: str) -> int:
        """Add the token below `parent`; returns its node."""
        if isinstance(self.distribution, Sampled):
            return builder.add_sampled(parent, self.token_id, self.distribution, source)
        return builder.add_fixed(parent, self.token_id, source)


@dataclass(slots=True)
class Lookahead:
    """A chain that continues the committed text: its first `shown` tokens are in the tree; no tree has held the others.

    Verification depends on no unseen token except the first, which it may test. So if the committed text agrees with
    the chain, the tokens still unseen are as good as fresh samples (docs/decisions/0017).
    """

    chain: list[DraftedToken] = field(default_factory=list)
    shown: int = 0

    @property
    def token_ids(self) -> list[int]:
        """The tokens of the whole chain."""
        return [drafted.token_id for drafted in self.chain]

    @property
    def unseen(self) -> int:
        """Tokens that are in no tree yet."""
        return len(self.chain) - self.shown

    def extended(
        self, tree: CandidateTree, source: str, handed_on: Callable[[DraftedToken], DraftedToken]
    ) -> CandidateTree:
        """The tree, extended by the unseen samples that its rows can verify: those with scored parents.

        Where the tree already continues like the chain, its nodes become sampled ones too. Only the last sample can be
        a new node, without a row. `handed_on` prepares a sample for the verifier.
        """
        builder, node = TreeBuilder.reopened(tree), ROOT
        for drafted in self.chain[: self.shown]:
            below = builder.child(node, drafted.token_id)
            assert below is not None, "a shown token is missing from the tree"
            node = below
        for drafted in self.chain[self.shown :]:
            node = handed_on(drafted).add_to(builder, node, source)
            if node >= tree.num_scored:
                break
        return builder.build(num_unscored=len(builder) - tree.num_scored)

    def settle(self, token_ids: Sequence[int]) -> None:
        """Keep the unseen tokens beyond the committed ones if these agree with the chain; drop everything else.

        A token that was in the tree is never used again, whatever was committed: its verdict depended on it.
        """
        went_its_way = len(token_ids) >= self.shown and self.token_ids[: len(token_ids)] == list(token_ids)
        self.chain = self.chain[len(token_ids) :] if went_its_way else []
        self.shown = 0
