"""No way to fail at a PostgreSQL server tells its password, and what was written down without it says what to set."""

from __future__ import annotations

import io
import logging
import pickle
import socket
import traceback
from collections.abc import Callable
from contextlib import closing, redirect_stderr, redirect_stdout
from pathlib import Path
from urllib.parse import quote

import pytest
from helpers.command_line import precedent

from precedent.cache import SpeculationCache, StoreURL
from precedent.cache.store import open_store, verify_store
from precedent.cache.store_url import is_secret
from precedent.config import SamplingParams
from precedent.engine.engine import Engine
from precedent.errors import CacheError, PrecedentError
from precedent.planning.costs import CostCurve
from precedent_testing.embedders import HashEmbedder
from precedent_testing.store_contract import completion
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm

pytest.importorskip("precedent_postgres", reason="precedent-postgres is not installed")
import psycopg

from precedent_postgres import PostgresStore, testing

CANARY = "Zyzzogeton"
PASSWORD = f"p@{CANARY}/:?%20#&= ' \\{CANARY}"
"""All that a URL or libpq's own syntax could stumble over."""


@pytest.fixture(scope="module")
def server():
    if testing.why_not() is not None:
        pytest.skip(testing.why_not())
    with testing.TemporaryServer() as running:
        running.execute("CREATE ROLE guarded LOGIN")
        running.execute("CREATE DATABASE guarded OWNER guarded")
        running.execute("ALTER ROLE guarded PASSWORD '{}'".format(PASSWORD.replace("'", "''")))
        rules = running.data / "pg_hba.conf"
        rules.write_text(f"local all guarded scram-sha-256\n{rules.read_text()}")
        running.execute("SELECT pg_reload_conf()")
        yield running


def no_such_host(host: str, *more: object, **settings: object) -> None:
    raise socket.gaierror(socket.EAI_NONAME, f"Name or service not known: {host}")


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("socket.getaddrinfo", no_such_host)
    monkeypatch.delenv("PGPASSWORD", raising=False)
    monkeypatch.setenv("PGPASSFILE", str(tmp_path / "none"))


def guarded(server, password: str | None) -> str:
    login = "guarded" if password is None else f"guarded:{quote(password, safe='')}"
    return f"postgresql://{login}@/guarded?host={server.folder}"


FAILING = {
    "refused": f"postgresql://me:{CANARY}@127.0.0.1:1/db",
    "no socket": f"postgresql://me:{CANARY}@/db?host=/nonexistent",
    "no host": f"postgresql://me:{CANARY}@nowhere.invalid/db",
    "@ as it is": f"postgresql://me:p@{CANARY}@nowhere.invalid/db",
    "in the query": f"postgresql:///db?host=/nonexistent&user=me&password={CANARY}",
    "of a key": f"postgresql:///db?host=/nonexistent&user=me&sslpassword={CANARY}",
    "several hosts": f"postgresql://me:{CANARY}@127.0.0.1:1,nowhere.invalid:2/db",
    "no such option": f"postgresql://me:{CANARY}@127.0.0.1:1/db?nonsense=1&token={CANARY}",
    "no NUL": f"postgresql://me:{CANARY}%00@127.0.0.1:1/db",
    "no such port": f"postgresql://me:{CANARY}@127.0.0.1:99999/db",
    "/ as it is": f"postgresql://me:p/{CANARY}@127.0.0.1:1/db",
    "keywords": f"host=127.0.0.1 port=1 user=me password={CANARY}",
}


def whole_story(error: BaseException) -> str:
    """An error with all it was caused by or followed. No frame of the driver is kept: its locals hold passwords."""
    assert not any("/psycopg/" in frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__))
    told = "".join(traceback.format_exception(error)), repr(error), repr(vars(error))
    others = [other for other in (error.__cause__, error.__context__) if other is not None]
    return "\n".join([*told, *map(whole_story, others)])


OPERATIONS: dict[str, Callable[[str], object]] = {
    "stats": lambda url: open_store(url).stats(),
    "the plugin's": lambda url: PostgresStore(url).since("default", "tok"),
    "verify": verify_store,
    "insert": lambda url: SpeculationCache.open(url, embedder=HashEmbedder()).insert(completion(1, query="q")),
    "recall": lambda url: SpeculationCache.open(url, embedder=HashEmbedder()).recall("q", tenant="t", tokenizer="t"),
    "forget": lambda url: SpeculationCache.open(url, embedder=HashEmbedder()).forget(tenant="t"),
}


@pytest.mark.parametrize(
    ("failing", "operation"), [(one, "stats") for one in FAILING] + [("refused", one) for one in OPERATIONS]
)
def test_a_connection_that_fails_tells_no_password(failing: str, operation: str, caplog) -> None:
    for name in (None, "psycopg", "precedent.cache"):
        caplog.set_level(logging.DEBUG, name)
    with pytest.raises(PrecedentError) as failed:
        OPERATIONS[operation](FAILING[failing])
    seen = "\n".join(logging.Formatter().format(record) for record in caplog.records)
    assert CANARY not in whole_story(failed.value)
    assert CANARY not in seen + caplog.text + repr([vars(record) for record in caplog.records])
    if isinstance(failed.value, CacheError) and "not a PostgreSQL URL" not in str(failed.value):
        assert "speculation goes on without it" in seen


