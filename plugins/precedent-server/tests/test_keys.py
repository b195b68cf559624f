"""API keys: who a caller is, what is stored, what damage and other processes do, and that no key is ever shown."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import threading
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.key_files import ENTRY, KEY, changing, go, names, posix_only, private
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from precedent.cache.records import MAX_TENANT_LENGTH
from precedent.errors import ConfigError
from precedent_server import keys as keys_module
from precedent_server.keys import ROLES, Caller, KeyFile, add_key, digest_of, hide_keys, read_keys, revoke_key

USES = (KeyFile, read_keys, lambda path: add_key(path, "new", "shop"), lambda path: revoke_key(path, "desk"))
"""Everything that reads the file."""


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


def test_each_role_includes_those_before_it():
    allowed = {role: [asked for asked in ROLES if Caller("n", "t", role).may(asked)] for role in ROLES}
    assert allowed == {"use": ["use"], "read-cache": ["use", "read-cache"], "admin": ["use", "read-cache", "admin"]}


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


@posix_only
@pytest.mark.parametrize("mode", [0o640, 0o604, 0o601])
def test_a_file_that_others_may_use_is_refused_with_what_to_run(tmp_path, mode):
    path = tmp_path / "my keys.json"
    add_key(path, "desk", "shop")
    path.chmod(mode)
    refused_and_unchanged(path, r"is not private; run: chmod 600 '.*my keys\.json'")


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
            for wrong in ({"more": 1}, {"name": "two words"}, {"created": "2026-01-02T03:04:05"}, {"sha256": "G" * 64})
        ),
        ({"format": 1, "keys": [ENTRY, ENTRY | {"sha256": "1" * 64}]}, "two keys of one name"),
        ({"format": 1, "keys": [ENTRY, ENTRY | {"name": "other"}]}, "one key under two names"),
        ('{"format": 1, "keys": ' + "[" * 100_000, "is damaged"),
    ],
)
def test_a_damaged_or_newer_file_is_refused_by_what_is_wrong(path, content, says):
    refused_and_unchanged(private(path, content if isinstance(content, str) else json.dumps(content)), says)


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, 10**6), byte=st.integers(0, 255))
def test_a_changed_byte_is_either_read_or_refused(tmp_path, at, byte):
    content = bytearray(json.dumps({"format": 1, "keys": [ENTRY]}).encode())
    content[at % len(content)] = byte
    path = private(tmp_path / "keys.json", bytes(content))
    with contextlib.suppress(ConfigError):  # any other exception fails
        assert len(read_keys(path)) == 1


def test_a_write_that_fails_leaves_the_file_and_no_litter(path, monkeypatch):
    add_key(path, "desk", "shop")
    before, files = path.read_bytes(), sorted(path.parent.iterdir())

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ConfigError, match=r"cannot be changed \(No space left on device"):
        add_key(path, "other", "shop")
    assert (path.read_bytes(), sorted(path.parent.iterdir())) == (before, files)


def test_processes_and_threads_that_add_at_once_lose_nothing(path):
    threads = [threading.Thread(target=add_key, args=(path, f"thread-{n}", "shop")) for n in range(10)]
    with changing(path, "for n in range(10): add_key(path, f'process-{n}', 'shop')") as process:
        go(process)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(names(path)) == sorted(f"{who}-{n}" for who in ("process", "thread") for n in range(10))


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


def shown_by(error: BaseException) -> str:
    """Everything that a log could show of an error, and of the errors behind it."""
    texts, pending = ["".join(traceback.format_exception(error))], [error]
    while pending:
        found = pending.pop()
        texts += [str(found), repr(found), repr(found.args), repr(vars(found))]
        pending += [one for one in (found.__cause__, found.__context__) if one is not None]
    return "\n".join(texts)


def with_key_in(value: object, at: tuple[str | int, ...], how: str) -> object:
    """The value with the key in one place of it."""
    if not at:
        return {"value": KEY, "inside": f"x {KEY} y", "field": {KEY: 1}, "list": [KEY]}[how]
    changed = dict(value) if isinstance(value, dict) else list(value)
    inner = changed[at[0]] if isinstance(changed, list) else changed.get(at[0], "")
    changed[at[0]] = with_key_in(inner, at[1:], how)
    return changed


PLACES = [(), ("format",), ("keys",), ("more",), (KEY,), ("keys", 0)]
PLACES += [("keys", 0, field) for field in (*ENTRY, "more", KEY)]


@pytest.mark.parametrize("at", PLACES, ids=str)
@pytest.mark.parametrize("how", ["value", "inside", "field", "list"])
def test_a_key_written_into_the_file_by_hand_is_never_shown(path, caplog, at, how):
    sound = {"format": 1, "keys": [ENTRY]}
    private(path, json.dumps(sound))
    file = KeyFile(path)
    private(path, json.dumps(with_key_in(sound, at, how)))
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


def test_hidden_keys_leave_other_texts():
    assert hide_keys(f"a {KEY}, b {KEY[:-4]}") == "a pk-…, b pk-…"
    assert hide_keys("pk-production and apk-files") == "pk-production and apk-files"
