"""A store's URL that hides its secrets: shown, logged, copied or pickled, it leaves them out.

Only code that connects asks for the whole URL, with `reveal`. Without a password in the URL, the store's own client
looks for one in its usual places (PostgreSQL: `PGPASSWORD`, then `~/.pgpass`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote, unquote, unquote_to_bytes

from precedent.errors import CacheError, ConfigError

WITHHELD = "***"
"""Shown instead of a secret in the query; a password is left out together with its name."""

PASSWORD = "password"

SECRET_NAMES = frozenset({"auth", "key", "pass", "sig"})
SECRET_PARTS = (
    *("accesskey", "apikey", "credential", PASSWORD, "passphrase", "passwd"),
    *("pwd", "scram", "secret", "signature", "token"),
)
"""Parameters of the query that are secret: by their name, or by a part of it without `-` and `_`."""

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):(//?)")
_PARTS = re.compile(r"[^:]+://(?P<login>[^/?]*@)?(?P<hosts>[^/?@]*)(?P<path>[^?@]*)(?:\?(?P<query>[^@]*))?")
_HOST = re.compile(r"(\[[^]]*\]|[^:\[\]]*)(:\d*)?")
_KEYWORDS = re.compile(r"(?:.*\s)?(dbname|host|hostaddr|password|port|service|user)\s*=", re.DOTALL)


class StoreURL:
    """A URL at which an installed package opens a store; `str` and `repr` leave its secrets out.

    Two URLs are equal only if their secrets are; hashes do not depend on secrets. Raises ConfigError for a text in
    which the password cannot be told from the rest.

    >>> StoreURL("postgresql://ada:secret@db.internal/precedent")
    StoreURL('postgresql://ada@db.internal/precedent')
    """

    __slots__ = ("_whole", "scheme", "shown")

    def __init__(self, text: str) -> None:
        scheme = _scheme_of(text)
        if scheme is None:
            raise ConfigError("a store's URL begins with its scheme: postgresql://USER@HOST/DATABASE")
        self.scheme = scheme
        parts = _parts(text, scheme)
        start, at, rest = text[: len(scheme) + 3], parts["login"][-1:], parts["hosts"] + parts["path"]
        user, colon, password = parts["login"][:-1].partition(":")
        name = user + at if user or not colon else ""
        self.shown = start + name + rest + _query(_withheld(parts["query"]))
        whole = start + _quoted(user) + colon + _quoted(password) + at + rest + _query(parts["query"])
        self._whole: Callable[[], str] = lambda: whole  # a function, so that dumping attributes reveals no secret

    def reveal(self) -> str:
        """The whole URL, user and password percent-encoded. Raises CacheError if a secret was left out of it."""
        lost = [name for name, value in _settings(self._whole()) if value == WITHHELD and is_secret(name)]
        if lost:
            raise CacheError(f"{self} was stored without its {' and '.join(lost)}: give the whole URL again")
        return self._whole()

    def __str__(self) -> str:
        return self.shown

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.shown!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StoreURL) and self._whole() == other._whole()

    def __hash__(self) -> int:
        return hash(self.shown)

    def __copy__(self) -> StoreURL:
        return self

    def __deepcopy__(self, memo: object) -> StoreURL:
        return self

    def __reduce__(self) -> tuple[type[StoreURL], tuple[str]]:
        """Pickle it without secrets: pickles are stored in files and sent to other machines."""
        return type(self), (self.shown,)


Place = str | Path | StoreURL
"""Where a store is: a folder or file, or a URL."""


def place_of(where: object) -> Place | None:
    """A place as it is stored and shown: a URL as a `StoreURL`, paths and None unchanged.

    Raises ConfigError for anything else, without showing it.
    """
    if where is None or isinstance(where, StoreURL):
        return where
    if not isinstance(where, str | Path):
        raise ConfigError(f"a {type(where).__name__} names no cache: give a folder, a file, or a URL as a string")
    if isinstance(where, str):
        if _scheme_of(where) is not None:
            return StoreURL(where)
        if _KEYWORDS.match(where):
            raise ConfigError("a database needs a URL, not keywords: write postgresql://USER@HOST/DATABASE")
    elif (found := _SCHEME.match(str(where))) is not None:
        raise ConfigError(f"a Path cannot be a URL: give {found[1]}://… as a string")
    return where


def written(place: Place | None) -> str | None:
    """A place in the form in which settings record it: paths absolute, URLs without secrets."""
    if isinstance(place, str | Path):
        return str(Path(place).expanduser().resolve())
    return None if place is None else str(place)


def hide_secrets(text: str) -> str:
    """A text without the logins of all URLs in it, for messages of other libraries about their input."""
    return re.sub(_SCHEME.pattern + r"\S*@", rf"\1:\2{WITHHELD}@", text)


def is_secret(name: str) -> bool:
    """Return whether the value of a URL parameter must not be shown."""
    plain = re.sub("[-_]", "", unquote(name).strip().lower())
    return plain in SECRET_NAMES or any(part in plain for part in SECRET_PARTS)


def _scheme_of(text: str) -> str | None:
    found = _SCHEME.match(text)
    return found[1].lower() if found and found[2] == "//" else None


def _parts(text: str, scheme: str) -> dict[str, str]:
    """Login, hosts, path and query. Refuses characters outside the login that may be part of a password."""
    found = None if re.search(r"[\s\x00-\x1f\x7f]", text) else _PARTS.fullmatch(text)
    if found is None or not all(_HOST.fullmatch(host) for host in found["hosts"].split(",")):
        raise ConfigError(
            f"this {scheme}:// URL cannot be read; in user, password and after the host write @ as %40, / as %2F, "
            "? as %3F and a space as %20"
        )
    return found.groupdict("")


def _quoted(text: str) -> str:
    return quote(unquote_to_bytes(text), safe="")


def _query(text: str) -> str:
    return f"?{text}" if text else ""


def _settings(url: str) -> list[tuple[str, str]]:
    _, _, query = url.partition("?")
    return [(unquote(name), value) for name, _, value in (one.partition("=") for one in re.split("[&;]", query))]


def _withheld(query: str) -> str:
    """The query without its password, and with other secrets withheld. Also splits at `;`, as some stores do."""
    kept = []
    for setting in query.split("&"):
        names = [one.partition("=")[0] for one in setting.split(";")]
        if unquote(names[0]) == PASSWORD:
            continue
        secret = next((name for name in names if is_secret(name)), None)
        kept.append(setting if secret is None else f"{names[0]}={WITHHELD}")
    return "&".join(kept)
