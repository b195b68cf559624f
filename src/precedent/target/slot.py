"""One sequence's place in the target model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from precedent.target.kv.arena import Moves
from precedent.target.kv.cache import KVCache
from precedent.tree import CandidateTree

NOTHING_PENDING = -1
"""`Slot.pending` while a prompt is still being computed."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class Slot:
    """One sequence: the keys and values of `token_ids` are in `kv`, `pending` is chosen but not computed.

    With `one_path` the model scores a single path at a time, no tree with branches.
    """

    kv: KVCache
    token_ids: list[int] = field(default_factory=list)
    pending: int = NOTHING_PENDING
    one_path: bool = False


Commit = tuple[Slot, CandidateTree, Sequence[int], int]
"""A slot, the tree that was scored, its accepted nodes, and the token that becomes pending."""


def keep_path(slot: Slot, tree: CandidateTree, path: Sequence[int], next_token: int, moves: Moves) -> None:
    """Commit one sequence's pending token and the accepted `path`; rows in an arena move once `moves` are made."""
    accepted = [tree.token_ids[node] for node in path]
    slot.kv.keep([0, *(node + 1 for node in path)], moves)
    slot.token_ids += [slot.pending, *accepted]
    slot.pending = next_token
