"""Expected values that plan speculation: how long to draft, how to shape a tree, what it is worth."""

from __future__ import annotations

from collections.abc import Sequence

MAX_LENGTH = 256


def expected_tokens(acceptance: float, length: int) -> float:
    """Tokens per step of a chain of `length` draws, each accepted with the same chance (2211.17192, equation 1)."""
    if acceptance == 1.0:
        return length + 1.0
    return float((1.0 - acceptance ** (length + 1)) / (1.0 - acceptance))


def speedup(acceptance: float, length: int, draft_cost: float) -> float:
    """Walltime improvement of a chain; `draft_cost` is one draft step in target steps (2211.17192, theorem 3.8)."""
    return expected_tokens(acceptance, length) / (length * draft_cost + 1.0)


def operations(acceptance: float, length: int, draft_operations: float) -> float:
    """Factor by which arithmetic grows; `draft_operations` is one draft step in target steps (theorem 3.11)."""
    return (length * draft_operations + length + 1.0) / expected_tokens(acceptance, length)


def best_length(acceptance: float, draft_cost: float) -> int:
    """The chain length of the largest speed-up, 0 when no draft pays."""
    return max(range(MAX_LENGTH + 1), key=lambda length: speedup(acceptance, length, draft_cost))


def expected_tree_tokens(parents: Sequence[int], acceptance: Sequence[float]) -> float:
    """Expected accepted tokens of a tree: `acceptance[i]` is the chance of node i once its parent is accepted."""
    reached: list[float] = []
    for parent, chance in zip(parents, acceptance, strict=True):
        reached.append(chance * (reached[parent] if parent >= 0 else 1.0))
    return sum(reached)


def best_tree_tokens(rank_acceptance: Sequence[float], num_nodes: int) -> list[float]:
    """Sequoia's dynamic programme: tokens per step of the best tree of 1, 2, ..., `num_nodes` nodes, root included.

    `rank_acceptance[k]` is the chance that the k-th child of a node is the accepted one, whatever the node.
    """
    best = [0.0, 1.0]  # of a subtree, by its number of nodes
    forests = [[0.0] * num_nodes for _ in range(len(rank_acceptance) + 1)]  # below one node: [ranks used][nodes]
    for size in range(1, num_nodes):
        for rank, chance in enumerate(rank_acceptance, start=1):
            shares = (forests[rank - 1][size - below] + chance * best[below] for below in range(size + 1))
            forests[rank][size] = max(shares)
        best.append(1.0 + forests[-1][size])
    return best[1:]
