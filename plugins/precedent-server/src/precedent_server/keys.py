"""Who the caller with an API key is: what a server asks at each request.

Needs no web framework. No log line or `repr` from here shows a key.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from precedent.errors import ConfigError
from precedent_server.stored_keys import ROLES, MissingFileError, checked_role, content_of, digest_of, parsed, status_of

__all__ = ["ROLES", "Caller", "KeyFile"]

log = logging.getLogger(__name__)

SETTLED_SECONDS = 2.0
"""Age from which a file's times tell every later change; the coarsest clock of a file system (FAT) counts by twos."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks: the name of the key (never the key), its tenant, and its role."""

    name: str
    tenant: str
    role: str

    def may(self, role: str) -> bool:
        """True if the caller's role is `role` or includes it. Raises ConfigError if there is no such role."""
        return ROLES.index(checked_role(self.role)) >= ROLES.index(checked_role(role))


class KeyFile:
    """Tells who the caller with a key is. Any number of threads may ask.

    A changed file counts from the next call on: each call first looks at the file's state, which takes microseconds, so
    that a revoked key is refused at once. If the file can no longer be used, its last good content stays in force, with
    a warning; without a file there are no keys. Raises ConfigError if the file cannot be used at the start.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._content: bytes | None = None
        self._callers: dict[str, Caller] = {}
        self._seen: tuple[int, ...] | None = None
        self._trouble = ""
        self._read()

    def caller(self, key: str) -> Caller | None:
        """Who has this key; None if nobody has it, or it was revoked."""
        with self._lock:
            self._look_again()
            callers = self._callers
        # The time of a look-up tells something about digests at most, and whoever knows how a digest begins knows
        # nothing of its key: the comparison needs no constant time.
        return callers.get(digest_of(key))

    def read_again(self) -> None:
        """Read the file at the next call, also if it looks unchanged."""
        with self._lock:
            self._seen = None
            self._look_again()

    def _look_again(self) -> None:
        try:
            if _identity(status_of(self._path)) != self._seen:
                self._read()
        except MissingFileError as error:
            self._content, self._callers, self._seen = None, {}, None
            self._warn(f"{error}; until then no key is valid")
        except ConfigError as error:
            self._seen = None
            self._warn(f"{error}; until then the keys that it held before stay valid")

    def _read(self) -> None:
        content, status = content_of(self._path)
        if content != self._content:
            keys = parsed(self._path, content)
            self._callers = {one.sha256: Caller(one.name, one.tenant, one.role) for one in keys}
        self._content, self._trouble = content, ""
        # two changes within one tick of the file system's clock look like one: a fresh file is read at every call
        age = time.time() - max(status.st_mtime, status.st_ctime)
        self._seen = _identity(status) if age > SETTLED_SECONDS else None

    def _warn(self, trouble: str) -> None:
        """Log a trouble once, not at every call that meets it."""
        if trouble != self._trouble:
            log.warning("%s", trouble)
        self._trouble = trouble


def _identity(status: os.stat_result) -> tuple[int, ...]:
    """What tells that a file was edited, replaced or given other permissions."""
    times = (status.st_mtime_ns, status.st_ctime_ns)
    return (status.st_dev, status.st_ino, status.st_mode, status.st_size, *times)
