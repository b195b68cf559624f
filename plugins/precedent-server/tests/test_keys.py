"""API keys: who a caller is, what is stored, what damage and other processes do, and that no key is ever shown."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.command_line import precedent
from helpers.key_processes import changing, go
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from precedent.cache.records import MAX_TENANT_LENGTH
from precedent.errors import ConfigError
from precedent_server import keys as keys_module
from precedent_server.keys import Caller, KeyFile, add_key, digest_of, read_keys, revoke_key

posix_only = pytest.mark.skipif(os.name != "posix", reason="Windows has no modes")

ENTRY = {"name": "desk", "tenant": "shop", "role": "use", "created": "2026-01-02T03:04:05Z", "sha256": "0" * 64}
KEY = "pk-" + "Secret_Key-of_43-characters-0123456789abcde"
"""Looks like a key."""

USES = (KeyFile, read_keys, lambda path: add_key(path, "new", "shop"), lambda path: revoke_key(path, "desk"))
"""Everything that reads the file."""


def names(path: Path) -> list[str]:
    return [one.name for one in read_keys(path)]


def private(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    path.chmod(0o600)
    return path


def refused_and_unchanged(path: Path, says: str) -> None:
    before = path.read_bytes()
    for use in USES:
        with pytest.raises(ConfigError, match=says):
            use(path)
    assert path.read_bytes() == before


def test_a_key_says_who_its_caller_is(path):
    key = add_key(path, "shop-backend", "shop", "read-cache")
    add_key(path, "desk", "bänk")
    assert KeyFile(path).caller(key) == Caller("shop-backend", "shop", "read-cache")
    assert [(one.name, one.tenant, one.role) for one in read_keys(path)] == [
        ("shop-backend", "shop", "read-cache"),
        ("desk", "bänk", "use"),
    ]


def test_keys_are_long_and_random_and_only_their_digests_are_stored_or_shown(path):
    made = {add_key(path, f"key-{n}", "shop") for n in range(20)}
    file, stored = KeyFile(path), path.read_text()
    shown = repr([file, *map(file.caller, made), read_keys(path)]) + str(read_keys(path)[0])
    assert len(made) == 20
    assert "key-7" in shown
    for key in made:
        assert key.startswith("pk-")
        assert len(key) == len("pk-") + 43  # 32 bytes, six bits a character
        assert key[3:] not in stored + shown
        assert digest_of(key) in stored
        assert digest_of(key) not in shown


def test_nothing_but_a_key_has_a_caller(path):
    key = add_key(path, "desk", "shop")
    file = KeyFile(path)
    changed = [key[:at] + ("a" if key[at] != "a" else "b") + key[at + 1 :] for at in range(len(key))]
    changed += [key[:-1], f"{key}a", key.swapcase(), f"Bearer {key}", f"{key} ", f"{key}=", digest_of(key)]
    changed += ["", "pk-", "desk", "\ud800", "ä" * 9999]
    assert [one for one in changed if file.caller(one)] == []


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda path: add_key(path, "desk", "shop"), "has a key named 'desk' already"),
        (lambda path: add_key(path, "new", "shop", "boss"), "no role 'boss'; the roles are use, read-cache, admin"),
        (lambda path: add_key(path, "new", ""), "tenant's name is empty"),
        (lambda path: add_key(path, "new", "a\nb"), "not printable"),
        (lambda path: add_key(path, "new", "a" * (MAX_TENANT_LENGTH + 1)), "at most 200"),
        *(
            (lambda path, name=name: add_key(path, name, "shop"), "cannot name a key")
            for name in ("", "two words", "new\n", "-new", "n" * 65)
        ),
        (lambda path: revoke_key(path, "none"), "no key named 'none'"),
        (lambda path: add_key(path.parent / "no" / "folder", "new", "shop"), "there is no folder"),
        (lambda path: add_key(path / "below", "new", "shop"), "there is no folder"),
        (lambda path: revoke_key(path.with_name("other"), "desk"), "there is no key file"),
        (lambda path: add_key(path.parent, "new", "shop"), "is not a file"),
        (lambda path: KeyFile(path.with_name("other")), "there is no key file"),
        (lambda path: Caller("desk", "shop", "use").may("boss"), "no role 'boss'"),
    ],
)
def test_bad_input_is_refused_and_changes_nothing(path, change, says):
    add_key(path, "desk", "shop")
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=says):
        change(path)
    assert path.read_bytes() == before


def test_a_change_counts_from_the_next_call_on(path):
    """Also one that keeps the file's inode, size and times."""
    first = add_key(path, "first", "shop")
    file = KeyFile(path)
    second = add_key(path, "second", "bank", "admin")
    assert file.caller(second) == Caller("second", "bank", "admin")
    revoke_key(path, "first")
    assert file.caller(first) is None
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    path.write_text(path.read_text().replace('"bank"', '"club"'))
    os.utime(path, ns=times)
    assert file.caller(second).tenant == "club"
    again = add_key(path, "first", "bank")  # the name of a revoked key is free
    assert (file.caller(first), file.caller(again).tenant) == (None, "bank")


