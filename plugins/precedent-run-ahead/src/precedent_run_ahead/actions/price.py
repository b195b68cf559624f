"""Whether a prediction pays: its probability times the time it saves against its price."""

from __future__ import annotations

from collections.abc import Mapping

from precedent.errors import ConfigError
from precedent.runtime.plain_values import is_number

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


class Worth:
    """Decides whether to start a call, by the mean seconds that tools and the model took; newer ones count more.

    Raises ConfigError unless all prices are seconds of at least 0.
    """

    def __init__(self, price: Price = None) -> None:
        for seconds in price.values() if isinstance(price, Mapping) else [price]:
            if seconds is not None and not (is_number(seconds) and seconds >= 0):
                raise ConfigError(f"price={seconds!r} must be seconds of at least 0, or None")
        self._price, self.tools = price, dict[str, float]()
        self._model: float | None = None

    def took(self, name: str, seconds: float) -> None:
        """Learn what a call of a tool took."""
        self.tools[name] = _moved(self.tools.get(name), seconds)

    def model_took(self, seconds: float) -> None:
        """Learn what an answer of the model took."""
        self._model = _moved(self._model, seconds)

    def pays(self, name: str, probability: float) -> bool:
        """Whether the expected saving exceeds the price. A tool or model not yet measured counts as slow."""
        known = [seconds for seconds in (self.tools.get(name), self._model) if seconds is not None]
        price = self._price.get(name) if isinstance(self._price, Mapping) else self._price
        if price is None or not known:
            return probability > (SHARE if price is None else 0.0)
        return probability * min(known) > price


def _moved(mean: float | None, newest: float) -> float:
    return newest if mean is None else mean + _NEWEST * (newest - mean)


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
