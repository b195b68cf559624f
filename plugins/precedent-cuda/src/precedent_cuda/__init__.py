"""Forwards of fixed size for a GPU: CUDA graphs, Triton attention, and the same bits in a tree and alone.

Precedent finds them through the entry-point group `precedent.models`, which names
`precedent_cuda.support`.
"""

from precedent_cuda.static_runner import StaticSettings

__all__ = ["StaticSettings"]
