"""API keys: the file that holds their digests with tenants and roles, how it is changed, and who a caller is.

`precedent keys` changes the file, `KeyFile` reads it. Needs no web framework. No message, log line or `repr` from here
shows a key.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import secrets
import shlex
import stat
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal, get_args

from filelock import FileLock, Timeout
from pydantic import AfterValidator, AwareDatetime, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from precedent.cache.files import new_file, wait_for_folder
from precedent.cache.records import check_tenant
from precedent.errors import CacheError, ConfigError
from precedent.runtime.plain_values import KEY_PREFIX, hide_keys

log = logging.getLogger(__name__)

Role = Literal["use", "read-cache", "admin"]
ROLES: tuple[Role, ...] = get_args(Role)
"""What a key allows: to use the models, to read its tenant's cache, to administer. Each includes those before it."""

LOCK_SECONDS = 10.0
"""How long a change waits for another process that changes the file."""

MOST_PER_MINUTE = 10**12
"""Requests or tokens that a key's limit may name."""

PerMinute = Annotated[int, Field(ge=1, le=MOST_PER_MINUTE)]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_POSIX = sys.platform != "win32"


class MissingFileError(ConfigError):
    """There is no key file."""


def _without_key(what: str, text: str) -> str:
    """A name or tenant is stored and shown in clear, so it must not be a key that was put in the wrong place."""
    if hide_keys(text) != text:
        raise ConfigError(f"the {what} holds an API key, which is secret; give the key's {what}")
    return text


def checked_role(role: str) -> Role:
    """The role. Raises ConfigError if there is none of this name."""
    if role not in ROLES:
        raise ConfigError(f"there is no role {hide_keys(repr(role[:80]))}; the roles are {', '.join(ROLES)}")
    return role


def _checked_name(name: str) -> str:
    """The name, if an access log can show it as one word."""
    if not _NAME.fullmatch(_without_key("name", name)):
        raise ConfigError(
            f"{name[:80]!r} cannot name a key; give 1 to 64 letters, digits and . _ @ -, a letter or digit first"
        )
    return name


def _checked_tenant(tenant: str) -> str:
    try:
        check_tenant(_without_key("tenant", tenant))
    except CacheError as error:
        raise ConfigError(str(error)) from None
    return tenant


def _checked_limit(name: str, number: int | None) -> int | None:
    if number is not None and not 1 <= number <= MOST_PER_MINUTE:
        raise ConfigError(f"{name}={number} must be between 1 and {MOST_PER_MINUTE}")
    return number


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks: the name of the key (never the key), its tenant, its role, and its limits; None: the server's."""

    name: str
    tenant: str
    role: str
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None

    def may(self, role: str) -> bool:
        """True if the caller's role is `role` or includes it. Raises ConfigError if there is no such role."""
        return ROLES.index(checked_role(self.role)) >= ROLES.index(checked_role(role))


class StoredKey(BaseModel):
    """What the file holds about a key."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    name: Annotated[str, AfterValidator(_checked_name)]
    tenant: Annotated[str, AfterValidator(_checked_tenant)]
    role: Role
    created: AwareDatetime
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$", repr=False)]
    requests_per_minute: PerMinute | None = None
    tokens_per_minute: PerMinute | None = None


class _Content(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    format: Literal[1]
    keys: list[StoredKey]


class KeyFile:
    """Tells who the caller with a key is. Any number of threads may ask.

    The file is read at each call, so that a change counts at once. If it can no longer be used, its last good content
    stays in force, with a warning; without a file there are no keys. Raises ConfigError if it cannot be used at the
    start.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._content: bytes | None = None
        self._callers: dict[str, Caller] = {}
        self._trouble = ""
        self._read()

    def caller(self, key: str) -> Caller | None:
        """Who has this key; None if nobody has it, or it was revoked."""
        with self._lock:
            try:
                self._read()
            except MissingFileError as error:
                self._content, self._callers = None, {}
                self._warn(f"{error}; until then no key is valid")
            except ConfigError as error:
                self._warn(f"{error}; until then the keys that it held before stay valid")
            callers = self._callers
        # The time of a look-up tells something about digests at most, and whoever knows how a digest begins knows
        # nothing of its key: the comparison needs no constant time.
        return callers.get(digest_of(key))

    def owners(self) -> set[tuple[str, str]]:
        """Names and tenants of the keys, as of the last call."""
        return {(one.name, one.tenant) for one in self._callers.values()}

    def _read(self) -> None:
        content = _content_of(self._path)
        if content != self._content:
            keys = _parsed(self._path, content)
            self._callers = {
                one.sha256: Caller(one.name, one.tenant, one.role, one.requests_per_minute, one.tokens_per_minute)
                for one in keys
            }
        self._content, self._trouble = content, ""

    def _warn(self, trouble: str) -> None:
        """Log a trouble once, not at every call that meets it."""
        if trouble != self._trouble:
            log.warning("%s", trouble)
        self._trouble = trouble


def digest_of(key: str) -> str:
    """The SHA-256 of a key, in hexadecimal digits.

    A fast hash is right here: slow ones protect passwords that can be guessed, and nobody guesses 32 random bytes.
    """
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def read_keys(path: Path) -> list[StoredKey]:
    """The keys of a file, in the order in which they were added.

    Raises ConfigError if there is no such file, if it is not private, or if it is damaged or of a newer format.
    """
    return _parsed(path, _content_of(path))


