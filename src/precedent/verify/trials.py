"""Which draws of a tree need a coin of their own, and in which order: all of verification that needs no number."""

from __future__ import annotations

from collections.abc import Mapping

from precedent.tree import CandidateTree, Draw, Point


class Trials:
    """The trials of every node, and the points that are left to the draw of its next token.

    Point children whose whole subtree is points are no trials: drawing the next token and descending while it is such
    a child is optimal for them and touches fewer rows. With `of_points` they are trials nevertheless, which spares a
    walk all draws but the last.
    """

    def __init__(self, tree: CandidateTree, *, lazy: bool, of_points: bool = False) -> None:
        self.tree, self.lazy = tree, lazy
        self._ordinals: dict[int, int] = {}
        self._trials: dict[int, tuple[Draw, ...]] = {}
        self._points: dict[int, dict[int, int]] = {}
        for node, draws in tree.draws_at.items():
            self._trials[node], self._points[node] = (draws, {}) if of_points else _sorted(tree, draws)
            for ordinal, draw in enumerate(self._trials[node]):
                self._ordinals.setdefault(draw.child, ordinal)

    def all_trials(self) -> Mapping[int, tuple[Draw, ...]]:
        """The draws below each node that are tried one after the other."""
        return self._trials

    def trials(self, node: int) -> tuple[Draw, ...]:
        """The draws below `node` that are tried one after the other, in verification order."""
        return self._trials.get(node, ())

    def point_children(self, node: int) -> Mapping[int, int]:
        """Token id to child node, for the point children that are handled after all trials."""
        return self._points.get(node, {})

    def ordinal(self, node: int) -> int:
        """Which trial of its parent brought `node` in first."""
        return self._ordinals[node]

    def defers(self, node: int) -> bool:
        """Whether the coin of `node` is thrown after its subtree (lazily), not before it."""
        return self.lazy


def _sorted(tree: CandidateTree, draws: tuple[Draw, ...]) -> tuple[tuple[Draw, ...], dict[int, int]]:
    """The draws of a node that need a coin of their own, and token id to child of the points that need none."""
    pure = [isinstance(draw.law, Point) and tree.all_points_below[draw.child] for draw in draws]
    at_the_end = [draw.child for draw, is_pure in zip(draws, pure, strict=True) if is_pure]
    trials = tuple(draw for draw, is_pure in zip(draws, pure, strict=True) if not is_pure)
    return trials, {tree.token_ids[child]: child for child in at_the_end}
