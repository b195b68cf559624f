"""What a command is doing now, on stderr: bars on a terminal, elsewhere plain lines, one at least every 15 seconds.

A pipe, a log or a build server shows no bar, and silence looks like a command that hangs. Only the standard library is
imported here: `.ci/install.py` uses this module before anything is installed.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple, Protocol, TextIO, TypeVar

Item = TypeVar("Item")

FIRST_SECONDS = 5.0
"""A command that is over by then says nothing of its progress."""

OFTEN_SECONDS = 5.0
"""Counts of the same stage are not printed more often than this."""

LONGEST_SILENCE = 10.0
"""After so many seconds a line is printed even if nothing changed; the promise is 15."""


class Clock:
    """The time in seconds, and waiting for it; tests give one of their own."""

    def now(self) -> float:
        """Seconds since some fixed moment."""
        return time.monotonic()

    def wait(self, stopped: threading.Event, seconds: float) -> bool:
        """Wait so long, or until `stopped` is set; whether it is."""
        return stopped.wait(seconds)


class State(NamedTuple):
    """What is being done, how much of it is done, and a remark."""

    what: str
    done: int | None = None
    total: int | None = None
    note: str = ""

    @property
    def counted(self) -> str:
        """How much is done, in words."""
        if self.done is None:
            return ""
        return f"{self.done} of {self.total}" if self.total else str(self.done)

    def __str__(self) -> str:
        details = ", ".join(part for part in (self.counted, self.note) if part)
        return f"{self.what}: {details}" if details else self.what


class _Display(Protocol):
    def show(self, state: State) -> None: ...

    def say(self, line: str) -> None: ...

    def stop(self) -> None: ...


class Progress:
    """Says what a command is doing from `__enter__` to `rest` or `__exit__`. Any thread may call it.

    `terminal` None asks the stream whether it is one.
    """

    def __init__(
        self, stream: TextIO | None = None, *, terminal: bool | None = None, clock: Clock | None = None
    ) -> None:
        self._stream, self._terminal, self._clock = stream, terminal, clock or Clock()
        self._display: _Display | None = None

    def __enter__(self) -> Progress:
        """Begin; from now on a command that takes long says so."""
        stream = self._stream or sys.stderr
        terminal = stream.isatty() if self._terminal is None else self._terminal
        self._display = _Bars(stream) if terminal else _Lines(stream, self._clock)
        return self

    def __exit__(self, *error: object) -> None:
        self.rest()

    def show(self, what: str, done: int | None = None, total: int | None = None, note: str = "") -> None:
        """What is being done now, and how much of it is done."""
        if self._display is not None:
            self._display.show(State(what, done, total, note))

    def say(self, line: str) -> None:
        """A line that is shown whatever the time."""
        if self._display is not None:
            self._display.say(line)

    def rest(self) -> None:
        """Results follow: say nothing more, and clear the bars away."""
        if self._display is not None:
            self._display.stop()
            self._display = None

    def counter(self, what: str, total: int) -> Callable[[int], None]:
        """A function that is told how many more of `total` were dealt with."""
        done = 0

        def more(number: int) -> None:
            nonlocal done
            done += number
            self.show(what, done, total)

        more(0)
        return more

    def each(self, items: Iterable[Item], what: str, total: int) -> Iterator[Item]:
        """Yield the items, and count those that were dealt with."""
        for number, item in enumerate(items):
            self.show(what, number, total)
            yield item
        self.show(what, total, total)


class _Lines:
    """Plain lines: the first after `FIRST_SECONDS`, then each new stage, counts now and then, no long silence."""

    def __init__(self, stream: TextIO, clock: Clock) -> None:
        self._stream, self._clock = stream, clock
        self._state = State("working")
        self._begun = clock.now()
        self._due = self._begun + FIRST_SECONDS
        self._often = self._due
        self._lock, self._stopped = threading.Lock(), threading.Event()
        self._ticker = threading.Thread(target=self._tick, name="precedent-progress", daemon=True)
        self._ticker.start()

    def show(self, state: State) -> None:
        with self._lock:
            new, self._state = state.what != self._state.what, state
            now = self._clock.now()
            if now - self._begun >= FIRST_SECONDS and (new or now >= self._often):
                self._print(str(state))

    def say(self, line: str) -> None:
        with self._lock:
            self._print(line)

    def stop(self) -> None:
        self._stopped.set()
        self._ticker.join()

    def _tick(self) -> None:
        while not self._clock.wait(self._stopped, self._due - self._clock.now()):
            with self._lock:
                if self._clock.now() >= self._due:
                    self._print(str(self._state))

    def _print(self, line: str) -> None:
        now = self._clock.now()
        self._due, self._often = now + LONGEST_SILENCE, now + OFTEN_SECONDS
        with suppress(BrokenPipeError):  # whoever listened has gone; the work goes on
            print(f"{line} ({elapsed(now - self._begun)})", file=self._stream, flush=True)


def elapsed(seconds: float) -> str:
    """A time as people write it."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


class _Bars:
    """A spinner or a bar for each stage, gone when the work is done."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._stage = stream, State("")
        self._tasks: dict[str, Any] = {}
        self._bars: Any = None

    def show(self, state: State) -> None:
        bars = self._started()
        if state.what != self._stage.what and self._stage.what in self._tasks and self._stage.total is None:
            bars.remove_task(self._tasks.pop(self._stage.what))  # a stage that counts nothing leaves nothing behind
        if state.what not in self._tasks:
            self._tasks[state.what] = bars.add_task(state.what, total=state.total, count="", note="")
        counted = {"completed": state.done or 0, "total": state.total, "count": state.counted, "note": state.note}
        bars.update(self._tasks[state.what], **counted)
        self._stage = state

    def say(self, line: str) -> None:
        self._started().console.print(line, highlight=False)

    def stop(self) -> None:
        if self._bars is not None:
            self._bars.stop()

    def _started(self) -> Any:
        """The bars, on the screen from the first stage on."""
        if self._bars is None:
            from rich.console import Console
            from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
            from rich.progress import Progress as RichProgress

            console = Console(file=self._stream, force_terminal=True)
            columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn())
            counts = (TextColumn("{task.fields[count]}"), TimeElapsedColumn(), TextColumn("{task.fields[note]}"))
            self._bars = RichProgress(*columns, *counts, console=console, transient=True)
            self._bars.start()
        return self._bars
