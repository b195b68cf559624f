"""Connections to one server: pooled, each transaction bound to a tenant, and silent for a while after a failure."""

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

from precedent.cache.backend import OfOneProcess, StoreURL
from precedent.errors import CacheError, PrecedentError

logger = logging.getLogger("precedent.cache")

Connection = psycopg.Connection[Any]
Result = TypeVar("Result")
Work = Callable[[Connection], Result]

POOL_SIZE = 4
CONNECT_SECONDS = 3
STATEMENT_SECONDS = 5
"""Longest statement that a request may wait for."""

PATIENT_SECONDS = 3600
"""The same for keeping order: moving, listing and erasing many records takes its time."""

PAUSE_SECONDS = 30.0
"""So long the server is left alone after a failure, so that no request waits for it again and again."""

NO_PASSWORD = "set PGPASSWORD, or a line in ~/.pgpass: a URL that was written down or pickled has lost its password"

ATTEMPTS = 3
"""How often a transaction is tried that PostgreSQL ended because two of them waited for each other."""


class NoPassword(psycopg.OperationalError):
    """The server asked for a password, and there was none."""


class Connections(OfOneProcess):
    """Opens at most `POOL_SIZE` connections, each when it is needed; safe for several threads.

    `first` is called with the first connection that works, before anything else. Raises CacheError for everything that
    goes wrong between here and the server.
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
                f"{self.name} is no PostgreSQL URL; write postgresql://USER@HOST/DATABASE, other characters as %XX"
            )

    def of_tenant(self, tenant: str, work: Work[Result], *, patient: bool = False) -> Result:
        """What `work` returns in a transaction that sees one tenant's records only."""
        return self._transact(("precedent.tenant", tenant), _seconds(patient), work)

    def of_every_tenant(self, work: Work[Result], *, patient: bool = False) -> Result:
        """What `work` returns in a transaction that sees all records: for counting and keeping order, not to draft."""
        return self._transact(("precedent.scope", "every tenant"), _seconds(patient), work)

    def without_records(self, work: Work[Result]) -> Result:
        """What `work` returns in a transaction that sees no record at all."""
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
        """A connection for what PostgreSQL does only outside of one (VACUUM)."""
        with self._reported(), self._connection() as connection:
            yield connection

    @contextlib.contextmanager
    def _connection(self) -> Iterator[Connection]:
        """A connection that works, given back at the end."""
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
            raise CacheError(f"{self.name} failed a moment ago; it is asked again in less than {PAUSE_SECONDS:.0f} s")
        try:
            yield
        except PrecedentError:
            raise
        except queue.Empty as error:
            raise CacheError(f"{self.name}: all {POOL_SIZE} connections are busy; try again") from error
        except psycopg.Error as error:
            if isinstance(error, psycopg.OperationalError):  # the server, not the statement; a timeout is one as well
                self._silent_until = monotonic() + PAUSE_SECONDS
                logger.warning("%s cannot be used, speculation goes on without it: %s", self.name, _one_line(error))
            advice = "" if isinstance(error, NoPassword) else "; check the server and the URL"
            raise CacheError(f"{self.name}: {_one_line(error)}{advice}") from error

    def close(self) -> None:
        """Close all connections; more than once does no harm."""
        if not self._closed and self.is_here:
            self._closed = True
            while not self._slots.empty():  # those that are in use are closed when they come back
                connection = self._slots.get()
                if connection is not None:
                    connection.close()


def _readable(url: StoreURL) -> bool:
    try:
        psycopg.conninfo.conninfo_to_dict(url.reveal())
    except psycopg.ProgrammingError:  # its text may hold the password
        return False
    return True


def _connected(url: StoreURL) -> Connection:
    """A new connection. What went wrong is told anew: the driver's error and its frames hold the password."""
    try:
        return psycopg.connect(url.reveal(), autocommit=True, connect_timeout=CONNECT_SECONDS)
    except psycopg.OperationalError as error:
        asked = error.pgconn is not None and error.pgconn.needs_password
        told = NoPassword(f"{error}; {NO_PASSWORD}") if asked else type(error)(*error.args)
    raise told


def _seconds(patient: bool) -> int:
    return PATIENT_SECONDS if patient else STATEMENT_SECONDS


def _answers(connection: Connection) -> bool:
    """Whether the server has not dropped a connection since it was used last; it is closed if so."""
    try:
        connection.execute("")
    except psycopg.OperationalError:
        connection.close()
    return not connection.closed


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
