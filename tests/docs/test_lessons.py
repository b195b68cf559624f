"""The lessons of the tutorial are followed as they are written: files are saved, commands are run, in order."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import pytest

LESSONS = Path(__file__).parents[2] / "docs" / "tutorial"
BLOCK = re.compile(
    r"(?:[Ss]ave this as `(?P<name>[\w.-]+)`[^\n]*\n\n)?```(?P<kind>python|console)\n(?P<text>.*?)```", re.DOTALL
)
SERVES = "precedent serve"
SECONDS = 900


TYPED = re.compile(r"^\$ ((?:.*\\\n)*.*)", re.MULTILINE)


def commands_in(block: str) -> list[str]:
    """What is typed in a block: behind each `$`, with the lines that a backslash continues."""
    return [found.strip() for found in TYPED.findall(block)]


class Reader:
    """Somebody who follows a lesson in a folder of their own; a server that it starts listens on a free port."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.server: subprocess.Popen[bytes] | None = None
        paths = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        self.environment = {**os.environ, "PATH": paths, "COLUMNS": "120"}

    def follow(self, page: str) -> Iterator[tuple[str, str]]:
        """Do what the page says; each command with what it printed."""
        for block in BLOCK.finditer(page):
            text = block["text"].replace("8000", str(self.port)) if "8000" in block["text"] else block["text"]
            if block["kind"] == "python":
                assert block["name"], f"no word on where to save\n{text}"
                (self.folder / block["name"]).write_text(text)
            else:
                yield from ((command, self.run(command)) for command in commands_in(text))

    @cached_property
    def port(self) -> int:
        """A free one, in place of the lesson's 8000."""
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            return int(found.getsockname()[1])

    def run(self, command: str) -> str:
        if command.startswith(SERVES):
            return self.serve(command)
        done = subprocess.run(
            ["bash", "-ec", command], cwd=self.folder, env=self.environment, capture_output=True, text=True,
            timeout=SECONDS, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def serve(self, command: str) -> str:
        """Start a server and wait until it is healthy."""
        self.server = subprocess.Popen(["bash", "-ec", f"exec {command}"], cwd=self.folder, env=self.environment)
        until = time.monotonic() + SECONDS
        while time.monotonic() < until and self.server.poll() is None:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5).close()
            except OSError:
                time.sleep(0.5)
            else:
                return ""
        pytest.fail(f"{command} did not serve")

    def leave(self) -> None:
        if self.server is not None:
            self.server.send_signal(signal.SIGINT)
            self.server.wait(60)


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    found = Reader(tmp_path)
    yield found
    found.leave()


def followed(reader: Reader, lesson: str) -> dict[str, str]:
    return dict(reader.follow((LESSONS / lesson).read_text(encoding="utf-8")))


def test_the_recorder_of_the_lesson_writes_what_the_page_says(reader: Reader) -> None:
    page = (LESSONS / "first-replay.md").read_text(encoding="utf-8").split("## Replay")[0]
    printed = dict(reader.follow(page))
    assert printed["wc -l mine.jsonl"].split() == ["2", "mine.jsonl"]
    assert (reader.folder / "desk.jsonl").stat().st_size > 10_000


@pytest.mark.slow
def test_the_replay_ends_with_the_verdict_on_the_page(reader: Reader) -> None:
    printed = followed(reader, "first-replay.md")["precedent replay desk.jsonl --json replay.json"]
    assert "recall+prompt" in printed
    assert "44 turns, 1293 tokens" in printed
    assert "tokens per step" in printed.split("Your log:")[1]


@pytest.mark.slow
@pytest.mark.model
def test_the_agent_gives_the_answers_on_the_page_and_remembers_them(reader: Reader) -> None:
    page = (LESSONS / "first-agent.md").read_text(encoding="utf-8")
    runs = [printed for command, printed in reader.follow(page) if command == "python agent.py"]
    answers = [re.findall(r"The status of order .*", printed) for printed in runs]
    assert answers[0] == answers[1] == re.findall(r"^The status of order .*", page, re.MULTILINE)[:3]
    first, second = (sum(map(int, re.findall(r"in (\d+) steps", printed))) for printed in runs)
    assert second < first < 150


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.enable_socket
def test_the_server_answers_and_remembers(reader: Reader) -> None:
    printed = followed(reader, "first-server.md")
    assert '"speculation"' in next(text for command, text in printed.items() if command.startswith("curl"))
    tokens, steps = map(int, re.findall(r"(\d+) tokens in (\d+) steps", printed["python ask.py"])[0])
    assert steps < tokens
    assert "shop" in printed["precedent keys list --file keys.json"]


@pytest.mark.slow
@pytest.mark.model
def test_the_draft_model_is_trained_and_accepted(reader: Reader) -> None:
    printed = followed(reader, "first-drafter.md")
    measured = next(text for command, text in printed.items() if command.startswith("precedent measure-draft"))
    assert "my-draft" in measured
    assert (reader.folder / "my-draft" / "draft.safetensors").is_file()
