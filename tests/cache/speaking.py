"""A forked process that says, line by line, what it does; whoever kills it knows what was acknowledged."""

from __future__ import annotations

import json
import os
import signal
import traceback
from collections.abc import Callable, Iterator

Say = Callable[..., None]


class Child:
    """Runs `work(say)` in a process of its own; what it raises is said as `failed`."""

    def __init__(self, work: Callable[[Say], None]) -> None:
        hear, speak = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(hear)

            def say(*words: object) -> None:
                os.write(speak, (json.dumps(words) + "\n").encode())

            try:
                work(say)
            except BaseException:
                say("failed", traceback.format_exc())
            os._exit(0)
        os.close(speak)
        self._said = os.fdopen(hear, "rb")

    def heard(self) -> Iterator[list]:
        """What it says, until it has ended; a line that a kill cut short is left out."""
        for line in self._said:
            if line.endswith(b"\n"):
                words = json.loads(line)
                assert words[0] != "failed", words[1]
                yield words

    def has_ended(self) -> bool:
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)  # one that is dead already is not waited for yet

    def wait(self) -> int:
        """The status with which it ended."""
        return os.waitpid(self.pid, 0)[1]

    def close(self) -> None:
        self._said.close()
