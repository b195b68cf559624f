"""A store's URL shows no secret, whatever it is made of and however it is looked at; what could hide one is refused."""

from __future__ import annotations

import copy
import json
import pickle
import pprint
from importlib.metadata import EntryPoint
from pathlib import Path
from urllib.parse import quote, unquote

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from precedent.cache import SpeculationCache, SQLiteStore, StoreURL, verify_cache
from precedent.cache.store import open_store
from precedent.cache.store_url import hide_secrets, place_of
from precedent.errors import CacheError, ConfigError

CANARY = "Zyzzogeton"


def every_text_of(url: StoreURL) -> str:
    """All that Python can be made to say about a URL without asking it to reveal itself."""
    state = [getattr(url, name) for name in dir(url) if name != "reveal"]
    texts = [str(url), repr(url), f"{url} {url!s}", format(url), ascii(url), pprint.pformat(url)]
    copies = [copy.copy(url), copy.deepcopy({"url": url}), pickle.loads(pickle.dumps(url))]
    pickled = [pickle.dumps(url, protocol).decode("latin-1") for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]
    return "\n".join([*texts, *pickled, repr(state), repr(copies), json.dumps(url, default=str), str(hash(url))])


@pytest.mark.parametrize(
    ("url", "shown", "revealed"),
    [
        ("postgresql://me:sec@host/db", "postgresql://me@host/db", "postgresql://me:sec@host/db"),
        ("postgresql://me:s@ec@host/db", "postgresql://me@host/db", "postgresql://me:s%40ec@host/db"),
        ("postgresql://me:s%2Fec@host/db", "postgresql://me@host/db", "postgresql://me:s%2Fec@host/db"),
        (
            "postgresql://me:s:e#c@[::1]:1,b/db",
            "postgresql://me@[::1]:1,b/db",
            "postgresql://me:s%3Ae%23c@[::1]:1,b/db",
        ),
        ("postgresql://me:100%@host/db", "postgresql://me@host/db", "postgresql://me:100%25@host/db"),
        ("redis://:sec@host/1", "redis://host/1", "redis://:sec@host/1"),
        ("postgresql://me@host:5432/db", "postgresql://me@host:5432/db", "postgresql://me@host:5432/db"),
        ("postgresql://me@/db?host=/tmp", "postgresql://me@/db?host=/tmp", "postgresql://me@/db?host=/tmp"),
        (
            "postgresql://host/db?user=me&password=sec&sslmode=require",
            "postgresql://host/db?user=me&sslmode=require",
            "postgresql://host/db?user=me&password=sec&sslmode=require",
        ),
        ("etcd://host?p%61ssword=sec", "etcd://host", "etcd://host?p%61ssword=sec"),
    ],
)
def test_a_url_is_shown_without_its_password_and_revealed_whole(url: str, shown: str, revealed: str) -> None:
    parsed = StoreURL(url)
    assert (str(parsed), parsed.reveal()) == (shown, revealed)
    assert StoreURL(revealed) == parsed
    assert StoreURL(shown).reveal() == shown


@pytest.mark.parametrize("name", ["sslpassword", "oauth_client_secret", "API-Key", "access_token", "pass", "%73ecret"])
def test_other_secrets_of_the_query_are_withheld_and_missed(name: str) -> None:
    url = StoreURL(f"redis://host/1?{name}={CANARY}&db=2")
    assert str(url) == f"redis://host/1?{name}=***&db=2"
    assert CANARY in url.reveal()
    with pytest.raises(CacheError, match=f"without its {unquote(name)}: give the whole URL again"):
        pickle.loads(pickle.dumps(url)).reveal()


def test_settings_that_are_parted_by_semicolons_hide_no_secret() -> None:
    assert CANARY not in str(StoreURL(f"my://host/1?timeout=3;token={CANARY}"))


def read(text: str) -> tuple[StoreURL | None, str]:
    """The URL, or what is said where it cannot be read."""
    try:
        return StoreURL(text), ""
    except ConfigError as error:
        return None, f"{error} {error.__cause__} {error.__context__}"


TEXT = st.text(st.characters(blacklist_categories=("Cs",)), min_size=1, max_size=12)
PARTS = {"user": TEXT, "password": TEXT, "raw": st.booleans(), "tail": st.sampled_from(["", "/db", "/db?a=1&b=%40"])}


