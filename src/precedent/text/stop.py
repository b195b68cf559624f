"""Stop strings: the answer ends before the first complete one, and never shows a part of it."""

from __future__ import annotations

from collections.abc import Sequence


class StopScanner:
    """Scans text for stop strings and holds back what could still become one.

    Of several stop strings, the one that is completed first ends the answer, however the text is split.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self._stopped = False

    def push(self, text: str) -> tuple[str, bool]:
        """Return `(emit, stopped)`: the text that may be shown now, and whether a stop string is complete."""
        if self._stopped:
            return "", True
        text = self._held + text
        start = self._first_match(text)
        if start is not None:
            self._held, self._stopped = "", True
            return text[:start], True
        shown = len(text) - max((partial_match(text, stop) for stop in self._stops), default=0)
        self._held = text[shown:]
        return text[:shown], False

    def flush(self) -> str:
        """Return the held-back text at the end of the answer, since it did not become a stop string."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> int | None:
        """Start of the stop string that is completed first (the longest, if several end there), or None."""
        starts = [(text.find(stop), stop) for stop in self._stops]
        matches = [(start + len(stop), start) for start, stop in starts if start >= 0]
        return min(matches)[1] if matches else None


def partial_match(text: str, marker: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `marker`."""
    start = text.find(marker[:1], max(0, len(text) - len(marker) + 1))
    while start >= 0 and not marker.startswith(text[start:]):
        start = text.find(marker[:1], start + 1)
    return len(text) - start if start >= 0 else 0
