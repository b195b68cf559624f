"""Whole steps on a device without numbers: the one read is the one read, and no operation meets two devices."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.forked import run
from torch.utils import backend_registration

PROGRAM = Path(__file__).with_name("elsewhere_program.py")


@pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch knows no device without numbers",
)
def test_steps_read_once_and_meet_no_other_device() -> None:
    """Every mode of one read, under constraints, with samples; the program finds errors."""
    ran = run([PROGRAM], timeout=300)
    scenes = ran.stdout.splitlines()
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert [scene for scene in scenes if not scene.endswith(": fine")] == []
    assert len(scenes) >= 12
    assert sum(scene.startswith("control") for scene in scenes) == 2
