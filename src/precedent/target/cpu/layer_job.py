"""What the threads of a team are told of a decoder layer: the fields of a job, and of a sequence in its table."""

from __future__ import annotations

import numpy as np

PARTS = 8
"""Parts of a layer, with a barrier between any two."""

WEIGHTS = ("query", "key", "value", "output", "gate", "up", "down")
NORMS = ("first_norm", "second_norm", "query_norm", "key_norm")
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
    + [(name, "f8") for name in ("scale", *(f"{name}_epsilon" for name in NORMS))]
)
"""Counters of the pieces taken, then counts, and addresses (0: there is none).

`layers` is the number of jobs, one per layer, that follow each other from the first on; `hidden_rows` is what a layer
is given and what it leaves. Of float32 are `normed` `[rows, hidden]`, `queries` and `attended` `[rows, heads, dim]`,
`gated` `[rows, inner]`, the biases and the scratch of each thread; of what the model stores the weights, `hidden_rows`,
`summand` and `middle` `[rows, hidden]`, `queried`, `keyed` and `valued` `[rows, heads, dim]`, `gates` and `ups`
`[rows, inner]`.
"""

SEQUENCE = 11
"""int64 numbers of a sequence in the table `sequences`, in this order: its first row and number of rows, the length of
its prefix, address of its keys and bytes between their heads and rows, the same of its values, and its `Sight`."""
