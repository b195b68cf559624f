"""Shows on stderr what a command is doing: a spinner on a terminal, elsewhere a line at least every 15 seconds.

A pipe, a log or a build server cannot show a spinner, and without output a command seems to hang. This module imports
only the standard library, because `.ci/install.py` uses it before anything is installed.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import TextIO, TypeVar

Item = TypeVar("Item")

FIRST_SECONDS = 5.0
"""A command that finishes within this time prints no progress."""

OFTEN_SECONDS = 5.0
"""The shortest time between two printed counts of the same stage."""

LONGEST_SILENCE = 10.0
"""A line is printed after this time even if nothing has changed; we promise one every 15 seconds."""


class Progress:
    """Shows what a command is doing, from `__enter__` until `rest` or `__exit__`. Thread-safe.

    With `terminal=None` the stream is asked whether it is a terminal. `now` tells the time in seconds.
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        *,
        terminal: bool | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream, self._terminal, self._now = stream, terminal, now
        self._display: _Spinner | _Lines | None = None

    def __enter__(self) -> Progress:
        """Start showing progress."""
        stream = self._stream or sys.stderr
        terminal = stream.isatty() if self._terminal is None else self._terminal
        self._display = _Spinner(stream) if terminal else _Lines(stream, self._now)
        return self

    def __exit__(self, *error: object) -> None:
        self.rest()

    def show(self, what: str, done: int | None = None, total: int | None = None, note: str = "") -> None:
        """Show what is being done now, and how much of it is done."""
        counted = "" if done is None else f"{done} of {total}" if total else str(done)
        details = ", ".join(filter(None, (counted, note)))
        if self._display is not None:
            self._display.show(what, f"{what}: {details}" if details else what)

    def say(self, line: str) -> None:
        """Show this line immediately."""
        if self._display is not None:
            self._display.say(line)

    def rest(self) -> None:
        """Stop showing progress and clear the spinner, so that results can follow."""
        if self._display is not None:
            self._display.stop()
            self._display = None

    def counter(self, what: str, total: int | None = None) -> Callable[[int], None]:
        """A function to call with the number of further items done, out of `total` if it is known."""
        done = 0

        def more(number: int) -> None:
            nonlocal done
            done += number
            self.show(what, done, total)

        more(0)
        return more

    def each(self, items: Iterable[Item], what: str, total: int | None = None) -> Iterator[Item]:
        """Yield the items and show how many are done."""
        more = self.counter(what, total)
        for item in items:
            yield item
            more(1)


class _Lines:
    """Plain lines: the first after `FIRST_SECONDS`, then one per new stage, occasional counts, never a long silence."""

    def __init__(self, stream: TextIO, now: Callable[[], float]) -> None:
        self._stream, self._now, self._stage, self._text = stream, now, "", "working"
        self._begun = now()
        self._often = self._due = self._begun + FIRST_SECONDS
        self._lock, self._stopped = threading.Lock(), threading.Event()
        self._ticker = threading.Thread(target=self._tick, name="precedent-progress", daemon=True)
        self._ticker.start()

    def show(self, stage: str, text: str) -> None:
        with self._lock:
            new, self._stage, self._text = stage != self._stage, stage, text
            now = self._now()
            if now - self._begun >= FIRST_SECONDS and (new or now >= self._often):
                self._print(text)

    def say(self, line: str) -> None:
        with self._lock:
            self._print(line)

    def stop(self) -> None:
        self._stopped.set()
        self._ticker.join()

    def _tick(self) -> None:
        pause = FIRST_SECONDS
        while not self._stopped.wait(pause):
            with self._lock:
                if self._now() >= self._due:
                    self._print(self._text)
                pause = self._due - self._now()

    def _print(self, line: str) -> None:
        now = self._now()
        self._due, self._often = now + LONGEST_SILENCE, now + OFTEN_SECONDS
        minutes, seconds = divmod(round(now - self._begun), 60)
        elapsed = f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
        with suppress(BrokenPipeError):  # nobody reads stderr any more; the work continues
            self._stream.write(f"{line} ({elapsed})\n")  # at once: `print` would write the line's end on its own
            self._stream.flush()


class _Spinner:
    """A spinner beside what is being done, removed when the work is done."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console

        self._status = Console(file=stream, force_terminal=True).status("")

    def show(self, stage: str, text: str) -> None:
        from rich.text import Text

        self._status.update(Text(text))
        self._status.start()  # it appears with the first stage

    def say(self, line: str) -> None:
        self._status.console.print(line, highlight=False)

    def stop(self) -> None:
        self._status.stop()
