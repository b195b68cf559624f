"""The verifier of a mode; lossy ones are imported only for a request that names one."""

from __future__ import annotations

from precedent.config import is_lossy
from precedent.verify import LOSSLESS, Verifier


def verifier_of(mode: str) -> Verifier:
    """The verifier of a mode of `precedent.config`. Raises ConfigError for unknown parameters of a lossy mode."""
    if not is_lossy(mode):
        return LOSSLESS[mode]
    from precedent.verify.lossy import lossy_verifier  # here: a lossless request never imports that package

    return lossy_verifier(mode)
