"""The verifier of a mode; lossy ones are loaded only for a request that names one."""

from __future__ import annotations

from precedent.config import is_lossy
from precedent.verify import LOSSLESS, Verifier


def verifier_of(mode: str) -> Verifier:
    """How a mode of `precedent.config` verifies. Raises ConfigError for parameters that a lossy mode does not have."""
    if not is_lossy(mode):
        return LOSSLESS[mode]
    from precedent.verify.lossy import lossy_verifier  # here: a lossless request never imports that room

    return lossy_verifier(mode)
