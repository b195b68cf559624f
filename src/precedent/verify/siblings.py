"""Draws at one node that come from one row: what a plan needs in order to weigh them together.

A plan prices lists of candidates that were not drawn as well as the one that was. So it needs what recursive rejection
does not: that the number of draws at the node was fixed before the first of them was made, as every drafter here does.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from precedent.tree import CandidateTree, Draw, Drawn


@dataclass(frozen=True, slots=True, eq=False)
class Siblings:
    """The draws that open a node's list and share one row: `tokens`, drawn in this order with or without replacement.

    `excluded` are the tokens that none of them could be.
    """

    row: Tensor
    excluded: tuple[int, ...]
    tokens: tuple[int, ...]
    replacement: bool

    def law(self, earlier: tuple[int, ...]) -> Drawn:
        """The law of the draw that follows the draws `earlier`, whatever was really drawn."""
        return Drawn(self.row, self.excluded if self.replacement else (*self.excluded, *earlier))


def leading_siblings(tree: CandidateTree, draws: tuple[Draw, ...], most: int) -> Siblings | None:
    """The longest run of two to `most` draws from one row at the front of `draws`, None when there is no such run."""
    if len(draws) < 2:
        return None
    first, second = draws[0].law, draws[1].law
    if not isinstance(first, Drawn) or not isinstance(second, Drawn) or first.keep_mask is not None:
        return None
    replacement, tokens = set(second.excluded) == set(first.excluded), list[int]()
    for draw in draws[:most]:
        expected = {*first.excluded, *(() if replacement else tokens)}
        if not _is_from(draw.law, first.row, expected):
            break
        tokens.append(tree.token_ids[draw.child])
    return Siblings(first.row, first.excluded, tuple(tokens), replacement) if len(tokens) > 1 else None


def _is_from(law: object, row: Tensor, excluded: set[int]) -> bool:
    return isinstance(law, Drawn) and law.row is row and law.keep_mask is None and set(law.excluded) == excluded
