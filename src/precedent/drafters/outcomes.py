"""What became of candidates once the tokens after them were committed."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from precedent.drafters.base import Nodes
from precedent.drafters.matching.occurrences import Occurrences
from precedent.runtime.compiled import Floats, Int32s, Int64s, compiled
from precedent.tree import ROOT

UNTESTED = -1.0
"""The outcome of a candidate whose parent was rejected, or behind which no token has been committed yet."""


@compiled
def outcomes(token_ids: Int32s, parents: Int32s, committed: Int32s) -> Floats:
    """Each candidate's outcome, `[n + 1]`: 1 accepted, 0 rejected, `UNTESTED`; the last entry is the root's, 1.

    Candidates are a trie in topological order, `[n]`; `committed` are the tokens that followed it.
    """
    outcome, above = np.full(token_ids.size + 1, UNTESTED), ROOT
    outcome[ROOT] = 1.0
    for token in committed:
        accepted = ROOT
        for node in range(max(0, above), token_ids.size):
            if parents[node] == above:
                outcome[node] = 1.0 if token_ids[node] == token else 0.0
                accepted = node if token_ids[node] == token else accepted
        if accepted == ROOT:
            break
        above = accepted
    return outcome


@compiled
def outcomes_of_votes(
    nodes: Nodes, heaviest: Int64s, votes: Occurrences, committed: Int32s
) -> tuple[Int32s, NDArray[np.bool_]]:
    """For each tested candidate the slot of its heaviest vote's sequence, and whether it was accepted, `[n]` each."""
    outcome = outcomes(nodes["token_id"], nodes["parent"], committed)
    slots, right, size = np.empty(nodes.size, np.int32), np.empty(nodes.size, np.bool_), 0
    for node in range(nodes.size):
        if outcome[node] != UNTESTED:
            slots[size], right[size] = votes[heaviest[node]].slot, outcome[node] > 0.0
            size += 1
    return slots[:size], right[:size]
