"""Builds the Dockerfile, starts its server with a tiny model, and asks for health and a completion.

    python .ci/container.py

Where no Docker answers, the commands of its build stage run in a folder that stands for the image's file system, with
the settings of its last stage; what only an image can have (users, volumes) is then not tried. PIP_ARGS are arguments
for pip, instead of those in the Dockerfile: by default none, so that pip's configuration decides where torch is from.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
IMAGE = "precedent-tried"
PATIENCE = 1800
"""Seconds for a server to load its model and to compile kernels, on however busy a machine."""

PLACES = ("/opt/precedent", "/build", "/data", "/models", "/cache")
"""Folders of the image."""

ADD_KEY = ("keys", "add", "desk", "--tenant", "shop", "--file")

Step = tuple[str, str]
"""An instruction and its arguments."""


def steps() -> list[Step]:
    """Read the Dockerfile."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    lines = re.sub(r"\\\n\s*", " ", text).splitlines()
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in lines) if name]


def run(*command: str | Path, **more: str) -> str:
    """Run a command, which must succeed; returns what it prints."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | more
    done = subprocess.run(
        [*map(str, command)], cwd=ROOT, env=environment, check=True, stdout=subprocess.PIPE, text=True
    )
    return done.stdout.strip()


def docker_answers() -> bool:
    """Whether there is a Docker with its daemon."""
    if shutil.which("docker") is None:
        return False
    return subprocess.run(["docker", "info"], capture_output=True, check=False).returncode == 0


def tiny_model(folder: Path) -> None:
    """Write a model of a few thousand weights."""
    from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm

    tiny_causal_lm(vocab_size=300).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)


def asked(address: str, key: str, running: Callable[[], bool]) -> None:
    """Wait until the server is healthy, and have it answer; it must refuse to do so without a key."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            urllib.request.urlopen(f"{address}/health", timeout=5)
            break
        except OSError:
            if time.monotonic() > deadline or not running():
                raise
            time.sleep(1)
    body = json.dumps({"model": "tiny", "prompt": "hello", "max_tokens": 4}).encode()
    for headers, status in ({"Authorization": f"Bearer {key}"}, 200), ({}, 401):
        request = urllib.request.Request(f"{address}/v1/completions", body, headers)
        try:
            answer = urllib.request.urlopen(request, timeout=PATIENCE)
            told = json.loads(answer.read())["usage"]
        except urllib.error.HTTPError as error:
            answer, told = error, error.reason
        assert answer.status == status, (answer.status, told)
        print(f"== {status}: {told}", flush=True)


def image_tried(model: Path) -> None:
    """Build the image and ask a container of it."""
    given = ("--build-arg", f"PIP_ARGS={os.environ['PIP_ARGS']}") if "PIP_ARGS" in os.environ else ()
    run("docker", "build", "--tag", IMAGE, *given, ROOT)
    volume = ("--volume", f"{IMAGE}:/data")
    try:
        key = run("docker", "run", "--rm", *volume, IMAGE, *ADD_KEY, "/data/keys.json")
        mounted = ("--volume", f"{model}:/models/tiny:ro", "--env", "PRECEDENT_SERVE_TARGET=/models/tiny")
        container = run("docker", "run", "--detach", "--publish", "127.0.0.1::8000", *volume, *mounted, IMAGE)
        try:
            state = ("docker", "inspect", "--format", "{{.State.Running}}", container)
            asked(f"http://{run('docker', 'port', container, '8000')}", key, lambda: run(*state) == "true")
            assert run("docker", "exec", container, "id", "-u") != "0"
            run("docker", "stop", "--time", "45", container)
            assert run("docker", "inspect", "--format", "{{.State.ExitCode}}", container) == "0"
        finally:
            run("docker", "rm", "--force", container)
    finally:
        run("docker", "volume", "rm", "--force", IMAGE)


def steps_tried(model: Path, folder: Path) -> None:
    """Run the steps of the build in a folder, and ask a server with the settings of the image."""
    found = steps()
    stages = [index for index, (name, _) in enumerate(found) if name == "FROM"]
    first, last = found[stages[0] : stages[1]], found[stages[1] :]

    def placed(text: str) -> str:
        for place in PLACES:
            text = re.sub(rf"(?<![\w./]){place}\b", f"{folder}{place}", text)
        return text

    for place in ("/build", "/data", "/models", "/cache"):
        (folder / place[1:]).mkdir(parents=True)
    for name in "LICENSE", "README.md", "constraints.txt", "pyproject.toml":
        shutil.copy(ROOT / name, folder / "build")
    for name in "src", "plugins":
        shutil.copytree(
            ROOT / name, folder / "build" / name, ignore=shutil.ignore_patterns("tests", "__pycache__", "node_modules")
        )
    for name, command in first:
        if name == "RUN":
            print(f"== {command}", flush=True)
            subprocess.run(["sh", "-euc", placed(command)], cwd=folder / "build", check=True, stdout=subprocess.DEVNULL,
                           env={"PIP_ARGS": "", **os.environ})  # fmt: skip
    shutil.rmtree(folder / "build")
    settings = dict(pair.partition("=")[::2] for name, rest in last if name == "ENV" for pair in shlex.split(rest))
    settings = {name: placed(value) for name, value in settings.items()}
    settings["PATH"] = settings["PATH"].replace("$PATH", os.environ["PATH"])
    port = free_port()
    settings |= {
        "PRECEDENT_HEALTH": settings["PRECEDENT_HEALTH"].replace("8000", str(port)),
        "PRECEDENT_SERVE_PORT": str(port),
    }
    shutil.copytree(model, folder / "models" / "tiny")
    settings["PRECEDENT_SERVE_TARGET"] = str(folder / "models" / "tiny")
    (program,), command, check = map(json.loads, commands(last))
    precedent = folder / "opt/precedent/bin" / program
    key = run(precedent, *ADD_KEY, settings["PRECEDENT_SERVE_API_KEYS"], **settings)
    with serving([precedent, *command], settings) as process:
        asked(f"http://127.0.0.1:{port}", key, lambda: process.poll() is None)
        run(folder / "opt/precedent/bin" / check[0], *check[1:], **settings)


def commands(stage: list[Step]) -> tuple[str, str, str]:
    """The entry point, the command and the health check of a stage, each as JSON."""
    of = dict(stage)
    return of["ENTRYPOINT"], of["CMD"], of["HEALTHCHECK"].partition("CMD ")[2]


@contextmanager
def serving(command: list[str | Path], settings: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A server for the time of the block; it must end well on SIGTERM."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | settings
    with subprocess.Popen([*map(str, command)], env=environment) as process:
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
    assert process.returncode == 0, process.returncode


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        tiny_model(Path(name) / "tiny")
        if docker_answers():
            image_tried(Path(name) / "tiny")
        else:
            print("== no Docker answers: the steps of the Dockerfile run in an empty environment", flush=True)
            steps_tried(Path(name) / "tiny", Path(name) / "image")
    print("== the server of the Dockerfile answers")
    sys.exit(0)