DAMAGES: dict[str, Callable[[Path], object]] = {
    "is damaged": lambda path: path.write_text(path.read_text()[:-5]),
    "newer format": lambda path: path.write_text(path.read_text().replace('"format": 1', '"format": 9')),
    "run: chmod 600": lambda path: path.chmod(0o644),
    "is not a file": lambda path: (path.unlink(), path.mkdir()),
    "cannot be read": lambda path: (path.unlink(), path.symlink_to(path)),  # a ring of links, not even for root
}


@posix_only
@pytest.mark.parametrize("says", DAMAGES)
def test_a_file_that_cannot_be_used_leaves_the_last_good_content_in_force_with_one_warning(path, caplog, says):
    revoked, kept = add_key(path, "revoked", "shop"), add_key(path, "kept", "shop")
    file = KeyFile(path)
    revoke_key(path, "revoked")
    assert file.caller(revoked) is None
    whole = path.read_bytes()
    DAMAGES[says](path)
    for _ in range(2):
        assert file.caller(kept) == Caller("kept", "shop", "use")
        assert file.caller(revoked) is None
    assert len(caplog.records) == 1
    assert says in caplog.text
    path.rmdir() if path.is_dir() else path.unlink()
    for content, number in ((whole, 1), (whole[:-5], 2)):  # a new damage is told anew
        private(path, content)
        assert file.caller(kept) is not None
        assert len(caplog.records) == number


def test_a_deleted_file_means_no_keys_also_when_it_comes_back_damaged(path, caplog):
    key = add_key(path, "desk", "shop")
    file, whole = KeyFile(path), path.read_bytes()
    path.unlink()
    assert [file.caller(key) for _ in range(2)] == [None, None]
    assert len(caplog.records) == 1
    private(path, whole[:-5])
    assert file.caller(key) is None
    private(path, whole)
    assert file.caller(key) == Caller("desk", "shop", "use")


@posix_only
def test_the_file_is_private_whatever_the_umask(path):
    before = os.umask(0)
    try:
        add_key(path, "desk", "shop")
        add_key(path, "other", "shop")
    finally:
        os.umask(before)
    assert [oct(stat.S_IMODE(one.stat().st_mode)) for one in path.parent.iterdir()] == ["0o600"] * 2


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="only root can give files away")
def test_a_key_added_by_root_leaves_the_file_its_owner(path):
    add_key(path, "desk", "shop")
    os.chown(path, 12345, -1)
    add_key(path, "other", "shop")
    assert {one.stat().st_uid for one in path.parent.iterdir()} == {12345}


@posix_only
def test_a_link_stays_a_link_and_a_pipe_is_refused_at_once(tmp_path, path):
    link = tmp_path / "link.json"
    link.symlink_to(path)
    key = add_key(link, "desk", "shop")
    file = KeyFile(link)
    assert link.is_symlink()
    assert names(path) == ["desk"]
    revoke_key(path, "desk")
    assert file.caller(key) is None
    os.mkfifo(tmp_path / "pipe", 0o600)
    for use in USES:
        with pytest.raises(ConfigError, match="is not a file"):
            use(tmp_path / "pipe")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        *(
            (wrong, "is damaged: ")
            for wrong in ([], {"format": "1", "keys": []}, {"format": 1, "keys": {}}, {"format": 1, "keys": [], "x": 1})
        ),
        ({"format": 2, "people": []}, "is of a newer format: update Precedent"),
        ({"format": 1, "keys": [ENTRY, "desk"]}, "is damaged at entry 2: "),
        *(
            ({"format": 1, "keys": [ENTRY | wrong]}, "is damaged at entry 1: ")
            for wrong in (
                {"more": 1},
                {"name": "two words"},
                {"created": "2026-01-02T03:04:05"},
                {"sha256": "G" * 64},
                {"requests_per_minute": 0},
                {"tokens_per_minute": "5"},
            )
        ),
        ({"format": 1, "keys": [ENTRY, ENTRY | {"sha256": "1" * 64}]}, "two keys of one name"),
        ({"format": 1, "keys": [ENTRY, ENTRY | {"name": "other"}]}, "one key under two names"),
        ('{"format": 1, "keys": ' + "[" * 100_000, "is damaged"),
    ],
)
def test_a_damaged_or_newer_file_is_refused_by_what_is_wrong(path, content, says):
    refused_and_unchanged(private(path, content if isinstance(content, str) else json.dumps(content)), says)


