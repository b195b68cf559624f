"""Kernels that run a model's few rows fast on a CPU: products, norms, attention, whole layers.

A row is bit-identical in a candidate tree and alone. Precedent finds them through the entry-point group
`precedent.models`, which names `precedent_cpu.support`.
"""

__version__ = "0.1.0"
