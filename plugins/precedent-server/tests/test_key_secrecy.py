"""No error, log line or representation shows a key, wherever somebody has put it."""

from __future__ import annotations

import json
import traceback

import pytest
from helpers.key_files import ENTRY, KEY, private
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from precedent.errors import ConfigError
from precedent_server.keys import Caller, KeyFile
from precedent_server.stored_keys import add_key, digest_of, hide_keys, read_keys, revoke_key


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
