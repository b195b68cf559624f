"""What is wrong in vLLM's rejection sampler on CPUs without Triton: found by trying, and mended from outside.

Seen in vLLM 0.32.0; 0.33.0 has the same code.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from precedent.errors import UnsupportedError

COUNTS = (2, 3, 7)
PROBES = ((0.5, 1.25, 3.0), (2.0, 0.75, 0.125))
"""Two, since memory that was not written may by chance hold what the first one expects."""


def check(sampler: Any, *, mendable: bool, version: str) -> None:
    """Try vLLM's module `rejection_sampler`, and mend it where that is known to help; may be called again.

    Raises UnsupportedError where it is wrong and stays so.
    """
    for right, mend, otherwise in FAULTS:
        if right(sampler):
            continue
        if mendable:
            mend(sampler)
        if not mendable or not right(sampler):
            raise UnsupportedError(
                f"vLLM {version} samples wrongly on this machine: {otherwise}; this version cannot be mended from "
                "outside: install Triton for CPUs, another version of vLLM, or run without speculation"
            )


def expands(sampler: Any) -> bool:
    """True if each request's value is given to as many rows as it has."""
    import torch

    ends = torch.tensor(COUNTS).cumsum(0).to(torch.int32)
    return all(
        torch.equal(
            sampler.expand_batch_to_tokens(torch.tensor(values), ends, sum(COUNTS)),
            torch.repeat_interleave(torch.tensor(values), torch.tensor(COUNTS)),
        )
        for values in PROBES
    )


class Expand:
    """Stands in for the launcher `_expand`, whose replacement for CPUs writes into a copy and drops it."""

    def __call__(self, output: Any, values: Any, ends: Any, replace_from: int, replace_to: int) -> None:
        """Write each of `values` into `output` up to its place in `ends`, `replace_from` as `replace_to`."""
        import torch

        counts = torch.diff(ends, prepend=ends.new_zeros(1))
        values = torch.where(values == replace_from, torch.full_like(values, replace_to), values)
        output.copy_(torch.repeat_interleave(values, counts))

    def register_warmup(self, *_: Any, **__: Any) -> None:
        """There is nothing to compile."""


def _mend_expand(sampler: Any) -> None:
    sampler._expand = Expand()


def takes_no_rows(sampler: Any) -> bool:
    """True if top-k of no rows is no rows: a step without drafts asks for that."""
    import torch

    try:
        found = sampler.apply_top_k_top_p(torch.empty(0, 4), torch.empty(0, dtype=torch.int32), None)
    except RuntimeError:
        return False
    return tuple(found.shape) == (0, 4)


def _mend_no_rows(sampler: Any) -> None:
    inner = sampler.apply_top_k_top_p

    @wraps(inner)
    def apply_top_k_top_p(logits: Any, k: Any, p: Any) -> Any:
        return inner(logits, k, p) if logits.shape[0] else logits

    sampler.apply_top_k_top_p = apply_top_k_top_p


FAULTS = (
    (
        expands,
        _mend_expand,
        "its CPU kernel expand_kernel writes into a copy, and speculating rows get arbitrary temperatures",
    ),
    (takes_no_rows, _mend_no_rows, "a request with top_k ends the whole engine in a step without drafts"),
)
"""How each fault is found and mended, and what happens otherwise."""
