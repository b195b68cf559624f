"""The file of API keys: what is stored, who may read it, what damage does, and several processes at once."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import threading

import pytest
from helpers.key_files import ENTRY, names, posix_only, private
from helpers.key_processes import changing, go
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from precedent.errors import ConfigError
from precedent_server import stored_keys
from precedent_server.keys import Caller, KeyFile
from precedent_server.stored_keys import add_key, read_keys, revoke_key


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
@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o601, 0o666])
def test_a_file_that_others_may_use_is_refused_with_what_to_run(tmp_path, mode):
    path = tmp_path / "my keys.json"
    add_key(path, "desk", "shop")
    path.chmod(mode)
    before = path.read_bytes()
    for use in (KeyFile, read_keys, lambda file: add_key(file, "new", "shop"), lambda file: revoke_key(file, "desk")):
        with pytest.raises(ConfigError, match=r"is not private; run: chmod 600 '.*my keys\.json'"):
            use(path)
    assert path.read_bytes() == before


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="only root can give files away")
def test_a_key_added_by_root_leaves_the_file_its_owner(path):
    add_key(path, "desk", "shop")
    os.chown(path, 12345, -1)
    add_key(path, "other", "shop")
    assert {one.stat().st_uid for one in path.parent.iterdir()} == {12345}


@posix_only
def test_a_link_stays_a_link(tmp_path, path):
    link = tmp_path / "link.json"
    link.symlink_to(path)
    key = add_key(link, "desk", "shop")
    file = KeyFile(link)
    assert link.is_symlink()
    assert names(path) == ["desk"]
    revoke_key(path, "desk")
    assert file.caller(key) is None


@posix_only
def test_a_pipe_and_a_ring_of_links_are_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe", 0o600)
    (tmp_path / "ring").symlink_to("ring")
    for name, says in (("pipe", "is not a file"), ("ring", "cannot be")):
        for use in (KeyFile, lambda file: add_key(file, "new", "shop")):
            with pytest.raises(ConfigError, match=says):
                use(tmp_path / name)


def test_a_file_cut_short_anywhere_is_refused_and_left_as_it_is(path):
    add_key(path, "desk", "bänk")
    whole = path.read_bytes().rstrip()
    cut_file = path.with_name("cut.json")
    for length in range(len(whole)):
        private(cut_file, whole[:length])
        for use in (KeyFile, lambda file: add_key(file, "new", "shop"), lambda file: revoke_key(file, "desk")):
            with pytest.raises(ConfigError, match=r"cut\.json is damaged, "):
                use(cut_file)
        assert cut_file.read_bytes() == whole[:length]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ([], "the file has no valid content"),
        ({"keys": []}, "the file has no valid format"),
        ({"format": "1", "keys": []}, "the file has no valid format"),
        ({"format": 0, "keys": []}, "the file has no valid format"),
        ({"format": 2, "people": []}, "is of a newer format: update Precedent"),
        ({"format": 1}, "the file has no valid keys"),
        ({"format": 1, "keys": {}}, "the file has no valid keys"),
        ({"format": 1, "keys": [], "more": 1}, "the file has an unknown field"),
        ({"format": 1, "keys": [ENTRY, "desk"]}, "entry 2 has no valid keys"),
        ({"format": 1, "keys": [ENTRY | {"more": 1}]}, "entry 1 has an unknown field"),
        ({"format": 1, "keys": [ENTRY | {"name": "two words"}]}, "entry 1 has no valid name"),
        ({"format": 1, "keys": [ENTRY | {"tenant": ""}]}, "entry 1 has no valid tenant"),
        ({"format": 1, "keys": [ENTRY | {"role": "boss"}]}, "entry 1 has no valid role"),
        ({"format": 1, "keys": [ENTRY | {"created": "yesterday"}]}, "entry 1 has no valid created"),
        ({"format": 1, "keys": [ENTRY | {"created": "2026-01-02T03:04:05"}]}, "entry 1 has no valid created"),
        ({"format": 1, "keys": [ENTRY | {"sha256": "0" * 63 + "G"}]}, "entry 1 has no valid sha256"),
        ({"format": 1, "keys": [ENTRY, ENTRY | {"sha256": "1" * 64}]}, "two keys of one name"),
        ({"format": 1, "keys": [ENTRY, ENTRY | {"name": "other"}]}, "one key under two names"),
    ],
)
def test_a_damaged_or_newer_file_is_refused_by_what_is_wrong(path, content, says):
    private(path, json.dumps(content))
    before = path.read_bytes()
    for use in (KeyFile, lambda file: add_key(file, "new", "shop"), lambda file: revoke_key(file, "desk")):
        with pytest.raises(ConfigError, match=says):
            use(path)
    assert path.read_bytes() == before


def test_deep_nesting_is_damage_like_any_other(path):
    private(path, '{"format": 1, "keys": ' + "[" * 100_000)
    with pytest.raises(ConfigError, match="is damaged"):
        KeyFile(path)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
    assert path.read_bytes() == before
    assert sorted(path.parent.iterdir()) == files


def test_two_processes_that_add_at_once_lose_nothing(path):
    def adding(who: str) -> str:
        return f"for n in range(15): add_key(path, f'{who}-{{n}}', 'shop')"

    with changing(path, adding("one")) as one, changing(path, adding("two")) as two:
        go(one)
        go(two)
    assert sorted(names(path)) == sorted(f"{who}-{n}" for who in ("one", "two") for n in range(15))


def test_threads_that_add_at_once_lose_nothing(path):
    threads = [threading.Thread(target=add_key, args=(path, f"key-{n}", "shop")) for n in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(names(path)) == sorted(f"key-{n}" for n in range(12))


def test_a_file_that_another_process_keeps_locked_is_left_alone(path, monkeypatch):
    add_key(path, "desk", "shop")
    monkeypatch.setattr(stored_keys, "LOCK_SECONDS", 0.05)
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
    answers: set[Caller | None] = set()
    refused: set[Caller | None] = set()
    ended = threading.Event()

    def ask() -> None:
        while not ended.is_set():
            answers.add(file.caller(kept))
            refused.add(file.caller(gone))

    threads = [threading.Thread(target=ask) for _ in range(3)]
    try:
        for thread in threads:
            thread.start()
        with changing(path, "for n in range(40): add_key(path, 'guest', 'bank'); revoke_key(path, 'guest')") as process:
            go(process)
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    assert answers == {Caller("kept", "shop", "use")}
    assert refused == {None}
    assert caplog.records == []
