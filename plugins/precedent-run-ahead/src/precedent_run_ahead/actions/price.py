"""Whether a prediction pays: its probability times the time it saves against its price."""

from __future__ import annotations

from collections.abc import Mapping

from precedent.errors import ConfigError

SHARE = 0.5
"""Without a price of its own, a call costs this share of the time that it can save."""

PRIOR_STRENGTH = 4.0
"""Weight of a predictor's own estimate, in observations."""

HALF_LIFE = 200.0
"""Observations after which an outcome counts half, because traffic changes."""

_DECAY = 0.5 ** (1.0 / HALF_LIFE)
_NEWEST = 0.2
"""Weight of the newest time in a mean that moves along."""

Price = float | Mapping[str, float] | None
"""Seconds that a call must be expected to save, for all tools or by tool; None is `SHARE` of what it can save."""


def check_price(price: Price) -> None:
    """Raise ConfigError unless all prices are seconds of at least 0."""
    for seconds in price.values() if isinstance(price, Mapping) else [price]:
        if seconds is not None and (
            isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds >= 0
        ):
            raise ConfigError(f"price={seconds!r} must be seconds of at least 0, or None")


class Times:
    """Mean times in seconds by name, in which newer ones count more."""

    def __init__(self) -> None:
        self._means: dict[str, float] = {}

    def observe(self, name: str, seconds: float) -> None:
        """Learn one time."""
        known = self._means.get(name)
        self._means[name] = seconds if known is None else known + _NEWEST * (seconds - known)

    def of(self, name: str) -> float | None:
        """The mean time; None if none was observed."""
        return self._means.get(name)


class Worth:
    """Decides whether to start a call, by what tools and the model took so far."""

    def __init__(self, price: Price = None) -> None:
        check_price(price)
        self._price, self.tools, self.model = price, Times(), Times()

    def pays(self, name: str, probability: float) -> bool:
        """Whether the expected saving exceeds the price. A tool or model not yet measured counts as slow."""
        known = [seconds for seconds in (self.tools.of(name), self.model.of("")) if seconds is not None]
        saved = min(known) if known else None
        price = self._price.get(name) if isinstance(self._price, Mapping) else self._price
        if price is None or saved is None:
            return probability > (SHARE if price is None else 0.0)
        return probability * saved > price


class TrackRecord:
    """How often predictions came true, by source and estimate: corrects a predictor's own estimate."""

    def __init__(self) -> None:
        self._bins: dict[tuple[str, int], list[float]] = {}

    def probability(self, source: str, estimate: float) -> float:
        """The estimate, corrected by what became of others like it."""
        right, seen = self._bins.get(_bin(source, estimate), (0.0, 0.0))
        return (right + PRIOR_STRENGTH * estimate) / (seen + PRIOR_STRENGTH)

    def observe(self, source: str, estimate: float, right: bool) -> None:
        """Learn one outcome."""
        row = self._bins.setdefault(_bin(source, estimate), [0.0, 0.0])
        row[:] = [row[0] * _DECAY + right, row[1] * _DECAY + 1.0]


def _bin(source: str, estimate: float) -> tuple[str, int]:
    return source, min(9, int(estimate * 10))
