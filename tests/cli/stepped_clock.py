"""`python stepped_clock.py ARGUMENTS…`: the command line under a clock that runs by itself, five seconds at a time.

The clock waits for nobody but the thread that prints progress: whoever is due is served before it goes on. So what is
printed, and when by this clock, does not hang on how fast the machine is. The last line on stderr tells when the
results were ready.
"""

from __future__ import annotations

import sys
import threading
import time

from precedent.cli.app import main
from precedent.cli.progress import Clock, Progress

STEP = 5.0
REAL_SECONDS = 0.05
"""Between two steps, so that the command gets on with its work."""


class SteppedClock(Clock):
    """Goes on in steps of five seconds, as long as nobody is being served; stands still until somebody waits."""

    def __init__(self) -> None:
        self._seconds, self._due, self._serving = 0.0, 0.0, True
        self._changed = threading.Condition()
        threading.Thread(target=self._run, daemon=True).start()

    def now(self) -> float:
        return self._seconds

    def wait(self, stopped: threading.Event, seconds: float) -> bool:
        with self._changed:
            self._due, self._serving = self._seconds + seconds, False
            self._changed.notify_all()
            self._changed.wait_for(lambda: stopped.is_set() or self._serving)
            self._serving = not stopped.is_set()
        return stopped.is_set()

    def _run(self) -> None:
        while True:
            time.sleep(REAL_SECONDS)
            with self._changed:
                self._changed.wait_for(lambda: not self._serving)
                self._seconds += STEP
                self._serving = self._seconds >= self._due  # before the one that is due has woken up
                self._changed.notify_all()


class TimedProgress(Progress):
    """Notes when it comes to rest."""

    rested: float | None = None

    def rest(self) -> None:
        if self.rested is None:
            self.rested = clock.now()
        super().rest()


if __name__ == "__main__":
    clock = SteppedClock()
    progress = TimedProgress(clock=clock)
    try:
        main(progress)
    finally:
        print(f"results were ready at {progress.rested:.0f}", file=sys.stderr)
