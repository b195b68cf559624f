"""Runs programs as Python does, each forked from this process, which has imported what most of them need.

    python tests/helpers/forking_program.py DESCRIPTOR

DESCRIPTOR is a socket. Each byte that comes brings five files: what is to be run, as JSON; the program's standard
input, output and error; and where its process id and, once it has ended, its status are written. Run by `forked.py`.
"""

from __future__ import annotations

import gc
import json
import os
import socket
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

IMPORTED = (
    *("precedent.langchain", "precedent.engine.engine", "precedent_server.running", "precedent_server.serving"),
    *("precedent_testing.tiny_models", "precedent_testing.scripted_model", "precedent_testing.embedders"),
    *("langchain.agents", "transformers.models.llama.modeling_llama", "transformers.generation.utils"),
)


def main() -> None:
    """Fork until nobody asks any more; in a child, be the program."""
    for name in IMPORTED:
        import_module(name)
    gc.freeze()  # a program that ends does not look through all that was imported
    order = serve(socket.socket(fileno=int(sys.argv[1])))
    if order is not None:
        run(**order)


def serve(asking: socket.socket) -> dict[str, Any] | None:
    """What is to be run, in the process that is to run it; None in the first process, at the end."""
    with asking:
        while True:
            byte, files, _, _ = socket.recv_fds(asking, 1, 5)
            if not byte:
                return None
            if os.fork() == 0:
                break
            for file in files:
                os.close(file)
            while os.waitpid(-1, os.WNOHANG)[0]:  # 0: those that are left still run
                pass
    return watch(*files)


def watch(order: int, *files: int) -> dict[str, Any]:
    """Fork the program, and tell of its end; returns in the program."""
    *streams, told = files
    process = os.fork()
    if process == 0:
        os.close(told)
        return begin(order, streams)
    for file in (order, *streams):
        os.close(file)
    os.write(told, f"{process}\n".encode())
    _, status = os.waitpid(process, 0)
    os.write(told, f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


def begin(order: int, streams: Sequence[int]) -> dict[str, Any]:
    """Take over the standard streams; returns what is to be run."""
    for number, file in enumerate(streams):
        os.dup2(file, number)
        os.close(file)
    sys.stdin = sys.__stdin__ = open(0, encoding="utf-8")  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", encoding="utf-8")  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", buffering=1, encoding="utf-8")  # noqa: SIM115
    with os.fdopen(order, encoding="utf-8") as file:
        file.seek(0)
        return json.load(file)


def run(arguments: Sequence[str], folder: str, environment: dict[str, str]) -> None:
    """`python ARGUMENTS` in a folder: `-c CODE …` or `SCRIPT …`, which may import what tests share."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    paths = [str(Path(__file__).parents[1]), *environment.get("PYTHONPATH", "").split(os.pathsep)]
    sys.path += [path for path in paths if path and path not in sys.path]
    sys.modules["__main__"] = program = ModuleType("__main__")
    name, *rest = arguments
    if name == "-c":
        sys.argv, sys.path[0] = ["-c", *rest[1:]], ""
        exec(compile(rest[0], "<string>", "exec"), program.__dict__)
    else:
        sys.argv, sys.path[0] = [name, *rest], str(Path(name).parent)
        program.__file__ = name
        exec(compile(Path(name).read_text(encoding="utf-8"), name, "exec"), program.__dict__)


if __name__ == "__main__":
    main()
