"""What commands say of their progress: silence never lasts, and a terminal shows a spinner."""

from __future__ import annotations

import io
import threading

import pytest

from precedent.cli import progress as progress_module
from precedent.cli.progress import FIRST_SECONDS, Progress


class Clock:
    """Stands still until a test moves it."""

    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def test_a_short_command_says_nothing_and_each_stage_of_a_long_one_has_a_line_with_counts_now_and_then() -> None:
    stream, clock = io.StringIO(), Clock()
    with Progress(stream, terminal=False, now=clock) as progress:
        for clock.seconds in (0.0, 1.0, FIRST_SECONDS - 0.1):
            progress.show("reading")
        assert stream.getvalue() == ""
        clock.seconds = 6.0
        progress.show("loading it", note="a big one")
        for done in range(8):
            progress.show("measuring", done, 8)
            clock.seconds += 2.0
        clock.seconds = 62.0
        progress.show("comparing")
        progress.say("nothing differs")
    assert stream.getvalue().splitlines() == [
        "loading it: a big one (6 s)",
        "measuring: 0 of 8 (6 s)",
        "measuring: 3 of 8 (12 s)",
        "measuring: 6 of 8 (18 s)",
        "comparing (1 min 2 s)",
        "nothing differs (1 min 2 s)",
    ]


def test_a_command_that_says_nothing_is_heard_of_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the last lines find nobody who reads them, which does not stop the work."""
    assert FIRST_SECONDS + progress_module.LONGEST_SILENCE <= 15, "what the documentation promises"
    monkeypatch.setattr(progress_module, "FIRST_SECONDS", 0.01)
    monkeypatch.setattr(progress_module, "LONGEST_SILENCE", 0.01)
    written, enough = list[str](), threading.Event()

    class Reader(io.StringIO):
        def write(self, text: str) -> int:
            written.append(text)
            if len(written) > 6:
                enough.set()
                raise BrokenPipeError
            return len(text)

    with Progress(Reader(), terminal=False) as progress:
        progress.show("loading", note="it takes long")
        assert enough.wait(60)
    assert set(written) == {"loading: it takes long (0 s)\n"}, "every line is written as a whole"


def test_a_terminal_shows_counts_beside_a_spinner_and_is_left_clean() -> None:
    stream = io.StringIO()
    with Progress(stream, terminal=True) as progress:
        progress.show("loading")
        assert list(progress.each("ab", "measuring", 2)) == ["a", "b"]
        progress.say("all done")
    shown = stream.getvalue()
    for part in ("measuring", "2 of 2", "all done"):
        assert part in shown
    assert shown.endswith("\x1b[1A\x1b[2K"), "the last thing written takes a line away"
