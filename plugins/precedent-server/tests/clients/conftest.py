"""A real server for all clients."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
from pytest_socket import enable_socket

from precedent_server.keys import add_key

HERE = Path(__file__).parent

NEEDED = {"test_anthropic.py": "anthropic", "test_langchain.py": "langchain_anthropic", "test_ollama.py": "ollama"}
"""Packages that `make test-clients` installs; other runs do not collect these tests."""

collect_ignore = [name for name, package in NEEDED.items() if find_spec(package) is None]


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
    """A server with keys on scripted models; everything but its address goes to a log. It must end on SIGTERM."""
    folder = tmp_path_factory.mktemp("server")
    roles = {"desk": "use", "other": "use", "boss": "admin"}
    keys = {name: add_key(folder / "keys.json", name, "shop", role) for name, role in roles.items()}
    command = [sys.executable, str(HERE / "scripted_server.py"), str(folder / "keys.json")]
    log, environment = folder / "log.txt", {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent), *sys.path])}
    with (
        log.open("wb") as other,
        subprocess.Popen(command, text=True, env=environment, stdout=subprocess.PIPE, stderr=other) as running,
    ):
        try:
            address = running.stdout.readline().strip()
            assert address.startswith("http://"), log.read_text()
            yield Server(address, keys)
        finally:
            running.send_signal(signal.SIGTERM)
            running.stdout.read()
    assert running.returncode == 0, log.read_text()
