"""Key files as somebody may have written them by hand, and other processes that change them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from precedent_server.keys import read_keys

posix_only = pytest.mark.skipif(os.name != "posix", reason="Windows has no modes")

ENTRY = {"name": "desk", "tenant": "shop", "role": "use", "created": "2026-01-02T03:04:05Z", "sha256": "0" * 64}


KEY = "pk-" + "Secret_Key-of_43-characters-0123456789abcde"
"""Looks like a key."""


def names(path: Path) -> list[str]:
    return [one.name for one in read_keys(path)]


def private(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    path.chmod(0o600)
    return path


PATIENCE = 120.0
"""Seconds after which a process counts as hanging."""

BEGINNING = """
import sys
from pathlib import Path
from precedent_server.keys import add_key, revoke_key
path = Path(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
"""


@contextmanager
def changing(path: Path, program: str) -> Iterator[subprocess.Popen[str]]:
    """A process that runs `program`, which knows `path`, once it is told to `go`; it must end well."""
    command = [sys.executable, "-c", BEGINNING + program, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "ready\n"
            yield process
            assert process.wait(PATIENCE) == 0
        finally:
            process.kill()


def go(process: subprocess.Popen[str]) -> None:
    """Let a waiting process go on."""
    process.stdin.write("go\n")
    process.stdin.flush()
