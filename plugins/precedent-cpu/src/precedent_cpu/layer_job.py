"""The memory layout of a decoder layer's job: the fields that threads read, and of each sequence in the job's table."""

from __future__ import annotations

import numpy as np

PARTS = 9
"""Parts of a layer, with a barrier between each two."""

WEIGHTS = ("query", "key", "value", "output", "gate", "up", "down")
NORMS = ("attention_norm", "attended_norm", "gate_norm", "gated_norm", "query_norm", "key_norm")
CONSTANTS = ("scale", "softcap", "norm_offset", "gate_slope", "gate_cubic")
OF_THE_CALL = (
    "base", "hidden_rows", "sequences", "cosines", "sines", "rows", "num_sequences", "width", "together",
    "normed", "queried", "keyed", "valued", "queries", "attended", "summand", "middle", "gates", "ups", "gated",
    "scratch", "scratch_bytes", "layers",
)  # fmt: skip
OF_THE_LAYER = (
    *WEIGHTS, *(f"{name}_bias" for name in WEIGHTS), *NORMS,
    "barrier", "wide", "tiles", "hidden", "inner", "heads", "kv_heads", "dim",
)  # fmt: skip

JOB = np.dtype(
    [("taken", "i8", (PARTS + 1,)), *((name, "i8") for name in (*OF_THE_CALL, *OF_THE_LAYER))]
    + [(name, "f8") for name in (*CONSTANTS, *(f"{name}_epsilon" for name in NORMS))]
)
"""Counters of the pieces taken, then counts and addresses (0: none).

`layers` is the number of consecutive jobs, one per layer, that start here; `hidden_rows` is a layer's input and output.
float32: `normed` `[rows, hidden]`, `queries` and `attended` `[rows, heads, dim]`, `gated` `[rows, inner]`, the biases
and each thread's scratch. In the model's dtype: the weights, `hidden_rows`, `summand` and `middle` `[rows, hidden]`,
`queried`, `keyed` and `valued` `[rows, heads, dim]`, `gates` and `ups` `[rows, inner]`.
"""

SEQUENCE = 13
"""int64 numbers per sequence in the table `sequences`: its first row, number of rows and prefix length; the address of
its keys and the strides in bytes of their heads and rows; the same for its values; of its `Sight`, the
arrays `starts` and `columns`, `skipped`, and the array `hidden`."""
