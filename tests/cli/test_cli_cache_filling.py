"""`precedent cache` fills caches: what it imports, warms with and redacts, without evicting anything."""

from __future__ import annotations

import gzip
import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from helpers.cache_commands import run, run_json

from precedent.cache import Completion
from precedent_testing.embedders import HashEmbedder
from precedent_testing.tiny_models import byte_tokenizer


def test_an_export_comes_back_in_another_folder(folder, tmp_path):
    assert run("export", folder, tmp_path / "out", "--tenant", "shop").stdout.startswith("1 completion exported")
    assert "1 completion imported, 0 already present" in run("import", tmp_path / "other", tmp_path / "out").stdout
    assert "0 completions imported, 1 already present" in run("import", tmp_path / "other", tmp_path / "out").stdout
    (only,) = run_json(tmp_path, "list", tmp_path / "other")["completions"]
    (same,) = run_json(tmp_path, "list", folder, "--tenant", "shop")["completions"]
    assert only == same


@pytest.fixture
def model(monkeypatch):
    """A model and an embedder that need no download."""
    monkeypatch.setattr("precedent.target.load.loading.load_tokenizer", lambda name, template=None: byte_tokenizer())
    monkeypatch.setattr("precedent.cache.filling.resolve", lambda chosen: HashEmbedder())


def test_warm_fills_a_new_cache_says_what_it_skipped_and_goes_on(tmp_path, model):
    chat = {"messages": [{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Good day."}]}
    empty = {"messages": [{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": ""}]}
    log = tmp_path / "log.jsonl"
    log.write_text(f"{json.dumps(chat)}\nno json\n{json.dumps(empty)}\n", encoding="utf-8")
    (tmp_path / "log.jsonl.gz").write_bytes(gzip.compress(log.read_bytes()))
    found = run_json(tmp_path, "warm", tmp_path / "cache", log, log.with_suffix(".jsonl.gz"), "--tenant", "shop")
    counts = {"read": 4, "stored": 1, "known": 1, "refused": 0}
    assert {name: found[name] for name in counts} == counts
    assert {(one["reason"], one["count"]) for one in found["skipped"]} == {
        ("is not JSON", 2),
        ("an answer without text or tool calls", 2),
    }
    assert set(found["skipped"][0]) == {"reason", "count", "first"}
    (stored,) = run_json(tmp_path, "list", tmp_path / "cache")["completions"]
    assert (stored["tenant"], stored["text"]) == ("shop", "Good day.")
    shown = run("warm", tmp_path / "cache", log, "--tenant", "shop").stdout
    assert "0 completions stored, 1 already present" in shown
    assert f"1 skipped: is not JSON (first: {log} line 2 is not JSON" in shown


def test_an_import_for_another_model_writes_the_texts_anew(folder, tmp_path, model):
    run("export", folder, tmp_path / "out")
    found = run_json(tmp_path, "import", tmp_path / "new", tmp_path / "out", "--target", "other")
    assert (found["read"], found["rewritten"], found["stored"], found["skipped"]) == (2, 2, 2, [])
    (shop,) = run_json(tmp_path, "list", tmp_path / "new", "--tenant", "shop")["completions"]
    assert byte_tokenizer().decode(shop["token_ids"][:-1]) == shop["text"] == "Your refund is on its way"


def cleaned(completion: Completion) -> Completion | None:
    """A program's own redaction: no balances, no names."""
    if "balance" in completion.query:
        return None
    return replace(completion, text="[cut]", query="[cut]", token_ids=(7,))


def test_what_fills_a_cache_takes_a_redaction(folder, tmp_path, model, monkeypatch):
    """By pattern, and by the function that a program gives its cache: nothing of what it cuts comes in."""
    run("export", folder, tmp_path / "out")
    found = run_json(tmp_path, "import", tmp_path / "by-pattern", tmp_path / "out", "--never-store", "(?i)EUROS")
    assert (found["stored"], found["withheld"]) == (1, 1)
    monkeypatch.setitem(sys.modules, "shop_redaction", SimpleNamespace(cleaned=cleaned, words=("a",)))
    found = run_json(tmp_path, "import", tmp_path / "new", tmp_path / "out", "--redact", "shop_redaction:cleaned")
    (only,) = run_json(tmp_path, "list", tmp_path / "new")["completions"]
    assert (only["text"], only["query"], only["token_ids"]) == ("[cut]", "[cut]", [7])
    assert "refund" not in "".join(path.read_bytes().decode("latin-1") for path in (tmp_path / "new").glob("*"))
    chat = {"messages": [{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Your card 4111."}]}
    (tmp_path / "log.jsonl").write_text(json.dumps(chat), encoding="utf-8")
    shown = run("warm", tmp_path / "warmed", tmp_path / "log.jsonl", "--never-store", r"\b\d{4}\b").stdout
    assert "0 completions stored" in shown
    assert "1 withheld by redaction" in shown


@pytest.mark.parametrize("name", ["no_such_module:x", "shop_redaction:none", "shop_redaction", "shop_redaction:words"])
def test_a_redaction_that_is_none_is_refused_before_anything_is_stored(folder, tmp_path, name, monkeypatch):
    monkeypatch.setitem(sys.modules, "shop_redaction", SimpleNamespace(words=("a",)))
    run("export", folder, tmp_path / "out")
    result = run("import", tmp_path / "new", tmp_path / "out", "--redact", name)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert f"--redact {name}" in result.stderr
    assert not (tmp_path / "new").exists()
