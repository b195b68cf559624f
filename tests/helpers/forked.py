"""Programs in processes of their own that begin at once: forked from a process that has imported what they need.

Importing torch, transformers and langchain takes longer than most programs of the tests. `run` and `Program` are
`subprocess.run` and `subprocess.Popen` without `python`. A program that asks what it imports itself needs a process
that has imported nothing: `subprocess`.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryFile
from types import ModuleType
from typing import IO, Any

FORKING = multiprocessing.get_context("forkserver")
FORKING.set_forkserver_preload(
    [
        *("precedent.langchain", "precedent.engine.engine", "precedent_server.running", "precedent_server.serving"),
        *("precedent_testing.tiny_models", "precedent_testing.scripted_model", "precedent_testing.embedders"),
        *("langchain.agents", "transformers.models.llama.modeling_llama", "transformers.generation.utils"),
    ]
)


class Program:
    """A running program. `stdout` is a pipe to read, `stdin` one to write; standard error is this process's."""

    def __init__(self, arguments: Sequence[object], **options: Any) -> None:
        (theirs_in, ours_in), (ours_out, theirs_out) = os.pipe(), os.pipe()
        self._process = _started(arguments, (theirs_in, theirs_out, 2), **options)
        os.close(theirs_in)
        os.close(theirs_out)
        self.stdin, self.stdout = os.fdopen(ours_in, "w"), os.fdopen(ours_out)
        self.pid: int = self._process.pid

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        self.stdin.close()
        self.stdout.close()
        self.wait()

    def wait(self, timeout: float | None = None) -> int:
        """The status, once it has ended. Raises subprocess.TimeoutExpired, and kills it."""
        return _status(self._process, timeout)

    def send_signal(self, number: int) -> None:
        """Send a signal; nothing if it has ended."""
        if self._process.exitcode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it at once, if it still runs."""
        self.send_signal(signal.SIGKILL)


def run(arguments: Sequence[object], *, timeout: float | None = None, **options: Any) -> Any:
    """Run a program to its end; its status, standard output and error are `subprocess.CompletedProcess`'s."""
    with TemporaryFile() as nothing, TemporaryFile("w+") as out, TemporaryFile("w+") as err:
        status = _status(_started(arguments, (nothing.fileno(), out.fileno(), err.fileno()), **options), timeout)
        return subprocess.CompletedProcess(list(arguments), status, _whole(out), _whole(err))


def _started(
    arguments: Sequence[object],
    streams: Sequence[int],
    *,
    cwd: str | Path | None = None,
    env: Mapping[str, str] | None = None,
) -> Any:
    files = [Connection(os.dup(stream)) for stream in streams]  # a descriptor that can be sent to the new process
    order = ([str(each) for each in arguments], str(cwd or Path.cwd()), dict(os.environ if env is None else env), files)
    process = FORKING.Process(target=_be, args=order)
    process.start()
    for file in files:
        file.close()
    return process


def _status(process: Any, timeout: float | None) -> int:
    process.join(timeout)
    if process.exitcode is None:
        process.kill()
        process.join()
        raise subprocess.TimeoutExpired(str(process.pid), timeout or 0.0)
    return int(process.exitcode)


def _be(arguments: Sequence[str], folder: str, environment: dict[str, str], files: Sequence[Connection]) -> None:
    """`python ARGUMENTS` in a folder: `-c CODE …` or `SCRIPT …`, which may import what tests share."""
    for number, file in enumerate(files):
        os.dup2(file.fileno(), number)
        file.close()
    sys.stdin = sys.__stdin__ = open(0, encoding="utf-8")  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", encoding="utf-8")  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", buffering=1, encoding="utf-8")  # noqa: SIM115
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path += [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.modules["__main__"] = program = ModuleType("__main__")
    name = arguments[0]
    if name == "-c":
        name, code, place, sys.argv = "<string>", arguments[1], "", ["-c", *arguments[2:]]
    else:
        code, place, sys.argv = Path(name).read_text(encoding="utf-8"), str(Path(name).parent), list(arguments)
        program.__file__ = name
    sys.path.insert(0, place)
    try:
        exec(compile(code, name, "exec"), program.__dict__)
    finally:
        threading._shutdown()  # type: ignore[attr-defined]  # as Python ends, and processes of multiprocessing do not
        atexit._run_exitfuncs()


def _whole(file: IO[str]) -> str:
    file.seek(0)
    return file.read()
