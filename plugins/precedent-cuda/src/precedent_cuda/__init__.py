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
    not fit are computed outside the arena (with `bitwise` they are refused). `most_tokens` is an upper bound in either
    case. `attention` is "auto" or one of `precedent_cuda.attention.VARIANTS`, with `bitwise` of `ORDERED`.
    Without `capture` no graphs are made: so a CPU runs the same code. `max_graphs` and `max_graph_bytes` bound the
    graphs.
    """

    arena_tokens: int | None = None
    most_tokens: int | None = None
    attention: str = "auto"
    capture: bool = True
    max_graphs: int = 128
    max_graph_bytes: int = 2 * 2**30
