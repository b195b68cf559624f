"""Programs in processes of their own that begin at once: forked from a process that has imported what they need.

Importing torch, transformers and langchain takes longer than most programs of the tests. `run` and `Program` are
`subprocess.run` and `subprocess.Popen` without `python`. A program that asks what
it imports itself needs a process that has imported nothing: `subprocess`.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

FORKING = Path(__file__).with_name("forking_program.py")


@cache
def nursery() -> socket.socket:
    """The socket of the process that forks, started once; it ends with this process, which alone holds the socket."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, str(FORKING), str(theirs.fileno())]
    with theirs:
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)

    @atexit.register
    def end() -> None:
        ours.close()
        process.wait()

    return ours


class Program:
    """A running program. `stdout` is a pipe to read, `stdin` one to write; standard error is this process's."""

    def __init__(self, arguments: Sequence[object], **options: Any) -> None:
        (theirs_in, ours_in), (ours_out, theirs_out) = os.pipe(), os.pipe()
        self._run = _Started(arguments, (theirs_in, theirs_out, 2), **options)
        os.close(theirs_in)
        os.close(theirs_out)
        self.stdin, self.stdout = os.fdopen(ours_in, "w"), os.fdopen(ours_out)
        self.pid, self.wait = self._run.pid, self._run.wait

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        self.stdin.close()
        self.stdout.close()
        self.wait()

    def send_signal(self, number: int) -> None:
        """Send a signal; nothing if it has ended."""
        if self._run.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it at once, if it still runs."""
        self.send_signal(signal.SIGKILL)


def run(arguments: Sequence[object], *, timeout: float | None = None, **options: Any) -> Any:
    """Run a program to its end; its status, standard output and error are `subprocess.CompletedProcess`'s."""
    with TemporaryFile() as nothing, TemporaryFile("w+") as out, TemporaryFile("w+") as err:
        started = _Started(arguments, (nothing.fileno(), out.fileno(), err.fileno()), **options)
        status = started.wait(timeout)
        return subprocess.CompletedProcess(list(arguments), status, _whole(out), _whole(err))


class _Started:
    """A program that was asked for, with the pipe that tells of its end."""

    def __init__(
        self,
        arguments: Sequence[object],
        streams: tuple[int, int, int],
        *,
        cwd: str | Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        reading, writing = os.pipe()
        order = {
            "arguments": [str(argument) for argument in arguments],
            "folder": str(cwd or Path.cwd()),
            "environment": dict(os.environ if env is None else env),
        }
        with TemporaryFile("w+") as file:
            json.dump(order, file)
            file.flush()
            socket.send_fds(nursery(), [b"."], [file.fileno(), *streams, writing])
        os.close(writing)
        self._told, self._status = os.fdopen(reading), None
        said = self._told.readline()
        assert said, f"{FORKING.name} has ended: see its standard error"
        self.pid = int(said)

    def poll(self) -> int | None:
        """The status, None while it runs."""
        return self._ended(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """The status, once it has ended. Raises subprocess.TimeoutExpired, and kills it."""
        status = self._ended(timeout)
        if status is None:
            os.kill(self.pid, signal.SIGKILL)
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return status

    def _ended(self, timeout: float | None) -> int | None:
        if self._status is None and select.select([self._told], [], [], timeout)[0]:
            self._status = int(self._told.readline())
            self._told.close()
        return self._status


def _whole(file: IO[str]) -> str:
    file.seek(0)
    return file.read()
