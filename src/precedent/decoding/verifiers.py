"""The verifier of a mode; lossy ones are imported only for a request that names one."""

from __future__ import annotations

from typing import Any

from precedent.config import has_judge, is_lossy
from precedent.verify import LOSSLESS, Verifier


def verifier_of(mode: str) -> Verifier:
    """The verifier of a mode of `precedent.config`. Raises ConfigError for unknown parameters of a lossy mode."""
    if not is_lossy(mode):
        return LOSSLESS[mode]
    from precedent.verify.lossy import lossy_verifier  # here: a lossless request never imports that package

    return lossy_verifier(mode)


def judge_in(mode: str) -> Any:
    """The judge of a mode, None for modes without one. Raises ConfigError as `verifier_of` does."""
    if not has_judge(mode):
        return None
    from precedent.verify.lossy import judge_of

    return judge_of(mode)


def reads_hidden_states(mode: str) -> bool:
    """Whether a mode has a judge that reads the target's hidden states. Raises ConfigError as `verifier_of` does."""
    return bool(getattr(judge_in(mode), "reads_hidden_states", False))