def test_a_write_that_fails_leaves_the_file_and_no_litter(path, monkeypatch):
    add_key(path, "desk", "shop")
    before, files = path.read_bytes(), sorted(path.parent.iterdir())

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ConfigError, match=r"cannot be changed \(No space left on device"):
        add_key(path, "other", "shop")
    assert (path.read_bytes(), sorted(path.parent.iterdir())) == (before, files)


ADDING = """
import sys
from pathlib import Path
from precedent_server.keys import add_key
print("ready", flush=True)
sys.stdin.readline()
for n in range(10): add_key(Path(sys.argv[1]), f"process-{n}", "shop")
"""


def test_processes_and_threads_that_add_at_once_lose_nothing(path):
    threads = [threading.Thread(target=add_key, args=(path, f"thread-{n}", "shop")) for n in range(10)]
    command = [sys.executable, "-c", ADDING, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        process.stdin.write("go\n")
        process.stdin.flush()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert process.returncode == 0
    assert sorted(names(path)) == sorted(f"{who}-{n}" for who in ("process", "thread") for n in range(10))


def shown_by(error: BaseException) -> str:
    """Everything that a log could show of an error, and of the errors behind it."""
    texts, pending = ["".join(traceback.format_exception(error))], [error]
    while pending:
        found = pending.pop()
        texts += [str(found), repr(found), repr(found.args), repr(vars(found))]
        pending += [one for one in (found.__cause__, found.__context__) if one is not None]
    return "\n".join(texts)


def written(value: object) -> dict[str, object]:
    return {"format": 1, "keys": [value]}


WITH_KEY = [KEY, {"format": KEY, "keys": []}, {"format": 1, "keys": KEY}, written(KEY), written(ENTRY) | {KEY: 1}]
WITH_KEY += [written({**ENTRY, field: value}) for field in (*ENTRY, "more", KEY) for value in (f"x {KEY} y", [KEY])]


@pytest.mark.parametrize("content", WITH_KEY, ids=str)
def test_a_key_written_into_the_file_by_hand_is_never_shown(path, caplog, content):
    private(path, json.dumps(written(ENTRY)))
    file = KeyFile(path)
    private(path, json.dumps(content))
    file.caller(KEY)
    assert len(caplog.records) == 1
    assert KEY not in caplog.text
    for use in USES:
        with pytest.raises(ConfigError) as raised:
            use(path)
        assert KEY not in shown_by(raised.value)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    before=st.text(max_size=5),
    after=st.text(max_size=90),
    where=st.sampled_from(["name", "tenant", "role", "revoke", "may"]),
)
def test_a_key_in_the_wrong_argument_is_refused_and_never_shown(tmp_path, before, after, where):
    path, text = tmp_path / "keys.json", before + KEY + after
    calls = {
        "name": lambda: add_key(path, text, "shop"),
        "tenant": lambda: add_key(path, "desk", text),
        "role": lambda: add_key(path, "desk", "shop", text),
        "revoke": lambda: revoke_key(path, text),
        "may": lambda: Caller("desk", "shop", "use").may(text),
    }
    with pytest.raises(ConfigError) as raised:
        calls[where]()
    assert KEY not in shown_by(raised.value)
    assert not path.exists()


# The command


@pytest.fixture
def keys(tmp_path, capsys, monkeypatch):
    """Runs `precedent keys` on one file; returns status, stdout and stderr."""
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", "dumb")

    def run(*arguments: object) -> tuple[int, str, str]:
        status = precedent("keys", *arguments, "--file", tmp_path / "keys.json")
        return status, *capsys.readouterr()

    return run