@given(**PARTS)
def test_no_part_of_a_password_is_ever_said(user: str, password: str, raw: bool, tail: str) -> None:
    """Also unescaped: then it is read as it was meant, or refused without a word of it."""
    secret = f"{CANARY}{password}{CANARY}"
    written = secret if raw else quote(secret, safe="")
    assume(CANARY not in user)
    whole = f"postgresql://{quote(user, safe='')}:{written}@host:5432{tail}"
    url, said = read(whole)
    if url is None:
        assert raw
        assert CANARY not in said
        return
    assert CANARY not in every_text_of(url)
    assert url.shown.endswith(f"@host:5432{tail}")
    if not raw:
        assert f":{written}@" in url.reveal()
        assert unquote(url.reveal().removeprefix("postgresql://").split(":")[0]) == user


@pytest.mark.parametrize(
    "url",
    [
        f"postgresql://me:pa/{CANARY}@host/db",
        f"postgresql://me:pa?{CANARY}@host/db",
        f"postgresql://me:5432/{CANARY}@host/db",
        f"postgresql://me:p@a/{CANARY}@host/db",
        f"postgresql://me:{CANARY} x@host/db",
        f"postgresql://me:{CANARY}\n@host/db",
        f"postgresql://host:{CANARY}/db",
    ],
)
def test_a_password_that_cannot_be_told_from_the_rest_is_refused_unsaid(url: str) -> None:
    with pytest.raises(ConfigError, match="this postgresql:// URL cannot be read") as refused:
        SpeculationCache.open(url)
    assert CANARY not in str(refused.value)


def test_urls_are_equal_when_their_secrets_are_and_a_hash_tells_nothing() -> None:
    one, same, other = (StoreURL(f"postgresql://me:{secret}@host/db") for secret in ("a", "a", "b"))
    assert one == same
    assert one != other
    assert hash(one) == hash(other) == hash("postgresql://me@host/db")
    assert copy.deepcopy(one) is copy.copy(one) is one
    assert pickle.loads(pickle.dumps(one)) == StoreURL("postgresql://me@host/db")


@pytest.mark.parametrize("where", ["cache", "/a/b.sqlite", "C://cache", "c:/x", "", "://x", "a//b", Path("/a"), None])
def test_paths_stay_paths(where: object) -> None:
    assert place_of(where) is where


@pytest.mark.parametrize(
    ("where", "says"),
    [
        (Path(f"postgresql://me:{CANARY}@host/db"), "a Path cannot be a URL"),
        (f"host=db user=me password={CANARY}", "a database needs a URL, not keywords"),
        (f"password={CANARY} host=db", "a database needs a URL, not keywords"),
        (f"postgresql://me:{CANARY}@host/db".encode(), "a bytes names no cache"),
        ({"password": CANARY}, "a dict names no cache"),
    ],
)
def test_what_would_become_a_folder_with_a_password_in_its_name_is_refused(where: object, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as refused:
        open_store(where)  # type: ignore[arg-type]
    assert CANARY not in str(refused.value)


@pytest.mark.parametrize("use", [SQLiteStore.open, verify_cache])
def test_the_embedded_store_makes_no_folder_of_a_url(
    use: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CacheError, match="postgresql://me@host/db is not a folder or file") as refused:
        use(f"postgresql://me:{CANARY}@host/db")
    assert CANARY not in str(refused.value)
    assert list(tmp_path.iterdir()) == []


def test_a_url_begins_with_its_scheme() -> None:
    with pytest.raises(ConfigError, match="a store's URL begins with its scheme") as refused:
        StoreURL(f"host=db password={CANARY}")
    assert CANARY not in str(refused.value)


def test_a_package_that_opens_a_scheme_and_cannot_be_imported_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = EntryPoint("redis", "no_such_package:open_store", "precedent.stores")
    monkeypatch.setattr("precedent.cache.store.entry_points", lambda group, name: [broken][: name == "redis"])
    with pytest.raises(CacheError, match="no_such_package:open_store opens redis:// and cannot be imported: No module"):
        open_store("redis://host")
    with pytest.raises(ConfigError, match="no installed package opens a cache at etcd://"):
        open_store("ETCD://host")


def test_what_others_wrote_about_their_input_is_cleaned() -> None:
    said = f"Got unexpected extra argument (postgresql://me:p@{CANARY}@host/db) and xy:/y:{CANARY}@z"
    assert CANARY not in hide_secrets(said)
    assert hide_secrets("see https://example.org/a and a@b") == "see https://example.org/a and a@b"
