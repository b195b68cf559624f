"""Other processes that change a key file."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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
