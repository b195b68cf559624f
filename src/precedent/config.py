"""The frozen settings objects; an unknown key is an error that names the nearest known one."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from precedent.errors import ConfigError

MODES = ("auto", "greedy", "coupled", "traversal", "topdown")
"""Every lossless verification mode; `auto` is one of the others, by the sampling settings."""

LOSSY_MODES = ("lossy_mentored", "lossy_typical", "lossy_top_beta", "lossy_judge")
"""Modes that change the output distribution, on purpose only; parameters follow: `lossy_mentored:kl=0.05`."""


def is_lossy(mode: str) -> bool:
    """True for a mode that changes the output distribution."""
    return mode.partition(":")[0] in LOSSY_MODES


def check_mode(mode: str) -> None:
    """Raise ConfigError unless `mode` is one of `MODES` or `LOSSY_MODES`."""
    if mode in MODES or is_lossy(mode):
        return
    known = (*MODES, *LOSSY_MODES)
    if ":plan=" in mode:
        raise ConfigError(
            f"mode={mode!r} is gone: weighing several samples of a node together cost more than it brought "
            f"(docs/decisions/0023); use one of {', '.join(known)}"
        )
    near = difflib.get_close_matches(mode.partition(":")[0], known, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ConfigError(f"mode={mode!r} cannot verify; {hint}use one of {', '.join(known)}")


def check_fields(settings: object, checks: Iterable[tuple[str, bool, str]]) -> None:
    """Raise ConfigError for the first of (name, holds, rule) that does not hold, with the value found.

    Write what must hold, not what must not: NaN fails every comparison.
    """
    for name, holds, rule in checks:
        if not holds:
            raise ConfigError(f"{name}={getattr(settings, name)!r} {rule}")


class _FromDict:
    """Adds `from_dict`, which refuses unknown keys by name."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Build the settings from a mapping. Raises ConfigError on an unknown key."""
        known = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]  # mixin of dataclasses only
        for key in values:
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}"
                raise ConfigError(f"{cls.__name__} has no setting {key!r}{hint}")
        return cls(**values)


@dataclass(frozen=True, slots=True)
class SamplingParams(_FromDict):
    """How the next token is chosen from the target model's logits.

    `temperature` 0 is greedy decoding (argmax, lowest id on ties). `top_k` 0, `top_p` 1 and `min_p` 0 are off;
    `repetition_penalty` 1 is off (> 1 makes tokens that occurred before less likely, as in transformers).
    A `seed` fixes the text (mode `coupled`); without one every request draws fresh entropy. `logprobs` asks for the
    log-probability of every token and of that many of the likeliest at its place; None asks for none.
    Raises ConfigError when a value is out of its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int = 512
    stop: tuple[str, ...] = ()
    logprobs: int | None = None

    def __post_init__(self) -> None:
        checks = (
            ("temperature", self.temperature >= 0, "must be 0 (greedy) or greater"),
            ("top_k", self.top_k >= 0, "must be 0 (off) or a number of tokens"),
            ("top_p", 0 < self.top_p <= 1, "must lie in (0, 1]"),
            ("min_p", 0 <= self.min_p < 1, "must lie in [0, 1)"),
            ("repetition_penalty", self.repetition_penalty > 0, "must be greater than 0"),
            ("max_tokens", self.max_tokens >= 1, "must be at least 1"),
            ("logprobs", self.logprobs is None or 0 <= self.logprobs <= 20, "must be None or lie between 0 and 20"),
        )
        check_fields(self, checks)
        if any(not text for text in self.stop):
            raise ConfigError("stop holds an empty string; give the texts at which the answer should end")

    @property
    def greedy(self) -> bool:
        """True when the next token is the argmax."""
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True)
class SpeculationConfig(_FromDict):
    """What may be proposed and how it is verified.

    `drafters` names the drafters in order of credit (see `precedent.drafters`); `max_nodes` bounds the candidate
    tree (nodes per step); `mode` is one of `MODES` or `LOSSY_MODES`, `auto` meaning greedy at temperature 0,
    else coupled with a seed and traversal without.
    `enabled=False` is plain decoding through the same loop. `write_back=False` stores nothing.
    """

    enabled: bool = True
    drafters: tuple[str, ...] = ("recall", "prompt", "prediction", "template", "grammar", "draft-model")
    max_nodes: int = 32
    max_draws: int = 6
    mode: str = "auto"
    write_back: bool = True

    def __post_init__(self) -> None:
        check_mode(self.mode)
        if not 0 <= self.max_nodes <= 256:
            raise ConfigError(f"max_nodes={self.max_nodes} must lie between 0 and 256 nodes per step")
        if not 0 <= self.max_draws <= 64:
            raise ConfigError(f"max_draws={self.max_draws} must lie between 0 and 64 draws per step")


@dataclass(frozen=True, slots=True)
class EngineLimits(_FromDict):
    """How much one engine does and holds at once; what does not fit now waits, first come, first served.

    `max_running`: requests that are prefilled or decoded at once. `max_kv_bytes`: keys and values of all of them, each
    with room for its whole answer and its largest tree, and of idle conversations, which give way first; None is half
    of the free memory when the engine starts (on an accelerator four fifths; with `bitwise` there, the arena of
    docs/gpu.md). `max_idle_kv_bytes`: how much of that idle conversations may take. `prefill_tokens_per_round`: prompt
    tokens computed between two steps of the requests that are being answered: fewer keep their streams even, more bring
    a new request's first token sooner.
    Raises ConfigError when a value is out of its range.
    """

    max_running: int = 32
    max_kv_bytes: int | None = None
    max_idle_kv_bytes: int = 512 * 2**20
    prefill_tokens_per_round: int = 128

    def __post_init__(self) -> None:
        least = {"max_running": 1, "max_kv_bytes": 1, "max_idle_kv_bytes": 0, "prefill_tokens_per_round": 1}
        for name, bound in least.items():
            value = getattr(self, name)
            if value is not None and value < bound:
                raise ConfigError(f"{name}={value} must be at least {bound}")
