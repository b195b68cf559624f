"""Other programs for benchmarks: busy loops that a script starts, holds and ends."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

LOOP = "while True: pass"


@contextmanager
def neighbours(number: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """So many busy loops, each a process of its own."""
    with ExitStack() as stack:
        started = []
        for _ in range(number):
            process = subprocess.Popen([sys.executable, "-c", LOOP])
            stack.callback(process.wait)
            stack.callback(process.kill)
            started.append(process)
        yield started


@contextmanager
def coming_and_going(seconds: float) -> Iterator[None]:
    """One busy loop that runs for so many seconds, rests as long, and so on."""
    over = threading.Event()

    def alternate(process: subprocess.Popen[bytes]) -> None:
        running = True
        while not over.wait(seconds):
            running = not running
            process.send_signal(signal.SIGCONT if running else signal.SIGSTOP)

    with neighbours(1) as (process,):
        alternating = threading.Thread(target=alternate, args=(process,))
        alternating.start()
        try:
            yield
        finally:
            over.set()
            alternating.join()
