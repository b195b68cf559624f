"""vLLM's rejection sampler on CPUs without Triton: a kernel there writes into a copy, found and mended here.

`expand_batch_to_tokens` gives each row of a draft its request's temperature, top-k and top-p. Its replacement for CPUs
converts the float32 output to int64, writes into the converted copy and drops it, so that the rows get whatever the
memory held. As soon as one request of a batch samples, all speculating rows are scaled by that: greedy ones too. Seen
in vLLM 0.32.0, the same in 0.33.0; the report is docs/upstream/vllm-expand-kernel.md.
"""

from __future__ import annotations

from typing import Any

from precedent.errors import UnsupportedError

COUNTS = (2, 3, 7)
PROBES = ((0.5, 1.25, 3.0), (2.0, 0.75, 0.125))
"""Two, since memory that was not written may by chance hold what the first one expects."""


def check(sampler: Any, *, mendable: bool, version: str) -> None:
    """Check vLLM's module `rejection_sampler`, and mend it where that is known to help; may be called again.

    Raises UnsupportedError where it is wrong and stays so.
    """
    if expands(sampler):
        return
    if mendable:
        sampler._expand = Expand()
    if not mendable or not expands(sampler):
        raise UnsupportedError(
            f"vLLM {version} samples wrongly on this machine: its CPU kernel expand_kernel writes into a copy, and "
            "speculating rows get arbitrary temperatures; this version cannot be mended from outside: "
            "install Triton for CPUs, another version of vLLM, or run without speculation"
        )


def expands(sampler: Any) -> bool:
    """True if each value is repeated as often as it should be."""
    import torch

    ends = torch.tensor(COUNTS).cumsum(0).to(torch.int32)
    for values in PROBES:
        given = torch.tensor(values)
        expected = torch.repeat_interleave(given, torch.tensor(COUNTS))
        if not torch.equal(sampler.expand_batch_to_tokens(given, ends, sum(COUNTS)), expected):
            return False
    return True


class Expand:
    """Stands in for the kernel's launcher `_expand`."""

    def __call__(self, output: Any, values: Any, ends: Any, replace_from: int, replace_to: int) -> None:
        """Write each of `values` into `output` up to its place in `ends`, `replace_from` as `replace_to`."""
        import torch

        counts = torch.diff(ends, prepend=ends.new_zeros(1))
        values = torch.where(values == replace_from, torch.full_like(values, replace_to), values)
        output.copy_(torch.repeat_interleave(values, counts))

    def register_warmup(self, *_: Any, **__: Any) -> None:
        """There is nothing to compile."""
