"""What vLLM runs in each of its processes before anything else: the entry point of `vllm.general_plugins`.

It must not import numba: on a CPU without Triton, vLLM 0.32 and 0.33 next call `vars` on every object of every module,
and for a library object of llvmlite, which numba loads, that is not a dictionary.
"""

from __future__ import annotations

import atexit
import os
import secrets
import shutil
import tempfile
from functools import partial
from pathlib import Path

from precedent_server.keys import KeyFile
from precedent_vllm.settings import FOLDER, SECRET, Settings


def register() -> None:
    """Give this process, and those that it starts, what they share: a secret and a folder. May be called again.

    The first process makes them; the others inherit them with the environment. On several machines, set both on each
    (`PRECEDENT_VLLM_SECRET`, at least 32 random characters), or no worker elsewhere believes the middleware. Raises
    ConfigError for settings or a key file that cannot be used: vLLM then does not start.
    """
    os.environ.setdefault(SECRET, secrets.token_hex(32))
    if FOLDER not in os.environ:
        folder = Path(tempfile.mkdtemp(prefix="precedent-vllm-"))  # readable by its owner only
        os.environ[FOLDER] = str(folder)
        atexit.register(partial(_remove, folder, os.getpid()))
    settings = Settings.read()
    if settings.api_keys is not None:
        KeyFile(settings.api_keys)


def _remove(folder: Path, maker: int) -> None:
    """Remove it at the end of the process that made it; forked ones inherit the call."""
    if os.getpid() == maker:
        shutil.rmtree(folder, ignore_errors=True)
