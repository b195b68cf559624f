"""API keys: who a caller is, whatever happens to the file meanwhile."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest
from helpers.key_files import posix_only, private

from precedent.cache.records import MAX_TENANT_LENGTH
from precedent.errors import ConfigError
from precedent_server import keys as keys_module
from precedent_server import stored_keys
from precedent_server.keys import ROLES, Caller, KeyFile
from precedent_server.stored_keys import add_key, digest_of, read_keys, revoke_key


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
    monkeypatch.setattr(keys_module, "content_of", lambda path: reads.append(path) or stored_keys.content_of(path))
    assert file.caller(key) is not None
    assert reads == []
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    path.write_text(path.read_text().replace('"shop"', '"bank"'))
    os.utime(path, ns=times)
    assert [file.caller(key).tenant for _ in range(3)] == ["bank"] * 3
    assert len(reads) == 1


def test_a_file_is_read_again_when_asked_though_it_looks_the_same(path, monkeypatch):
    key = add_key(path, "desk", "shop")
    monkeypatch.setattr(keys_module, "SETTLED_SECONDS", -1.0)
    monkeypatch.setattr(keys_module, "_identity", lambda status: (0,))
    file = KeyFile(path)
    path.write_text(path.read_text().replace('"shop"', '"bank"'))
    assert file.caller(key).tenant == "shop"
    file.read_again()
    assert file.caller(key).tenant == "bank"


def test_a_fresh_file_is_read_again_but_not_parsed_again(path, monkeypatch):
    key = add_key(path, "desk", "shop")
    monkeypatch.setattr(keys_module, "SETTLED_SECONDS", float("inf"))
    file = KeyFile(path)
    monkeypatch.delattr(keys_module, "parsed")
    assert [file.caller(key).tenant for _ in range(3)] == ["shop"] * 3


def test_a_warning_comes_again_after_the_very_same_file_came_back(path, caplog):
    key = add_key(path, "desk", "shop")
    file = KeyFile(path)
    for times in (1, 2):
        path.rename(path.with_name("elsewhere"))
        private(path, "damaged")
        assert file.caller(key) is not None
        path.with_name("elsewhere").replace(path)
        assert file.caller(key) is not None
        assert len(caplog.records) == times


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
def test_a_file_that_cannot_be_used_leaves_the_last_good_content_in_force(path, caplog):
    key = add_key(path, "desk", "shop")
    file = KeyFile(path)
    path.chmod(0o644)
    assert file.caller(key) is not None
    path.unlink()
    path.mkdir()
    assert file.caller(key) is not None
    path.rmdir()
    path.symlink_to(path)  # nobody can read a ring of links, not even root
    assert file.caller(key) is not None
    says = ("run: chmod 600", "is not a file", "cannot be read")
    assert [part in record.getMessage() for part, record in zip(says, caplog.records, strict=True)] == [True] * 3


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
