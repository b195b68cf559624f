"""API keys: who a caller is, whatever happens to the file meanwhile."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import stat
import threading
import traceback
from pathlib import Path

import pytest
from helpers.key_processes import changing, go
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from precedent.cache.store.records import MAX_TENANT_LENGTH
from precedent.errors import ConfigError
from precedent.server import keys as keys_module
from precedent.server import stored_keys
from precedent.server.keys import ROLES, Caller, KeyFile
from precedent.server.stored_keys import add_key, digest_of, hide_keys, read_keys, revoke_key

posix_only = pytest.mark.skipif(os.name != "posix", reason="Windows has no modes")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


def names(path: Path) -> list[str]:
    return [one.name for one in read_keys(path)]


def private(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    path.chmod(0o600)
    return path


# --- adding and revoking ---------------------------------------------------------------------------------------------


def test_a_key_says_who_its_caller_is(path):
    key = add_key(path, "shop-backend", "shop", "read-cache")
    add_key(path, "desk", "bänk")
    assert KeyFile(path).caller(key) == Caller("shop-backend", "shop", "read-cache")
    assert [(one.name, one.tenant, one.role) for one in read_keys(path)] == [
        ("shop-backend", "shop", "read-cache"),
        ("desk", "bänk", "use"),
    ]


def test_keys_are_long_random_and_safe_in_a_url(path):
    made = {add_key(path, f"key-{n}", "shop") for n in range(20)}
    assert len(made) == 20
    for key in made:
        assert key.startswith("pk-")
        assert len(key) == len("pk-") + 43  # 32 bytes, six bits a character
        assert key.replace("-", "").replace("_", "").isalnum()
        assert key.isascii()


def test_only_the_digest_is_stored(path):
    key = add_key(path, "desk", "shop")
    text = path.read_text()
    assert key not in text
    assert key[3:] not in text
    assert json.loads(text)["keys"][0]["sha256"] == digest_of(key)


@pytest.mark.parametrize(
    "wrong", ["", "pk-", "desk", "Bearer {key}", "{key} ", "{key}=", "{digest}", "\ud800", "ä" * 9999]
)
def test_nothing_but_a_key_has_a_caller(path, wrong):
    key = add_key(path, "desk", "shop")
    assert KeyFile(path).caller(wrong.format(key=key, digest=digest_of(key))) is None


def test_a_key_with_one_character_changed_has_no_caller(path):
    key = add_key(path, "desk", "shop")
    file = KeyFile(path)
    changed = [key[:at] + ("a" if key[at] != "a" else "b") + key[at + 1 :] for at in range(len(key))]
    assert [one for one in (*changed, key[:-1], key + "a", key.swapcase()) if file.caller(one)] == []


def test_a_revoked_key_has_no_caller_and_its_name_is_free_again(path):
    old, kept = add_key(path, "desk", "shop"), add_key(path, "kept", "shop")
    revoke_key(path, "desk")
    new = add_key(path, "desk", "bank")
    file = KeyFile(path)
    assert file.caller(old) is None
    assert file.caller(new) == Caller("desk", "bank", "use")
    assert file.caller(kept) == Caller("kept", "shop", "use")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda path: add_key(path, "desk", "shop"), "has a key named 'desk' already"),
        (lambda path: add_key(path, "new", "shop", "boss"), "no role 'boss'; the roles are use, read-cache, admin"),
        (lambda path: add_key(path, "new", "shop", ""), "no role ''"),
        (lambda path: add_key(path, "new", ""), "tenant's name is empty"),
        (lambda path: add_key(path, "new", "a\nb"), "not printable"),
        (lambda path: add_key(path, "new", "\udc80"), "not printable"),
        (lambda path: add_key(path, "new", "a" * (MAX_TENANT_LENGTH + 1)), "at most 200"),
        (lambda path: add_key(path, "", "shop"), "cannot name a key"),
        (lambda path: add_key(path, "two words", "shop"), "cannot name a key"),
        (lambda path: add_key(path, "new\n", "shop"), "cannot name a key"),
        (lambda path: add_key(path, "-new", "shop"), "cannot name a key"),
        (lambda path: add_key(path, "n" * 65, "shop"), "cannot name a key"),
        (lambda path: revoke_key(path, "none"), "no key named 'none'"),
        (lambda path: revoke_key(path, ""), "no key named ''"),
        (lambda path: add_key(path.parent / "no" / "folder", "new", "shop"), "there is no folder"),
        (lambda path: add_key(path / "below", "new", "shop"), "there is no folder"),
        (lambda path: revoke_key(path.with_name("other"), "desk"), "there is no key file"),
        (lambda path: add_key(path.parent, "new", "shop"), "is not a file"),
        (lambda path: KeyFile(path.with_name("other")), "there is no key file"),
        (lambda path: KeyFile(path.parent), "is not a file"),
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
    assert ROLES == ("use", "read-cache", "admin")
    allowed = {role: [asked for asked in ROLES if Caller("n", "t", role).may(asked)] for role in ROLES}
    assert allowed == {"use": ["use"], "read-cache": ["use", "read-cache"], "admin": ["use", "read-cache", "admin"]}


# --- the file --------------------------------------------------------------------------------------------------------


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


ENTRY = {"name": "desk", "tenant": "shop", "role": "use", "created": "2026-01-02T03:04:05Z", "sha256": "0" * 64}


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


# --- several at once -------------------------------------------------------------------------------------------------


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


# --- the file changes under a server ---------------------------------------------------------------------------------


def test_a_change_counts_from_the_next_call_on(path):
    first = add_key(path, "first", "shop")
    file = KeyFile(path)
    second = add_key(path, "second", "bank", "admin")
    assert file.caller(second) == Caller("second", "bank", "admin")
    revoke_key(path, "first")
    assert file.caller(first) is None
    assert file.caller(second) is not None


def test_changes_that_the_file_systems_clock_cannot_tell_apart_count(path, monkeypatch):
    """The file keeps its inode, its size and, as far as a coarse clock tells, its times."""
    monkeypatch.setattr(keys_module, "_identity", lambda status: (1, 2, 3))
    key = add_key(path, "desk", "shop")
    file = KeyFile(path)
    text = path.read_text()
    for tenant in ("bank", "club", "shop"):
        path.write_text(text.replace('"shop"', f'"{tenant}"'))
        assert file.caller(key).tenant == tenant


def test_a_settled_file_is_not_read_again(path, monkeypatch):
    key = add_key(path, "desk", "shop")
    monkeypatch.setattr(keys_module, "SETTLED_SECONDS", -1.0)
    file = KeyFile(path)
    reads = []
    monkeypatch.setattr(keys_module, "read_file", lambda path: reads.append(path) or stored_keys.read_file(path))
    assert file.caller(key) is not None
    assert reads == []
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    path.write_text(path.read_text().replace('"shop"', '"bank"'))
    os.utime(path, ns=times)
    assert [file.caller(key).tenant for _ in range(3)] == ["bank"] * 3
    assert len(reads) == 1


def damages(path: Path) -> dict[str, str]:
    """Ways to make a file unusable, and what the warning says of each."""
    whole = path.read_text()
    return {
        whole[: len(whole) // 2]: "is damaged",
        "": "is damaged",
        whole.replace('"format": 1', '"format": 9'): "newer",
    }


@pytest.mark.parametrize("which", range(3))
def test_a_damaged_file_leaves_the_last_good_content_in_force_with_one_warning(path, caplog, which):
    revoked, kept = add_key(path, "revoked", "shop"), add_key(path, "kept", "shop")
    file = KeyFile(path)
    revoke_key(path, "revoked")
    assert file.caller(revoked) is None
    whole = path.read_text()
    content, says = list(damages(path).items())[which]
    path.write_text(content)
    for _ in range(3):
        assert file.caller(kept) == Caller("kept", "shop", "use")
        assert file.caller(revoked) is None
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert says in record.getMessage()
    path.write_text(whole)
    assert file.caller(kept) is not None
    path.write_text(content)
    assert file.caller(kept) is not None
    assert len(caplog.records) == 2  # a new damage is told anew


@posix_only
def test_a_file_made_public_or_a_folder_leaves_the_last_good_content_in_force(path, caplog):
    key = add_key(path, "desk", "shop")
    file = KeyFile(path)
    path.chmod(0o644)
    assert file.caller(key) is not None
    path.unlink()
    path.mkdir()
    assert file.caller(key) is not None
    assert [
        part in record.getMessage() for part, record in zip(("chmod 600", "is not a file"), caplog.records, strict=True)
    ]


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_leaves_the_last_good_content_in_force(path, caplog):
    key = add_key(path, "desk", "shop")
    file = KeyFile(path)
    path.chmod(0)
    assert file.caller(key) is not None
    assert len(caplog.records) == 1


def test_a_deleted_file_means_no_keys_also_when_it_comes_back_damaged(path, caplog):
    key = add_key(path, "desk", "shop")
    file = KeyFile(path)
    whole = path.read_bytes()
    path.unlink()
    assert [file.caller(key) for _ in range(2)] == [None, None]
    assert len(caplog.records) == 1
    private(path, whole[:-5])
    assert file.caller(key) is None
    private(path, whole)
    assert file.caller(key) == Caller("desk", "shop", "use")


# --- nothing shows a key ---------------------------------------------------------------------------------------------


def shown_by(error: BaseException) -> str:
    """Everything that a log could show of an error: texts, representations, and the errors behind it."""
    texts = ["".join(traceback.format_exception(error))]
    pending: list[BaseException | None] = [error]
    while pending:
        found = pending.pop()
        if found is not None:
            texts += [str(found), repr(found), repr(found.args), repr(vars(found))]
            pending += [found.__cause__, found.__context__]
    return "\n".join(texts)


KEY = "pk-" + "Secret_Key-of_43-characters-0123456789abcde"


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
    for use in (KeyFile, lambda file: add_key(file, "new", "shop"), lambda file: revoke_key(file, "desk")):
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


def test_no_representation_shows_a_key_or_its_digest(path):
    key = add_key(path, "desk", "shop")
    file = KeyFile(path)
    shown = repr([file, file.caller(key), read_keys(path)]) + str(file.caller(key)) + str(read_keys(path)[0])
    assert "desk" in shown
    assert key not in shown
    assert digest_of(key) not in shown


def test_hiding_leaves_other_texts_as_they_are():
    assert hide_keys(f"a {KEY}, b {KEY[:-4]}") == "a pk-…, b pk-…"
    assert hide_keys("pk-production and apk-files") == "pk-production and apk-files"
