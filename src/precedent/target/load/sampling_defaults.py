"""The sampling settings that a checkpoint's publisher recommends, in its generation config."""

from __future__ import annotations

from typing import Any

NAMES = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Settings that both a generation config and `SamplingParams` have."""


def sampling_defaults(generation_config: Any) -> dict[str, float]:
    """Return the settings that a generation config gives, under the names of `SamplingParams`; empty without any.

    `do_sample: false` is temperature 0. One that samples without a temperature means 1, as in transformers.
    """
    found = {name: getattr(generation_config, name, None) for name in NAMES}
    given = {name: value for name, value in found.items() if value is not None}
    samples = getattr(generation_config, "do_sample", None)
    if samples is False:
        greedy = {"temperature": 0.0}
        return greedy | {name: given[name] for name in ("repetition_penalty",) if name in given}
    if samples or given.keys() - {"repetition_penalty"}:
        given.setdefault("temperature", 1.0)
    return given
