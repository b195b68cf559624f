"""A running request as its caller sees it: a queue filled by the engine's worker, read by a thread or a coroutine."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from precedent.decoding.sequence import Emission
from precedent.decoding.stats import GenerationStats
from precedent.errors import RequestCancelled
from precedent.runtime.process import OfOneProcess
from precedent.sampling.logprobs import TokenLogprob


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """The whole answer, with each token's source.

    `finish_reason` is "stop" (end token or stop string) or "length" (token limit). `prompt_logprobs`, where they were
    asked for, are those of the prompt's tokens after the first, from the target's own distribution.
    """

    text: str
    token_ids: tuple[int, ...]
    sources: tuple[str, ...]
    finish_reason: str
    prompt_tokens: int
    cached_prompt_tokens: int
    stats: GenerationStats = field(default_factory=GenerationStats)
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


class Generation(OfOneProcess):
    """A handle on one request: iterate over it once (`for` or `async for`), or call `result`; leaving early cancels."""

    instead = "ask again in the process that wants the answer, on an engine of its own"

    def __init__(self) -> None:
        self._emissions: deque[Emission] = deque()
        self._changed = threading.Condition()
        self._over = threading.Event()  # lets `result` wait without waking at every step
        self._listener: Callable[[], None] | None = None
        self._result: GenerationResult | None = None
        self._error: BaseException | None = None
        self.cancelled = False

    @property
    def done(self) -> bool:
        """True once there is a result or an error."""
        return self._over.is_set()

    def cancel(self) -> None:
        """Ask the engine to stop before its next step. Harmless if the request has ended."""
        self.cancelled = True

    def put(self, emission: Emission) -> None:
        """Worker side: pass on one emission."""
        self._emissions.append(emission)
        self._notify()

    def finish(self, result: GenerationResult) -> None:
        """Worker side: end the request normally; does nothing if it has ended."""
        self._end(result, None)

    def fail(self, error: BaseException) -> None:
        """Worker side: end the request with an error, to be raised to the caller; does nothing if it has ended."""
        self._end(None, error)

    def _end(self, result: GenerationResult | None, error: BaseException | None) -> None:
        with self._changed:
            if self.done:
                return
            self._result, self._error = result, error
            self._over.set()
        self._notify()

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()
            listener = self._listener
        if listener is not None:
            listener()

    def _take(self) -> Emission | None:
        """The next emission, or None; raises the request's error once all emissions before it have been taken."""
        self.check_process()
        with self._changed:
            if self._emissions:
                return self._emissions.popleft()
            if self._error is not None:
                raise self._error
            return None

    def __iter__(self) -> Iterator[Emission]:
        """Yield emissions as they come. Raises the request's error; closing the iterator cancels the request."""
        try:
            while True:
                self.check_process()
                with self._changed:
                    self._changed.wait_for(lambda: self._emissions or self.done)
                emission = self._take()
                if emission is None:
                    return
                yield emission
        finally:
            self.cancel()

    async def __aiter__(self) -> AsyncIterator[Emission]:
        """Yield emissions without blocking the event loop; leaving early or cancelling the task cancels the request."""
        self.check_process()
        loop, wake = asyncio.get_running_loop(), asyncio.Event()

        def listener() -> None:
            with suppress(RuntimeError):  # the loop has been closed, so nothing waits for it
                loop.call_soon_threadsafe(wake.set)

        with self._changed:
            self._listener = listener
        try:
            while True:
                wake.clear()
                last = self.done  # read first: if set, every emission is already in the queue
                while (emission := self._take()) is not None:
                    yield emission
                if last:
                    return
                await wake.wait()
        finally:
            self._listener = None
            self.cancel()

    def result(self) -> GenerationResult:
        """Wait for the result. Raises the request's error, which is RequestCancelled if it was cancelled."""
        self.check_process()
        self._over.wait()
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result


def cancelled_error() -> RequestCancelled:
    """The error that `result` raises for a cancelled request."""
    return RequestCancelled("the request was cancelled before it was finished")
