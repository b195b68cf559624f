"""A temporary PostgreSQL server for tests: it runs in a temporary folder, listens on a socket there, and is removed."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psycopg

UNPRIVILEGED = "postgres"
"""The user that runs the server if the tests run as root, which PostgreSQL refuses."""

START_SECONDS = 600
"""Generous, for busy machines."""

SETTINGS = ("-c", "listen_addresses=''", "-c", "fsync=off", "-c", "max_connections=60")


def programs() -> Path | None:
    """The folder of `initdb` and `pg_ctl`, the newest of several versions; None without PostgreSQL."""
    found = shutil.which("initdb")
    versions = Path("/usr/lib/postgresql").glob("*/bin/initdb")
    folders = [Path(found).parent] if found else []
    folders += [each.parent for each in sorted(versions, key=lambda each: int(each.parts[-3]), reverse=True)]
    return next((folder for folder in folders if (folder / "pg_ctl").exists()), None)


def why_not() -> str | None:
    """Why no server can be started here; None if one can."""
    if programs() is None:
        return "PostgreSQL is not installed (Debian: apt-get install postgresql)"
    if os.geteuid() == 0 and not _account():
        return f"PostgreSQL refuses to run as root, and there is no user {UNPRIVILEGED!r} to run it"
    return None


class TemporaryServer:
    """`with TemporaryServer() as server:`; `server.url` names its database, owned by a role without further rights."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="precedent-pg-", dir="/tmp"))  # a socket's path must be short
        self.url = f"postgresql://precedent@/precedent?host={self.folder}"
        self._owner: dict[str, Any] = {"user": UNPRIVILEGED, "group": _account()} if os.geteuid() == 0 else {}
        if self._owner:
            shutil.chown(self.folder, UNPRIVILEGED)

    def __enter__(self) -> Self:
        self._run("initdb", "--no-sync", "--auth=trust", "--encoding=UTF8", "--locale=C", "--username=postgres")
        self.start()
        for statement in ("CREATE ROLE precedent LOGIN", "CREATE DATABASE precedent OWNER precedent"):
            self.execute(statement, database="postgres")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def data(self) -> Path:
        """The server's data folder."""
        return self.folder / "data"

    def start(self) -> None:
        """Start the server, and wait until it answers."""
        options = " ".join((*SETTINGS, "-k", str(self.folder)))
        log = str(self.folder / "log")
        self._run("pg_ctl", "start", "--wait", f"--timeout={START_SECONDS}", "-o", options, "-l", log)

    def stop(self) -> None:
        """Stop the server as a crash would, without notice to its clients."""
        self._run("pg_ctl", "stop", "--mode=immediate", check=False)

    def execute(self, statement: str, *, database: str = "precedent") -> list[tuple[Any, ...]]:
        """The result of a statement, run by the server's superuser."""
        where = f"postgresql://postgres@/{database}?host={self.folder}"
        with psycopg.connect(where, autocommit=True) as connection:
            cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description else []

    def _run(self, program: str, *arguments: str, check: bool = True) -> None:
        folder = programs()
        assert folder is not None, why_not()
        command = [str(folder / program), "-D", str(self.data), *arguments]
        done = subprocess.run(
            command, cwd=self.folder, capture_output=True, text=True, check=False, env=os.environ | {"LC_ALL": "C"},
            stdin=subprocess.DEVNULL, **self._owner,
        )  # fmt: skip
        if check and done.returncode:
            raise RuntimeError(f"{program} failed: {done.stdout}{done.stderr}")


def _account() -> int | None:
    """The group of the user who runs the server; None if there is no such user."""
    try:
        return pwd.getpwnam(UNPRIVILEGED).pw_gid
    except KeyError:
        return None
