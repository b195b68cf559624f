"""A training that is killed and goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


class Killed(BaseException):
    """Stands for a signal that nobody handles."""


def check_killed_training(
    train: Callable[..., Any], kill_at: tuple[str, int], finished: Path, place: Path, *files: str
) -> None:
    """It ends with the same bytes as one that nobody killed, and nothing that was done is done again."""
    done, resumed = [], []

    def kill(phase: str, number: int, total: int, loss: float | None) -> None:
        done.append((phase, number))
        if (phase, number) == kill_at:
            raise Killed

    with pytest.raises(Killed):
        train(place, progress=kill, checkpoint_steps=2)
    assert not any((place / name).exists() for name in files if name.endswith(".json"))
    train(place, progress=lambda *said: resumed.append(said[:2]), checkpoint_steps=2)
    for name in files:
        assert (place / name).read_bytes() == (finished / name).read_bytes()
    assert len(resumed) < len(done) + len(set(resumed) - set(done))
