"""Counts of workers and servers in Prometheus's text format, by way of a folder: each process writes one file."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from threading import Event, Lock, Thread

_log = logging.getLogger(__name__)

SECONDS = 1.0
"""How old the counts in the folder may be."""

Series = Mapping[str, Mapping[str, int]]
"""Numbers by label (`source="recall"`, or nothing), by name."""

HELP = {
    "precedent:spec_decode_num_accepted_tokens": "Accepted tokens by the drafter that proposed them.",
    "precedent:spec_decode_num_draft_tokens": "Proposed tokens, as the drafter counts them.",
    "precedent:drafted_requests": "Requests that were drafted for.",
    "precedent:refused_requests": "Requests without drafts because drafting could not begin.",
    "precedent:failed_steps": "Steps without drafts because drafting failed.",
    "precedent:store_failures": "Calls to the store that failed.",
    "precedent:stored_answers": "Finished answers that were stored.",
    "precedent:unstored_answers": "Finished answers that could not be stored.",
}


class Publisher:
    """Writes a process's counts into a folder once a second, where they changed, on a thread of its own."""

    def __init__(self, folder: Path | None, counts: Callable[[], Series], seconds: float = SECONDS) -> None:
        self._counts, self._seconds, self._ended = counts, seconds, Event()
        self._file = None if folder is None else folder / f"counts-{os.getpid()}.json"
        self._written: Series = {}
        self._lock = Lock()
        if self._file is not None:
            Thread(target=self._run, name="precedent-counts", daemon=True).start()

    def close(self) -> None:
        """Write once more and end."""
        if not self._ended.is_set():
            self._ended.set()
            self.write()

    def write(self) -> None:
        """Write the file if anything changed."""
        with self._lock:
            found = self._counts()
            if self._file is None or found == self._written:
                return
            try:
                written_to(self._file, found)
                self._written = found
            except OSError as error:
                _log.warning("the counts cannot be written to %s: %s", self._file.parent, error)
                self._ended.set()

    def _run(self) -> None:
        while not self._ended.wait(self._seconds):
            self.write()


def written_to(file: Path, counts: Series) -> None:
    """Replace the file at once. Raises OSError."""
    new = file.with_suffix(".new")
    new.write_text(json.dumps(counts), encoding="utf-8")
    new.replace(file)


def prometheus_text(folder: Path | None) -> str:
    """The counts of all processes, one series per process; empty if there are none."""
    found = [] if folder is None else sorted(folder.glob("counts-*.json"))
    series = {file.stem.removeprefix("counts-"): json.loads(file.read_text(encoding="utf-8")) for file in found}
    return "\n".join([*_lines(series), ""]) if series else ""


def _lines(series: Mapping[str, Series]) -> Iterator[str]:
    for name, help_text in HELP.items():
        values = [
            (f'process="{process}"{"," if label else ""}{label}', number)
            for process, counts in series.items()
            for label, number in counts.get(name, {}).items()
        ]
        if values:
            yield f"# HELP {name}_total {help_text}"
            yield f"# TYPE {name}_total counter"
            yield from (f"{name}_total{{{labels}}} {number}" for labels, number in values)
