"""Forwards of fixed size for a GPU: CUDA graphs, Triton attention, and the same bits in a tree and alone.

Precedent finds them through the entry-point group `precedent.models`, which names
`precedent_cuda.support`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StaticSettings:
    """How forwards of fixed size are run.

    `arena_tokens` is the room for tokens of all sequences together (None: half of the free memory). Sequences that do
    not fit are computed outside the arena (with `bitwise` they are refused). Without `capture` no graphs are made: so a
    CPU runs the same code.
    """

    arena_tokens: int | None = None
    capture: bool = True
