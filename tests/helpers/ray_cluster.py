"""A real Ray on this machine: started by its own commands, killed by process ids, and nothing of it left at the end."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Self

import psutil
from openai import OpenAI

MODEL = "tiny"
REPLICA = "ray::ServeReplica:"
OBJECT_STORE_BYTES = 80 * 2**20
START_SECONDS, END_SECONDS = 900, 300
"""Generous, for busy machines."""

OF_RAY = {
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "precedent_ray.ingress:middlewares",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "RAY_AUTH_MODE": "disabled",  # `ray start` takes a token that lies in ~/.ray, and `serve start` does not
}


class RayCluster:
    """`with RayCluster(log) as cluster:`; `deploy` starts or replaces what is served, `add_node` a second raylet."""

    def __init__(self, log: Path, num_cpus: float = 1) -> None:
        self._log, self._num_cpus = log, num_cpus
        self._folder = Path(tempfile.mkdtemp(prefix="pr-", dir="/tmp"))  # sockets below it need short paths
        self._head: psutil.Popen | None = None
        self._nodes: list[psutil.Popen] = []
        self.port, self._head_port = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.port}"

    @property
    def address(self) -> str:
        """Where a driver connects to."""
        return f"127.0.0.1:{self._head_port}"

    def __enter__(self) -> Self:
        try:
            settings = (f"--port={self._head_port}", f"--temp-dir={self._folder}", "--include-dashboard=false")
            self._head = self._raylet("--head", *settings, num_cpus=self._num_cpus)
            place = ("--address", self.address, "--http-host", "127.0.0.1", "--http-port", str(self.port))
            self._until_done("serve", "start", *place, "--proxy-location", "HeadOnly")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for node in (*self._nodes, self._head):
            if node is not None:
                _end(node)
        self._nodes, self._head = [], None
        shutil.rmtree(self._folder, ignore_errors=True)

    def deploy(self, **settings: object) -> None:
        """Serve with these settings, and wait until it does; a second call is a rolling update."""
        self.deploy_app("precedent_ray:app", *(f"{name}={value}" for name, value in settings.items()))

    def deploy_app(self, import_path: str, *args: str) -> None:
        """Serve any application."""
        self._until_done("serve", "run", "--non-blocking", "--address", self.address, import_path, *args)

    def add_node(self, num_cpus: float = 1) -> psutil.Popen:
        """A second node: another raylet on this machine."""
        self._nodes.append(self._raylet(f"--address={self.address}", num_cpus=num_cpus))
        return self._nodes[-1]

    def lose(self, node: psutil.Popen) -> None:
        """Take a node away at once, as a power cut would."""
        self._nodes.remove(node)
        _kill([*node.children(recursive=True), node])

    def replicas(self) -> list[int]:
        """Process ids of the replicas that run."""
        return sorted(one.pid for root in (self._head, *self._nodes) if root is not None for one in _replicas_of(root))

    def kill(self, pid: int) -> None:
        """End a replica as the kernel does when memory runs out."""
        os.kill(pid, signal.SIGKILL)

    def client(self, key: str) -> OpenAI:
        """A client that never tries again."""
        return OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=600)

    def figures(self, key: str) -> dict[str, Counter[str]]:
        """All metrics by replica and name, of as many models as there are."""
        asked = urllib.request.Request(f"{self.url}/metrics", headers={"Authorization": f"Bearer {key}"})
        with urllib.request.urlopen(asked, timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        found: dict[str, Counter[str]] = {}
        for line in lines:
            if not line.startswith("#"):
                labelled, _, value = line.rpartition(" ")
                name, _, labels = labelled.partition("{")
                replica = labels.partition('replica="')[2].partition('"')[0]
                found.setdefault(replica, Counter())[name] += float(value)  # type: ignore[assignment]
        return found

    def total(self, key: str, name: str) -> float:
        """A metric, added up over all replicas."""
        return sum(one[name] for one in self.figures(key).values())

    def log(self) -> str:
        """What Ray's commands wrote."""
        return self._log.read_text(errors="replace")

    def _raylet(self, *settings: str, num_cpus: float) -> psutil.Popen:
        store = f"--object-store-memory={OBJECT_STORE_BYTES}"
        command = [*_program("ray"), "start", "--block", "--disable-usage-stats", f"--num-cpus={num_cpus:g}", store]
        with self._log.open("ab") as log:
            started = psutil.Popen(
                [*command, *settings], stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=_variables(),
                start_new_session=True,
            )  # fmt: skip
        until = time.monotonic() + START_SECONDS
        while not any("raylet" in one.name() for one in started.children(recursive=True)):
            if started.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"Ray did not start:\n{self.log()[-6000:]}")
            time.sleep(0.2)
        return started

    def _until_done(self, program: str, *arguments: str) -> None:
        with self._log.open("ab") as log:
            done = subprocess.run(
                [*_program(program), *arguments], stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=_variables(),
                check=False, timeout=START_SECONDS,
            )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"{program} {arguments[0]} failed:\n{self.log()[-6000:]}")


def _program(name: str) -> list[str]:
    return [str(Path(sys.executable).parent / name)]


def _variables() -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "NUMBA_", "OMP_"))}
    return {**clean, **OF_RAY}


def _replicas_of(root: psutil.Process) -> list[psutil.Process]:
    found = []
    for one in root.children(recursive=True):
        with suppress(psutil.Error):
            if one.status() != psutil.STATUS_ZOMBIE and "".join(one.cmdline()[:1]).startswith(REPLICA):
                found.append(one)
    return found


def _end(root: psutil.Popen) -> None:
    """End a raylet as `ray stop` does, and whatever of it is left."""
    family = root.children(recursive=True) if root.is_running() else []
    with suppress(psutil.Error):
        root.terminate()
    psutil.wait_procs([root, *family], timeout=20)
    _kill([root, *family])


def _kill(processes: list[psutil.Process]) -> None:
    for one in processes:
        with suppress(psutil.Error):
            one.kill()
    psutil.wait_procs(processes, timeout=END_SECONDS)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
