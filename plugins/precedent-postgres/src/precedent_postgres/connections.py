"""Connections to one server: pooled, with transactions restricted to a tenant, and paused after a failure."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Iterator
from time import monotonic
from typing import Any, TypeVar

import psycopg
import psycopg.conninfo

from precedent.cache.store_url import StoreURL
from precedent.errors import CacheError, PrecedentError
from precedent.runtime.process import OfOneProcess

logger = logging.getLogger("precedent.cache")

Connection = psycopg.Connection[Any]
Result = TypeVar("Result")
Work = Callable[[Connection], Result]

POOL_SIZE = 4
CONNECT_SECONDS = 3
STATEMENT_SECONDS = 5
"""Time limit of a statement that a request waits for."""

PATIENT_SECONDS = 3600
"""The same for maintenance: moving, listing and erasing many records takes time."""

PAUSE_SECONDS = 30.0
"""Seconds without calls to the server after a failure, so that requests do not wait for it again and again."""

NO_PASSWORD = "set PGPASSWORD, or a line in ~/.pgpass: a URL that was written down or pickled has lost its password"

ATTEMPTS = 3
"""Number of times that a transaction is tried if PostgreSQL ends it because of a deadlock."""


class NoPassword(psycopg.OperationalError):
    """The server asked for a password, and none was given."""


class Connections(OfOneProcess):
    """Opens at most `POOL_SIZE` connections, each when needed; safe for several threads.

    `first` is called with the first working connection, before anything else. Raises CacheError for every failure of
    the connection or the server.
    """

    instead = "open the cache only in the process that uses it"
    refused_as = CacheError

    def __init__(self, url: StoreURL | str, first: Callable[[Connection], None]) -> None:
        self._url, self._first = StoreURL(url) if isinstance(url, str) else url, first
        self.name = str(self._url)
        self._prepared, self._preparing = False, threading.Lock()
        self._silent_until, self._closed = 0.0, False
        self._slots: queue.LifoQueue[Connection | None] = queue.LifoQueue()
        for _ in range(POOL_SIZE):
            self._slots.put(None)
        if not _readable(self._url):
            raise CacheError(
                f"{self.name} is not a PostgreSQL URL; write postgresql://USER@HOST/DATABASE, other characters as %XX"
            )

    def of_tenant(self, tenant: str, work: Work[Result], *, patient: bool = False) -> Result:
        """The result of `work` in a transaction that sees only one tenant's records."""
        return self._transact(("precedent.tenant", tenant), _seconds(patient), work)

    def of_every_tenant(self, work: Work[Result], *, patient: bool = False) -> Result:
        """The result of `work` in a transaction that sees all records: for counts and maintenance, not drafting."""
        return self._transact(("precedent.scope", "every tenant"), _seconds(patient), work)

    def without_records(self, work: Work[Result]) -> Result:
        """The result of `work` in a transaction that sees no records."""
        return self._transact(("precedent.tenant", ""), _seconds(False), work)

    def _transact(self, setting: tuple[str, str], seconds: int, work: Work[Result]) -> Result:
        for attempt in range(1, ATTEMPTS + 1):
            with self._reported(), self._connection() as connection:
                try:
                    with connection.transaction():
                        timeout = "set_config('statement_timeout', %s, true)"
                        connection.execute(f"SELECT set_config(%s, %s, true), {timeout}", (*setting, f"{seconds}s"))
                        return work(connection)
                except psycopg.errors.DeadlockDetected:
                    if attempt == ATTEMPTS:
                        raise
        raise AssertionError("the last attempt returns or raises")

    @contextlib.contextmanager
    def outside_transactions(self) -> Iterator[Connection]:
        """A connection for commands that PostgreSQL runs only outside of transactions (VACUUM)."""
        with self._reported(), self._connection() as connection:
            yield connection

    @contextlib.contextmanager
    def _connection(self) -> Iterator[Connection]:
        """A working connection, returned to the pool at the end."""
        connection = self._slots.get(timeout=STATEMENT_SECONDS)
        try:
            if connection is None or not _answers(connection):
                connection = _connected(self._url)
            with self._preparing:
                if not self._prepared:
                    self._first(connection)
                    self._prepared = True
            yield connection
        finally:
            self._give_back(connection)

    def _give_back(self, connection: Connection | None) -> None:
        if connection is not None and (self._closed or connection.broken):
            connection.close()
        self._slots.put(None if connection is None or connection.closed else connection)

    @contextlib.contextmanager
    def _reported(self) -> Iterator[None]:
        self.check_process()
        if self._closed:
            raise CacheError(f"{self.name} is closed; open it again")
        if monotonic() < self._silent_until:
            raise CacheError(f"{self.name} failed a moment ago; it is tried again in less than {PAUSE_SECONDS:.0f} s")
        try:
            yield
        except PrecedentError:
            raise
        except queue.Empty as error:
            raise CacheError(f"{self.name}: all {POOL_SIZE} connections are busy; try again") from error
        except psycopg.Error as error:
            if isinstance(error, psycopg.OperationalError):  # the server, not the statement; includes timeouts
                self._silent_until = monotonic() + PAUSE_SECONDS
                logger.warning("%s cannot be used, speculation goes on without it: %s", self.name, _one_line(error))
            advice = "" if isinstance(error, NoPassword) else "; check the server and the URL"
            raise CacheError(f"{self.name}: {_one_line(error)}{advice}") from error

    def close(self) -> None:
        """Close all connections; may be called again."""
        if not self._closed and self.is_here:
            self._closed = True
            while not self._slots.empty():  # connections in use are closed when they are returned
                connection = self._slots.get()
                if connection is not None:
                    connection.close()


def _readable(url: StoreURL) -> bool:
    try:
        psycopg.conninfo.conninfo_to_dict(url.reveal())
    except psycopg.ProgrammingError:  # its text may contain the password
        return False
    return True


def _connected(url: StoreURL) -> Connection:
    """A new connection. Raises a new error, because the driver's error and its frames contain the password."""
    try:
        return psycopg.connect(url.reveal(), autocommit=True, connect_timeout=CONNECT_SECONDS)
    except psycopg.OperationalError as error:
        asked = error.pgconn is not None and error.pgconn.needs_password
        told = NoPassword(f"{error}; {NO_PASSWORD}") if asked else type(error)(*error.args)
    raise told


def _seconds(patient: bool) -> int:
    return PATIENT_SECONDS if patient else STATEMENT_SECONDS


def _answers(connection: Connection) -> bool:
    """Return whether the server still holds a connection since its last use; closes it if not."""
    try:
        connection.execute("")
    except psycopg.OperationalError:
        connection.close()
    return not connection.closed


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
