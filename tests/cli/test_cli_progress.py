"""What commands say of their progress: silence never lasts, a terminal shows bars, and others' bars stay away."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from precedent.cli.progress import FIRST_SECONDS, Clock, Progress
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm

LONGEST_SILENCE = 15
"""Seconds, of which the documentation speaks."""


class HandClock(Clock):
    """Stands still until a test moves it; nobody is woken."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        return self.seconds

    def wait(self, stopped: threading.Event, seconds: float) -> bool:
        return stopped.wait()


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


def lines_of(clock: Clock, actions: Callable[[Progress], None]) -> list[str]:
    stream = io.StringIO()
    with Progress(stream, terminal=False, clock=clock) as progress:
        actions(progress)
    return stream.getvalue().splitlines()


def test_a_short_command_says_nothing(clock: HandClock) -> None:
    def short(progress: Progress) -> None:
        for clock.seconds in (0.0, 1.0, FIRST_SECONDS - 0.1):
            progress.show("loading")

    assert lines_of(clock, short) == []


def test_each_stage_has_a_line_and_counts_come_now_and_then(clock: HandClock) -> None:
    def long(progress: Progress) -> None:
        clock.seconds = 6.0
        progress.show("loading it", note="a big one")
        for done in range(8):
            progress.show("measuring", done, 8)
            clock.seconds += 2.0
        progress.show("comparing")
        progress.say("nothing differs")

    assert lines_of(clock, long) == [
        "loading it: a big one (6 s)",
        "measuring: 0 of 8 (6 s)",
        "measuring: 3 of 8 (12 s)",
        "measuring: 6 of 8 (18 s)",
        "comparing (22 s)",
        "nothing differs (22 s)",
    ]


def test_a_listener_that_has_gone_does_not_stop_the_work(clock: HandClock) -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    clock.seconds = 6.0
    with Progress(Gone(), terminal=False, clock=clock) as progress:
        progress.say("who hears this?")


def test_a_terminal_shows_counts_in_bars_and_is_left_clean() -> None:
    stream = io.StringIO()
    with Progress(stream, terminal=True) as progress:
        progress.show("loading")
        progress.show("measuring", 3, 8, "plain")
        progress.show("measuring", 8, 8, "ours")
        progress.say("all done")
    shown = stream.getvalue()
    assert "measuring" in shown
    assert "8 of 8" in shown
    assert "all done" in shown
    assert shown.endswith("\x1b[1A\x1b[2K"), "the last thing written takes a line away"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    tiny_causal_lm(dtype=torch.float32, scale=2.0, max_position_embeddings=1 << 14).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Forty conversations as OpenAI's format has them."""
    path = tmp_path_factory.mktemp("log") / "log.jsonl"
    said = [[{"role": "user", "content": f"where is order {n}?"}, {"role": "assistant", "content": "on its way"}]
            for n in range(40)]  # fmt: skip
    path.write_text("".join(json.dumps({"task_id": str(n % 5), "messages": one}) + "\n" for n, one in enumerate(said)))
    return str(path)


def run_piped(*arguments: str) -> tuple[str, list[str], int]:
    """Standard output, the lines of standard error, and when results were ready by the stepped clock."""
    program = Path(__file__).parent / "stepped_clock.py"
    done = subprocess.run([sys.executable, str(program), *arguments], capture_output=True, text=True, check=False)
    *lines, last = done.stderr.splitlines()
    assert done.returncode == 0, done.stderr
    lines = [line for line in lines if not line.startswith("the chat template of")]  # a warning about the model
    return done.stdout, lines, int(last.removeprefix("results were ready at "))


def longest_silence(lines: list[str], end: int) -> int:
    """In seconds of the clock, from the start to the first line, between lines, and to the end."""
    times = [0]
    for line in lines:
        found = re.search(r"\((?:(\d+) min )?(\d+) s\)$", line)
        assert found, f"not a line of progress: {line!r}"
        times.append(60 * int(found[1] or 0) + int(found[2]))
    return max(after - before for before, after in zip(times, [*times[1:], end], strict=True))


COMMANDS = {
    "replay": "replay {log} --tokenizer {model} --embedder none --target {model}",
    "bench": "bench --target {model} --traces {log} --prompts 2 --warm 2 --max-tokens 16",
    "demo": "demo --target {model} --draft-model first-layers:1 --requests 1",
}
FAST = ("replay",)


@pytest.mark.parametrize(
    "command", [pytest.param(name, marks=[] if name in FAST else [pytest.mark.slow]) for name in COMMANDS]
)
def test_a_command_that_is_piped_never_falls_silent(
    command: str, model: str, log: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    words = [word.format(model=model, log=log, tmp=tmp_path) for word in COMMANDS[command].split()]
    _, lines, end = run_piped(*words)
    assert end > LONGEST_SILENCE, "the command must last long enough to show anything"
    assert longest_silence(lines, end) <= LONGEST_SILENCE


def test_what_is_too_long_a_silence_is_found() -> None:
    assert longest_silence(["loading (5 s)", "measuring: 1 of 2 (1 min 0 s)"], 62) == 55
    with pytest.raises(AssertionError, match="not a line of progress"):
        longest_silence(["Loading weights: 100%|███| 272/272"], 10)
