"""What verification decides about one candidate tree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from precedent.tree import CandidateTree

Kind = Literal["bonus", "recovered"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The accepted path and the token that follows it.

    `path` holds node indices from the root's child downwards. `next_token` is the target model's own choice: a `bonus`
    where nothing was proposed after the path (also for an empty tree), `recovered` where every proposal was rejected.
    But where the path was accepted as far as a leaf that was not scored, `next_token` is that leaf's token and
    `next_node` the leaf. `spent_tv` is the total variation that a `lossy_*` mode spent on these tokens, 0 in every
    other mode: its mean over all answers, summed over an answer's steps, bounds the total variation between the
    distribution of whole answers and the target's.
    """

    path: tuple[int, ...]
    next_token: int
    kind: Kind
    spent_tv: float = 0.0
    next_node: int | None = None

    @property
    def accepted(self) -> tuple[int, ...]:
        """Every accepted node, one that was not scored included."""
        return self.path if self.next_node is None else (*self.path, self.next_node)

    @property
    def num_accepted(self) -> int:
        """Accepted draft tokens; a recovered or bonus token is not counted."""
        return len(self.accepted)

    @classmethod
    def ending_at(cls, tree: CandidateTree, node: int, next_token: int) -> Verdict:
        """Accept the path to `node` (`ROOT` accepts nothing) and add `next_token`."""
        kind: Kind = "recovered" if node in tree.candidates_at else "bonus"
        return cls(tree.path_to(node), next_token, kind)

    @classmethod
    def ending_unscored(cls, tree: CandidateTree, node: int) -> Verdict:
        """Accept the path to a leaf without a row: what follows it is for the next step to decide."""
        return cls(tree.path_to(node)[:-1], tree.token_ids[node], "bonus", next_node=node)
