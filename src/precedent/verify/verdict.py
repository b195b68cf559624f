"""The verdict of verification on one candidate tree."""

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

    `spent_tv` is the total variation that a lossy mode spent on these tokens, 0 in every other mode. Summed over an
    answer's steps and averaged over answers, it bounds the total variation between the distribution of whole answers
    and the target's.
    """

    path: tuple[int, ...]
    next_token: int
    kind: Kind
    spent_tv: float = 0.0

    @property
    def num_accepted(self) -> int:
        """Number of accepted draft tokens; recovered and bonus tokens do not count."""
        return len(self.path)

    @classmethod
    def ending_at(cls, tree: CandidateTree, node: int, next_token: int) -> Verdict:
        """Accept the path to `node` (`ROOT` accepts nothing) and add `next_token`."""
        kind: Kind = "recovered" if node in tree.candidates_at else "bonus"
        return cls(tree.path_to(node), next_token, kind)
