"""A real Ray on this machine, started by its own commands and ended whole, and streams of several tenants to it."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import httpx
import openai
import psutil
from openai import OpenAI

from precedent.config import SamplingParams, SpeculationConfig
from precedent.engine.engine import Engine

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
    """`with RayCluster(log) as cluster:`; `deploy` starts or replaces what is served."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._folder = Path(tempfile.mkdtemp(prefix="pr-", dir="/tmp"))  # sockets below it need short paths
        self._head: psutil.Popen | None = None
        self.port, self._head_port = free_port(), free_port()
        self.url, self._address = f"http://127.0.0.1:{self.port}", f"127.0.0.1:{self._head_port}"

    def __enter__(self) -> Self:
        try:
            settings = (f"--port={self._head_port}", f"--temp-dir={self._folder}", "--include-dashboard=false")
            self._head = self._raylet("--head", *settings)
            place = ("--address", self._address, "--http-host", "127.0.0.1", "--http-port", str(self.port))
            self._until_done("serve", "start", *place, "--proxy-location", "HeadOnly")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._head is not None:
            _end(self._head)
        self._head = None
        shutil.rmtree(self._folder, ignore_errors=True)

    def deploy(self, **settings: object) -> None:
        """Serve with these settings, and wait until it does; a second call is a rolling update."""
        args = [f"{name}={value}" for name, value in settings.items()]
        self._until_done("serve", "run", "--non-blocking", "--address", self._address, "precedent_ray:app", *args)

    def replicas(self) -> list[int]:
        """Process ids of the replicas that run."""
        return [] if self._head is None else sorted(one.pid for one in _replicas_of(self._head))

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

    def log(self) -> str:
        """What Ray's commands wrote."""
        return self._log.read_text(errors="replace")

    def _raylet(self, *settings: str) -> psutil.Popen:
        store = f"--object-store-memory={OBJECT_STORE_BYTES}"
        command = [*_program("ray"), "start", "--block", "--disable-usage-stats", "--num-cpus=1", store]
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


TOKENS = 24
PLAIN = SpeculationConfig(enabled=False, write_back=False)
MOST_TRIES = 60
PAUSE_SECONDS = 1.0
"""Between two tries; a replica takes a while to start on a busy machine."""

CLEAR = (openai.APIError, httpx.TransportError)
"""What a client gets when a replica is lost: an error event, a status, or a connection that ends."""


def prompt(tenant: str, number: int) -> str:
    """A question of a tenant; the same number asks the same."""
    return f"{tenant} asks for order {number}: "


class Plain:
    """What plain decoding answers, each question once."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._known = engine, dict[tuple[str, int], str]()
        self._lock = threading.Lock()

    def __call__(self, asked: str, tokens: int = TOKENS) -> str:
        with self._lock:
            if (asked, tokens) not in self._known:
                ids = self._engine.tokenizer.encode(asked, add_special_tokens=False)
                done = self._engine.submit(ids, SamplingParams(max_tokens=tokens), speculation=PLAIN)
                self._known[asked, tokens] = "".join(emission.text for emission in done)
            return self._known[asked, tokens]


@dataclass
class Told:
    """What a run of requests brought."""

    wrong: list[str] = field(default_factory=list)
    answered: list[str] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)
    recalled: int = 0

    @property
    def kinds(self) -> Counter[str]:
        """How often each kind of error was seen."""
        return Counter(getattr(error, "code", None) or type(error).__name__ for error in self.errors)


def ask(client: openai.OpenAI, asked: str, tokens: int = TOKENS) -> tuple[str, int]:
    """The text of one stream, and how many of its tokens were recalled. Raises the client's errors.

    Each request names another session, as a client does that wants to be somewhere else.
    """
    text, recalled = "", 0
    stream = client.completions.create(
        model=MODEL, prompt=asked, max_tokens=tokens, temperature=0, stream=True,
        extra_headers={"x-session-id": os.urandom(4).hex()},
    )  # fmt: skip
    finished = False
    for chunk in stream:
        for choice in chunk.choices:
            text += choice.text
            finished = finished or choice.finish_reason is not None
        recalled += (getattr(chunk, "speculation", None) or {}).get("accepted_by_source", {}).get("recall", 0)
    if not finished:
        raise httpx.RemoteProtocolError("the stream ended without a reason")
    return text, recalled


def traffic(
    cluster: RayCluster,
    keys: Mapping[str, str],
    numbers: Iterable[int],
    plain: Plain,
    *,
    meanwhile: Callable[[Told], Any] | None = None,
    tokens: int = TOKENS,
) -> Told:
    """Every tenant asks all numbers, one after the other, and beside the other tenants; failed requests are repeated.

    `meanwhile` runs beside them on the caller's thread.
    """
    told, numbers = Told(), list(numbers)
    for tenant in keys:  # before: plain decoding here would keep the clients from asking
        for number in numbers:
            plain(prompt(tenant, number), tokens)
    with ThreadPoolExecutor(len(keys)) as threads:
        asking = [
            threads.submit(_asks, cluster, tenant, key, numbers, plain, told, tokens) for tenant, key in keys.items()
        ]
        if meanwhile is not None:
            meanwhile(told)
        for one in asking:
            one.result()
    return told


def _asks(
    cluster: RayCluster, tenant: str, key: str, numbers: list[int], plain: Plain, told: Told, tokens: int
) -> None:
    client = cluster.client(key)
    for number in numbers:
        asked = prompt(tenant, number)
        text, recalled = until_answered(lambda asked=asked: ask(client, asked, tokens), told)
        told.recalled += recalled
        told.answered.append(asked)
        if text != plain(asked, tokens):
            told.wrong.append(asked)


def until_answered(work: Callable[[], Any], told: Told) -> Any:
    """The result of a request, repeated after each error that says so."""
    for _ in range(MOST_TRIES):
        try:
            return work()
        except CLEAR as error:
            told.errors.append(error)
            time.sleep(PAUSE_SECONDS)
    raise AssertionError(f"no answer in {MOST_TRIES} tries: {told.kinds}")


def until(condition: Callable[[], Any], what: str, seconds: float = 600) -> Any:
    """Wait for something that another process does; what it finally gives."""
    ends = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < ends, f"{what} did not come"
        time.sleep(0.2)
    return found