def add_key(
    path: Path, name: str, tenant: str, role: str = "use", *,
    requests_per_minute: int | None = None, tokens_per_minute: int | None = None,
) -> str:  # fmt: skip
    """Make a key, store its digest and return it: nothing can show it again. Makes the file if there is none.

    Limits replace those of the server. Raises ConfigError, and changes nothing, if the name is taken, a value is
    invalid or the file cannot be changed.
    """
    key = KEY_PREFIX + secrets.token_urlsafe(32)
    added = StoredKey(
        name=_checked_name(name),
        tenant=_checked_tenant(tenant),
        role=checked_role(role),
        created=datetime.now(UTC).replace(microsecond=0),
        sha256=digest_of(key),
        requests_per_minute=_checked_limit("requests_per_minute", requests_per_minute),
        tokens_per_minute=_checked_limit("tokens_per_minute", tokens_per_minute),
    )
    with _changing(path) as file:
        try:
            keys = read_keys(file)
        except MissingFileError:
            keys = []
        if any(one.name == name for one in keys):
            raise ConfigError(f"{path} has a key named {name!r} already; take another name, or revoke that key first")
        _write(file, [*keys, added])
    return key


def revoke_key(path: Path, name: str) -> None:
    """Delete a key; servers that read the file refuse it from their next request on.

    Raises ConfigError, and changes nothing, if there is no key of that name or the file cannot be changed.
    """
    _without_key("name", name)
    with _changing(path) as file:
        keys = read_keys(file)
        kept = [one for one in keys if one.name != name]
        if len(kept) == len(keys):
            raise ConfigError(f"{path} has no key named {name[:80]!r}; see `precedent keys list`")
        _write(file, kept)


def _content_of(path: Path) -> bytes:
    """The file's bytes. Raises ConfigError if it is missing, not a file or not private."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # to open a pipe would wait for a writer
            raise ConfigError(f"{path} is not a file; give the file that `precedent keys add` writes")
        with path.open("rb") as file:
            if _POSIX and os.fstat(file.fileno()).st_mode & 0o077:
                raise ConfigError(f"{path} is not private; run: chmod 600 {shlex.quote(str(path))}")
            return file.read()
    except (FileNotFoundError, NotADirectoryError):
        raise MissingFileError(f"there is no key file {path}; `precedent keys add` makes one") from None
    except OSError as error:
        raise ConfigError(f"the key file {path} cannot be read ({error.strerror or error}); make it readable") from None


def _parsed(path: Path, content: bytes) -> list[StoredKey]:
    """The keys in the content of the file `path`. Raises ConfigError, which shows nothing of the content.

    Someone may have written a key there, also as the name of a field.
    """
    trouble, keys = "", list[StoredKey]()
    try:
        found = from_json(content)
        if isinstance(found, dict) and isinstance(found.get("format"), int) and found["format"] > 1:
            trouble = "is of a newer format: update Precedent"
        else:
            keys = _Content.model_validate_json(content).keys
    except ValueError as error:  # pydantic's ValidationError is one
        places = error.errors(include_input=False)[0]["loc"] if isinstance(error, ValidationError) else ()
        entry = "".join(f" at entry {part + 1}" for part in places if isinstance(part, int))
        trouble = f"is damaged{entry}: restore a copy, or repair it by hand"
    if len({one.name for one in keys}) < len(keys):
        trouble = "has two keys of one name: rename or delete one by hand"
    if len({one.sha256 for one in keys}) < len(keys):
        trouble = "has one key under two names: delete one by hand"
    if trouble:  # raised out here, so as not to carry along pydantic's error
        raise ConfigError(f"the key file {path} {trouble}")
    return keys


@contextmanager
def _changing(path: Path) -> Iterator[Path]:
    """The file that `path` or its link leads to, while no other process changes it."""
    file = Path(os.path.realpath(path))
    if not file.parent.is_dir():
        raise ConfigError(f"there is no folder {str(file.parent)!r}; create it first")
    lock = f"{file}.lock"
    try:
        with FileLock(lock, timeout=LOCK_SECONDS, mode=0o600):
            _keep_owner(lock, file)
            yield file
    except Timeout:
        raise ConfigError(f"another process keeps {lock} locked; try again once it has ended") from None
    except OSError as error:
        raise ConfigError(f"the key file {path} cannot be changed ({error.strerror or error})") from None


def _write(file: Path, keys: list[StoredKey]) -> None:
    """Replace the file at once, readable by its owner only."""
    content = _Content(format=1, keys=keys).model_dump_json(indent=2, exclude_none=True)
    with new_file(file) as new:
        _keep_owner(new.fileno(), file)
        new.write(f"{content}\n".encode())
    wait_for_folder(file.parent)


def _keep_owner(made: str | int, file: Path) -> None:
    """Give what replaces or guards the file to its owner: a key added by root must not lock out a server's user."""
    if _POSIX and file.exists() and (owner := file.stat().st_uid) != os.geteuid():
        os.chown(made, owner, -1)
