"""Two real servers for all clients."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from pytest_socket import enable_socket

from precedent_server.keys import add_key

HERE = Path(__file__).parent
SMOL = "smollm2"


@dataclass(frozen=True, slots=True, eq=False)
class Server:
    """A running server; `keys` are API keys by name."""

    address: str
    keys: dict[str, str]

    @property
    def url(self) -> str:
        """What clients call `base_url`."""
        return f"{self.address}/v1"


@pytest.fixture(autouse=True)
def _sockets() -> None:
    """Only the loopback address is used."""
    enable_socket()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with keys on scripted models."""
    folder = tmp_path_factory.mktemp("server")
    roles = {"desk": "use", "other": "use", "boss": "admin"}
    keys = {name: add_key(folder / "keys.json", name, "shop", role) for name, role in roles.items()}
    command = [sys.executable, str(HERE / "scripted_server.py"), str(folder / "keys.json")]
    with started(command, folder / "log.txt", "stdout") as address:
        yield Server(address, keys)


@pytest.fixture(scope="session")
def smol(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """`precedent serve` with the packaged model, without keys."""
    folder = tmp_path_factory.mktemp("smol")
    main = "from precedent.cli.app import main; main()"
    models = ["--model", f"{SMOL}=smollm2-135m-instruct", "--cache", str(folder / "cache"), "--port", "0"]
    with started([sys.executable, "-c", main, "serve", *models], folder / "log.txt", "stderr") as address:
        yield Server(address, {})


@contextmanager
def started(command: list[str], log: Path, tells: str) -> Iterator[str]:
    """Run a server that tells its address on `tells`; everything else goes to `log`. It must end on SIGTERM."""
    with log.open("wb") as other:
        streams: dict[str, Any] = {"stdout": other, "stderr": other, tells: subprocess.PIPE}
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent), *sys.path])}
        with subprocess.Popen(command, text=True, env=environment, **streams) as running:
            told, said = getattr(running, tells), list[str]()
            try:
                while not (found := re.search(r"http://[\d.]+:\d+", said[-1] if said else "")):
                    said.append(told.readline())
                    assert said[-1], "".join(said) + log.read_text()
                yield found[0]
            finally:
                running.send_signal(signal.SIGTERM)
                told.read()
    assert running.returncode == 0, log.read_text()


@pytest.fixture
def client(server: Server) -> Iterator[OpenAI]:
    """openai-python with a key that may ask."""
    with OpenAI(base_url=server.url, api_key=server.keys["desk"], max_retries=0) as made:
        yield made