def test_the_whole_password_connects_and_a_wrong_one_is_not_told(server, caplog) -> None:
    caplog.set_level(logging.DEBUG)
    caplog.set_level(logging.DEBUG, "psycopg")
    store = open_store(guarded(server, PASSWORD))
    assert store.stats().path == f"postgresql://guarded@/guarded?host={server.folder}"
    assert CANARY not in repr((vars(store), vars(store._server), store.verify(), store.stats()))
    store.close()
    assert "connection attempt" in caplog.text, "the driver's own lines are looked at"
    with pytest.raises(CacheError, match="password authentication failed") as failed:
        open_store(guarded(server, f"{CANARY}?")).stats()
    assert CANARY not in whole_story(failed.value) + caplog.text


def test_an_engine_runs_on_without_its_server_and_logs_no_password(server, caplog) -> None:
    caplog.set_level(logging.DEBUG)
    caplog.set_level(logging.DEBUG, "psycopg")
    with SpeculationCache.open(guarded(server, f"{CANARY}?"), embedder=HashEmbedder()) as cache:
        engine = Engine(tiny_causal_lm(), byte_tokenizer(), name="tiny", cache=cache, cost=CostCurve())
        assert engine.submit([1, 2, 3], SamplingParams(max_tokens=8), query="q").result().token_ids
        engine.close()
    assert "speculation goes on without it" in caplog.text
    assert CANARY not in caplog.text


def records_at(url: str | StoreURL) -> int:
    with closing(open_store(url)) as store:
        return store.stats().records


@pytest.mark.parametrize("written", [str, lambda url: pickle.loads(pickle.dumps(StoreURL(url)))])
def test_a_url_that_lost_its_password_connects_with_pgpassword_or_says_so(
    server, written, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    url = written(str(StoreURL(guarded(server, PASSWORD))))
    with pytest.raises(CacheError, match=r"no password supplied; set PGPASSWORD, or a line in ~/\.pgpass"):
        records_at(url)
    monkeypatch.setenv("PGPASSWORD", PASSWORD)
    assert records_at(url) == 0
    monkeypatch.delenv("PGPASSWORD")
    file = tmp_path / "pgpass"
    escaped = PASSWORD.replace("\\", "\\\\").replace(":", "\\:")
    file.write_text(f"*:*:guarded:guarded:{escaped}\n")
    file.chmod(0o600)
    monkeypatch.setenv("PGPASSFILE", str(file))
    assert records_at(url) == 0


def command(*arguments: object) -> tuple[int, str]:
    """`precedent` as it is typed: its status, and all it wrote."""
    written = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(written), redirect_stderr(written):
        patch.setenv("COLUMNS", "400")
        status = precedent(*arguments)
    return status, written.getvalue()


@pytest.mark.parametrize(
    "arguments",
    [
        *[("cache", name) for name in ("stats", "list", "verify", "compact")],
        ("cache", "search", "x"),
        ("cache", "show", 1),
        ("cache", "forget", "--tenant", "x"),
        ("cache", "export", "folder"),
    ],
)
@pytest.mark.sampled(4)
def test_the_command_line_shows_no_password(server, arguments: tuple[object, ...], tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for url in (guarded(server, PASSWORD), guarded(server, f"{CANARY}?"), FAILING["@ as it is"], FAILING["/ as it is"]):
        named, *others = arguments[1:]
        file = [] if named == "export" else ["--json", tmp_path / "out.json"]
        _, written = command("cache", named, url, *others, *file)
        assert CANARY not in written
    assert CANARY not in "".join(file.read_text() for file in tmp_path.rglob("*.json"))


@pytest.mark.parametrize(
    "arguments",
    [
        ("cache", "stats", FAILING["refused"], FAILING["refused"]),
        ("cache", "import", "cache", FAILING["refused"]),
        ("cache", "warm", "cache", FAILING["refused"]),
        ("cache", FAILING["refused"]),
        ("run", "hi", FAILING["refused"]),
        ("run", "hi", "--cache", FAILING["refused"], "--max-tokens", "none"),
        ("train-draft", "--target", "m", "--prompts", "p", "--out", "o", "--from-cache", FAILING["refused"]),
    ],
)
def test_what_is_typed_at_the_wrong_place_is_not_repeated(arguments: tuple[object, ...]) -> None:
    status, written = command(*arguments)
    assert status == 2
    assert CANARY not in written
    assert written.startswith("error: ")


def test_every_secret_that_libpq_knows_is_one_here() -> None:
    options = psycopg.pq.Conninfo.get_defaults()
    secrets = [option.keyword.decode() for option in options if option.dispchar == b"*"]
    assert "password" in secrets
    assert [name for name in secrets if not is_secret(name)] == []


@pytest.mark.parametrize("url", ["postgresql://host/db?nonsense=1", f"postgresql://me:{CANARY}%00@host/db"])
def test_a_url_that_is_none_is_refused_at_once(url: str) -> None:
    with pytest.raises(CacheError, match="is not a PostgreSQL URL") as raised:
        PostgresStore(url)
    assert CANARY not in whole_story(raised.value)