def test_a_key_is_printed_alone_listed_without_itself_and_revoked(keys, tmp_path):
    limits = ("--requests-per-minute", 60, "--tokens-per-minute", 9000)
    status, out, err = keys("add", "desk", "--tenant", "[red]ä", "--role", "admin", *limits)
    key = out.removesuffix("\n")
    assert (status, key.split(), key in err) == (0, [key], False)
    assert "cannot be shown again" in err
    assert KeyFile(tmp_path / "keys.json").caller(key) == Caller("desk", "[red]ä", "admin", 60, 9000)
    status, out, err = keys("list", "--json", tmp_path / "out.json")
    assert (status, err) == (0, "")
    assert all(part in out for part in ("desk", "[red]ä", "admin", "60", "9000", "1 key"))
    text = (tmp_path / "out.json").read_text(encoding="utf-8")
    (listed,) = json.loads(text)["keys"]
    assert listed.keys() == {"name", "tenant", "role", "created", "requests_per_minute", "tokens_per_minute"}
    assert key not in out + text
    status, out, _ = keys("revoke", "desk", "--json", tmp_path / "out.json")
    assert (status, out) == (0, "desk revoked\n")
    assert json.loads((tmp_path / "out.json").read_text()) == {"revoked": "desk"}
    assert KeyFile(tmp_path / "keys.json").caller(key) is None


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["add", "desk", "--tenant", "shop"], "has a key named 'desk' already"),
        (["add", "new"], "Missing option '--tenant'"),
        (["add", "new", "--tenant", KEY], "holds an API key"),
        (["add", "new", KEY, "--tenant", "shop"], "unexpected extra argument"),
        (["add", "new", "--tenant", "shop", "--role", KEY], "there is no role"),
        (["add", "new", "--tenant", "shop", "--" + KEY], "No such option"),
        (["revoke", KEY], "give the key's name"),
        (["revoke", "desk", "--json", "/no/such/folder/out.json"], "there is no folder"),
    ],
)
def test_bad_input_gives_one_line_and_exit_2_and_changes_nothing(keys, tmp_path, arguments, says):
    keys("add", "desk", "--tenant", "shop")
    before = (tmp_path / "keys.json").read_bytes()
    status, out, err = keys(*arguments)
    assert (status, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert says in err
    assert KEY not in err
    assert (tmp_path / "keys.json").read_bytes() == before


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, 10**6), byte=st.integers(0, 255))
def test_a_changed_byte_is_either_read_or_refused(tmp_path, at, byte):
    content = bytearray(json.dumps({"format": 1, "keys": [ENTRY]}).encode())
    content[at % len(content)] = byte
    path = private(tmp_path / "keys.json", bytes(content))
    with contextlib.suppress(ConfigError):  # any other exception fails
        assert len(read_keys(path)) == 1


def test_a_file_that_another_process_keeps_locked_is_left_alone(path, monkeypatch):
    add_key(path, "desk", "shop")
    monkeypatch.setattr(keys_module, "LOCK_SECONDS", 0.05)
    locking = "from filelock import FileLock\n"
    locking += "with FileLock(f'{path}.lock'): print('locked', flush=True); sys.stdin.readline()"
    with changing(path, locking) as holder:
        go(holder)
        assert holder.stdout.readline() == "locked\n"
        with pytest.raises(ConfigError, match=r"another process keeps .* locked"):
            add_key(path, "other", "shop")
        go(holder)
    add_key(path, "other", "shop")
    assert names(path) == ["desk", "other"]


def test_callers_are_known_while_another_process_replaces_the_file(path, caplog):
    kept, gone = add_key(path, "kept", "shop"), add_key(path, "gone", "shop")
    file = KeyFile(path)
    revoke_key(path, "gone")
    answers = set[tuple[Caller | None, ...]]()
    ended = threading.Event()

    def ask() -> None:
        while not ended.is_set():
            answers.add((file.caller(kept), file.caller(gone)))

    threads = [threading.Thread(target=ask) for _ in range(3)]
    try:
        for thread in threads:
            thread.start()
        with changing(path, "for n in range(15): add_key(path, 'guest', 'bank'); revoke_key(path, 'guest')") as process:
            go(process)
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    assert answers == {(Caller("kept", "shop", "use"), None)}
    assert caplog.records == []
