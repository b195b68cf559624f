"""`precedent keys`: the key alone on stdout, once; exit 2 and one line on bad input, without any key in it."""

from __future__ import annotations

import json

import pytest
from helpers.command_line import precedent
from helpers.key_files import KEY

from precedent_server.keys import Caller, KeyFile


@pytest.fixture
def keys(tmp_path, capsys, monkeypatch):
    """Runs `precedent keys` on one file; returns status, stdout and stderr."""
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", "dumb")

    def run(*arguments: object) -> tuple[int, str, str]:
        status = precedent("keys", *arguments, "--file", tmp_path / "keys.json")
        return status, *capsys.readouterr()

    return run


def test_add_prints_the_key_alone_on_stdout(keys, tmp_path):
    status, out, err = keys("add", "desk", "--tenant", "shop", "--role", "admin")
    assert status == 0
    key = out.removesuffix("\n")
    assert key.split() == [key]
    assert "desk" in err
    assert "cannot be shown again" in err
    assert key not in err
    assert KeyFile(tmp_path / "keys.json").caller(key) == Caller("desk", "shop", "admin")


def test_list_shows_everything_but_the_keys(keys, tmp_path):
    made = [keys("add", name, "--tenant", tenant)[1].strip() for name, tenant in (("desk", "[red]ä"), ("bot", "bank"))]
    status, out, err = keys("list", "--json", tmp_path / "out.json")
    assert (status, err) == (0, "")
    for part in ("desk", "[red]ä", "bot", "bank", "use", "2 keys"):
        assert part in out
    text = (tmp_path / "out.json").read_text(encoding="utf-8")
    listed = json.loads(text)["keys"]
    assert [(one["name"], one["tenant"], one["role"]) for one in listed] == [
        ("desk", "[red]ä", "use"),
        ("bot", "bank", "use"),
    ]
    assert all(one.keys() == {"name", "tenant", "role", "created"} for one in listed)
    assert [key for key in made if key in out or key in text] == []


def test_revoke_deletes_the_key(keys, tmp_path):
    key = keys("add", "desk", "--tenant", "shop")[1].strip()
    status, out, _ = keys("revoke", "desk", "--json", tmp_path / "out.json")
    assert (status, out) == (0, "desk revoked\n")
    assert json.loads((tmp_path / "out.json").read_text()) == {"revoked": "desk"}
    assert KeyFile(tmp_path / "keys.json").caller(key) is None
    assert "0 keys" in keys("list")[1]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["add", "desk", "--tenant", "shop"], "has a key named 'desk' already"),
        (["add", "new", "--tenant", ""], "tenant's name is empty"),
        (["add", "new"], "Missing option '--tenant'"),
        (["add", "new", "--tenant", "shop", "--role", "boss"], "the roles are use, read-cache, admin"),
        (["add", "new", "--tenant", KEY], "holds an API key"),
        (["add", "new", KEY, "--tenant", "shop"], "unexpected extra argument"),
        (["add", "new", "--tenant", "shop", "--role", KEY], "there is no role"),
        (["add", "new", "--tenant", "shop", "--" + KEY], "No such option"),
        (["revoke", "none"], "no key named 'none'"),
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
