"""What verification decides about one candidate tree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from precedent.tree import CandidateTree

Kind = Literal["bonus", "recovered"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The accepted path and the token that the target model adds itself.

    `path` holds node indices from the root's child downwards. `kind` is `bonus` when nothing was proposed where the
    path ends (also for an empty tree), `recovered` when every proposal there was rejected. `spent_tv` is the total
    variation that a `lossy_*` mode spent on these tokens: its mean over all answers, summed over an answer's steps,
    bounds the total variation between the law of whole answers and the target's. Exactly 0 in every other mode.
    """

    path: tuple[int, ...]
    next_token: int
    kind: Kind
    spent_tv: float = 0.0

    @property
    def num_accepted(self) -> int:
        """Accepted draft tokens; `next_token` is not counted."""
        return len(self.path)

    @classmethod
    def ending_at(cls, tree: CandidateTree, node: int, next_token: int) -> Verdict:
        """The verdict that accepts the path to `node` (`ROOT` accepts nothing) and adds `next_token`."""
        kind: Kind = "recovered" if node in tree.draws_at else "bonus"
        return cls(tree.path_to(node), next_token, kind)
