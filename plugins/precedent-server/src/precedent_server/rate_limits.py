"""Requests and tokens per minute of each key, as token buckets, and the headers in which OpenAI tells them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from precedent_server.errors import BUSY, ApiError
from precedent_server.keys import Caller
from precedent_server.settings import ServerLimits

MINUTE = 60.0

KEPT_BUCKETS = 1024
"""Buckets that are kept before full ones, which are as good as new, are dropped."""


@dataclass(slots=True)
class Bucket:
    """What a key may still use: at most `per_minute`, refilled evenly in a minute. `level` is below 0 after a debt.

    `what` is "requests" or "tokens". `updated` is in seconds of a clock that should not go back; while it does, nothing
    is refilled.
    """

    what: str
    per_minute: int
    level: float
    updated: float

    def refill(self, now: float) -> None:
        """Bring the level up to date."""
        elapsed = max(0.0, now - self.updated)
        self.level = min(float(self.per_minute), self.level + elapsed * self.per_minute / MINUTE)
        self.updated = max(self.updated, now)

    def check(self, number: float) -> None:
        """Raise ApiError (429) if less is left."""
        if self.level < number:
            seconds = self._seconds_until(number)
            raise ApiError(
                f"this key may use {self.per_minute:,} {self.what} per minute: try again in {seconds:.1f} seconds",
                status=429, kind=BUSY, code="rate_limit_exceeded",
                headers={"Retry-After": str(max(1, math.ceil(seconds)))},
            )  # fmt: skip

    def headers(self) -> dict[str, str]:
        """OpenAI's headers; `reset` is the time until all may be used again."""
        return {
            f"x-ratelimit-limit-{self.what}": str(self.per_minute),
            f"x-ratelimit-remaining-{self.what}": str(max(0, math.floor(self.level))),
            f"x-ratelimit-reset-{self.what}": f"{self._seconds_until(self.per_minute):.3f}s",
        }

    def _seconds_until(self, level: float) -> float:
        return (level - self.level) * MINUTE / self.per_minute


class RateLimits:
    """Bounds what each key uses in a minute; belongs to the event loop's thread.

    A request counts before its body is read, and is refused while the key has no tokens left. Tokens count when their
    number is known: a prompt's before it is answered, an answer's once it has ended. To reserve `max_tokens`
    beforehand, as OpenAI does, would refuse callers who leave it out although most of their answers are short. An
    answer may therefore use more than is left; the key waits until the difference has been refilled.
    """

    def __init__(self, limits: ServerLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits, self._clock = limits, clock
        self._buckets: dict[tuple[str, str], Bucket] = {}
        self._sweep_at = KEPT_BUCKETS

    def take_request(self, caller: Caller) -> None:
        """Count a request. Raises ApiError (429), and counts nothing, if a limit is reached."""
        if tokens := self._tokens(caller):
            tokens.check(1)
        if requests := self._requests(caller):
            requests.check(1)
            requests.level -= 1

    def take_prompt(self, caller: Caller, number: int) -> None:
        """Count a prompt's tokens, or raise ApiError: 400 if a minute has fewer, 429 if fewer are left."""
        if tokens := self._tokens(caller):
            if number > tokens.per_minute:
                raise ApiError(
                    f"the prompt has {number:,} tokens, and this key may use {tokens.per_minute:,} tokens per minute: "
                    "shorten it, or ask for a higher limit",
                    code="rate_limit_exceeded",
                )
            tokens.check(number)
            tokens.level -= number

    def take_answer(self, caller: Caller, number: int) -> None:
        """Count an answer's tokens, whether or not so many are left."""
        if tokens := self._tokens(caller):
            tokens.level -= number

    def headers(self, caller: Caller) -> dict[str, str]:
        """What is left to a key, in OpenAI's headers."""
        found = [bucket.headers() for bucket in (self._requests(caller), self._tokens(caller)) if bucket]
        return {name: value for each in found for name, value in each.items()}

    def _requests(self, caller: Caller) -> Bucket | None:
        return self._bucket(caller, "requests", caller.requests_per_minute or self._limits.requests_per_minute)

    def _tokens(self, caller: Caller) -> Bucket | None:
        return self._bucket(caller, "tokens", caller.tokens_per_minute or self._limits.tokens_per_minute)

    def _bucket(self, caller: Caller, what: str, per_minute: int | None) -> Bucket | None:
        """The key's bucket, up to date; None without a limit."""
        if per_minute is None:
            return None
        now, place = self._clock(), (caller.name, what)
        if place not in self._buckets:
            self._drop_full(now)
            self._buckets[place] = Bucket(what, per_minute, per_minute, now)
        bucket = self._buckets[place]
        bucket.per_minute = per_minute  # the key file may have changed
        bucket.refill(now)
        return bucket

    def _drop_full(self, now: float) -> None:
        """Drop full buckets, once there are twice as many as were needed last time."""
        if len(self._buckets) >= self._sweep_at:
            for bucket in self._buckets.values():
                bucket.refill(now)
            self._buckets = {place: one for place, one in self._buckets.items() if one.level < one.per_minute}
            self._sweep_at = max(KEPT_BUCKETS, 2 * len(self._buckets))
