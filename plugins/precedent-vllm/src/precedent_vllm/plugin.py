"""What vLLM runs in each of its processes before anything else: the entry point of `vllm.general_plugins`."""

from __future__ import annotations

import atexit
import os
import secrets
import shutil
import tempfile
from functools import partial
from pathlib import Path

from precedent_vllm.settings import FOLDER, SECRET


def register() -> None:
    """Give this process, and those that it starts, what they share: a secret and a folder. May be called again.

    The first process makes them; the others inherit them with the environment. On several machines, set both on each
    (`PRECEDENT_VLLM_SECRET`, at least 32 random characters), or no worker elsewhere believes the middleware.
    """
    os.environ.setdefault(SECRET, secrets.token_hex(32))
    if FOLDER not in os.environ:
        folder = Path(tempfile.mkdtemp(prefix="precedent-vllm-"))  # readable by its owner only
        os.environ[FOLDER] = str(folder)
        atexit.register(partial(_remove, folder, os.getpid()))


def _remove(folder: Path, maker: int) -> None:
    """Remove it at the end of the process that made it; forked ones inherit the call."""
    if os.getpid() == maker:
        shutil.rmtree(folder, ignore_errors=True)
