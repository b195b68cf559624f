"""`precedent cache`: results on stdout, JSON on request, exit 2 and one line on bad input, and how it fills caches."""

from __future__ import annotations

import contextlib
import gzip
import json
import logging
import sqlite3
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from helpers.cache_commands import run, run_json

from precedent.cache import Completion, SpeculationCache, SQLiteStore
from precedent_testing.embedders import HashEmbedder
from precedent_testing.tiny_models import byte_tokenizer


def test_stats_count_in_all_and_by_tenant(folder, tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        result = run("stats", folder)
    assert (result.exit_code, caplog.records) == (0, [])
    assert [file.name for file in folder.iterdir()] == ["precedent.sqlite"], "looking leaves no side files"
    assert "2 completions, 5 tokens" in result.stdout
    assert "'hash'" in result.stdout
    value = run_json(tmp_path, "stats", folder)
    assert (value["records"], value["tokens"], value["embedder"]["dimension"]) == (2, 5, 64)
    shares = {one["tenant"]: (one["records"], one["accepted"], one["rejected"]) for one in value["tenants"]}
    assert shares == {"shop": (1, 2, 1), "bank": (1, 0, 0)}


def test_list_is_newest_first_and_by_tenant(folder, tmp_path):
    assert [one["tenant"] for one in run_json(tmp_path, "list", folder)["completions"]] == ["bank", "shop"]
    assert [one["id"] for one in run_json(tmp_path, "list", folder, "--limit", 1)["completions"]] == [2]
    (only,) = run_json(tmp_path, "list", folder, "--tenant", "shop")["completions"]
    assert (only["token_ids"], only["query"], only["hits"]) == ([1, 2, 3], "refund please", 1)
    stdout = run("list", folder).stdout
    assert "Your refund is on its way" in stdout
    assert "[bold]42[/bold] euros" in stdout
    assert "\x1b" not in stdout, "what a model wrote cannot steer the terminal"


def test_search_finds_text_and_query_without_regard_to_case(folder, tmp_path):
    assert [one["id"] for one in run_json(tmp_path, "search", folder, "REFUND")["completions"]] == [1]
    assert [one["id"] for one in run_json(tmp_path, "search", folder, "balance")["completions"]] == [2]
    assert run_json(tmp_path, "search", folder, "refund", "--tenant", "bank")["completions"] == []
    assert run("search", folder, "nothing like it").exit_code == 0
    with SpeculationCache.open(tmp_path / "long", embedder=HashEmbedder()) as cache:
        cache.insert(Completion((1,), "tok", "model", query="none", text="words " * 60 + "Zyzzogeton at the end"))
    assert "…words words Zyzzogeton at" in run("search", tmp_path / "long", "zyzzogeton", columns=80).stdout


def test_forget_erases_what_is_selected_and_nothing_else(folder, tmp_path):
    assert run_json(tmp_path, "forget", folder, "--tenant", "bank", "--containing", "refund") == {"forgotten": 0}
    assert run_json(tmp_path, "forget", folder, "--before", "2001-01-01") == {"forgotten": 0}
    assert run_json(tmp_path, "forget", folder, "--id", 1, "--id", 77) == {"forgotten": 1}
    assert run_json(tmp_path, "stats", folder)["records"] == 1
    assert "1 completion forgotten" in run("forget", folder, "--all").stdout
    assert run_json(tmp_path, "stats", folder)["records"] == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["forget", "{cache}"], "--containing, --id, or --all"),
        (["forget", "{cache}", "--before", "yesterday"], "'yesterday' is not a date"),
        (["forget", "{cache}", "--all", "--tenant", "shop"], "--all cannot be combined with conditions"),
        (["search", "{cache}", ""], "containing is empty"),
        (["stats", "{tmp}/notes.db"], "is not a cache"),
        (["show", "{cache}", "7"], "there is no completion 7"),
        (["export", "{cache}", "{tmp}"], "is not empty"),
        (["import", "{tmp}/none", "{tmp}"], "is not a finished export"),
    ],
)
def test_bad_input_gives_one_line_and_exit_2_and_harms_nothing(folder, tmp_path, arguments, says):
    (tmp_path / "notes.db").write_text("my notes")
    before = (folder / "precedent.sqlite").read_bytes()
    result = run(*(one.format(cache=folder, tmp=tmp_path) for one in arguments))
    assert result.exit_code == 2
    assert says in result.stderr
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""
    assert (folder / "precedent.sqlite").read_bytes() == before
    assert (tmp_path / "notes.db").read_text() == "my notes"
    assert not (tmp_path / "none").exists()


def test_a_list_is_one_line_each_in_80_columns(tmp_path):
    with SpeculationCache.open(tmp_path, embedder=HashEmbedder()) as cache:
        for n in range(3):
            text = f"answer {n}: " + "your refund of 1042 is on its way and will take some days " * 4
            row_id = cache.insert(Completion((n,) * 1234, "tok", "model", "tenant-" * 20, "query " * 99, text=text))
            cache.credit({row_id: (98765, 4321)})
    shown = [line for line in run("list", tmp_path, columns=80).stdout.splitlines() if line.strip()]
    assert max(map(len, shown)) <= 80
    header, _, *lines, count = shown
    assert header.split() == ["id", "stored", "tenant", "tokens", "accepted", "text"]
    assert [line.split()[0] for line in lines] == ["3", "2", "1"]
    assert all("tenant-tena…" in line and "98765/103086" in line for line in lines)
    assert [line.partition("answer ")[2][:3] for line in lines] == ["2: ", "1: ", "0: "]
    assert all(line.rstrip().endswith("…") for line in lines)
    assert count == "3 completions"


def test_show_has_all_of_a_completion(folder):
    shown = run("show", folder, 1, columns=80).stdout
    for part in ("completion 1", "shop", "refund please", "Your refund is on its way", "2 tokens accepted, 1 rejected"):
        assert part in shown
    assert "query: what recall compares, not the prompt" in " ".join(shown.split())
    assert "\x1b" not in run("show", folder, 2).stdout


def test_verify_finds_a_damaged_record_and_says_what_to_do(folder, tmp_path):
    with contextlib.closing(sqlite3.connect(folder / "precedent.sqlite")) as connection, connection:
        connection.execute("UPDATE completion SET text = 'changed' WHERE id = 1")
    result = run("verify", folder, "--json", tmp_path / "found.json")
    assert result.exit_code == 1
    assert "record 1 is damaged" in result.stdout
    assert "forget them by --id" in result.stdout
    found = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    assert (found["sound"], found["findings"][0]["ids"]) == (False, [1])
    assert run("forget", folder, "--id", 1).exit_code == 0
    assert run_json(tmp_path, "verify", folder)["records"] == 1


def test_looking_at_a_damaged_file_changes_nothing_and_says_what_to_do(folder, tmp_path):
    file = folder / "precedent.sqlite"
    file.write_bytes(file.read_bytes()[:5000])
    before = file.read_bytes()
    for command in (["stats", folder], ["list", folder], ["forget", folder, "--all"]):
        result = run(*command)
        assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
        assert f"sqlite3 {file} .recover" in result.stderr
    result = run("verify", folder)
    assert (result.exit_code, "structure: " in result.stdout, ".recover" in result.stdout) == (1, True, True)
    assert file.read_bytes() == before
    assert [path.name for path in folder.iterdir()] == ["precedent.sqlite"]


def test_a_url_that_nobody_opens_is_refused_by_name(monkeypatch):
    monkeypatch.setattr("precedent.cache.store.entry_points", lambda **_: ())
    for scheme, advice in (
        ("postgresql", "pip install precedent-postgres"),
        ("redis", "install the package that opens"),
    ):
        result = run("stats", f"{scheme}://host/database")
        assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
        assert f"{scheme}://" in result.stderr
        assert advice in result.stderr


# A cache


@pytest.fixture
def folder(tmp_path):
    with SpeculationCache.open(tmp_path / "cache", embedder=HashEmbedder()) as cache:
        first = cache.insert(
            Completion((1, 2, 3), "tok", "model", "shop", "refund please", text="Your refund is on its way")
        )
        cache.insert(Completion((4, 5), "tok", "model", "bank", "balance?", text="\x1b[31m[bold]42[/bold] euros"))
        cache.credit({first: (2, 1)})
    return tmp_path / "cache"


# Filling


def test_an_export_comes_back_in_another_folder(folder, tmp_path):
    assert run("export", folder, tmp_path / "out", "--tenant", "shop").stdout.startswith("1 completion exported")
    assert "1 completion imported, 0 already present" in run("import", tmp_path / "other", tmp_path / "out").stdout
    assert "0 completions imported, 1 already present" in run("import", tmp_path / "other", tmp_path / "out").stdout
    (only,) = run_json(tmp_path, "list", tmp_path / "other")["completions"]
    (same,) = run_json(tmp_path, "list", folder, "--tenant", "shop")["completions"]
    assert only == same


def test_filling_a_cache_evicts_nothing(folder, tmp_path, monkeypatch):
    asked = []

    def opening(where, **settings):
        asked.append(settings["bounds"].max_bytes)
        return SQLiteStore.open(where, **settings)

    run("export", folder, tmp_path / "out")
    monkeypatch.setattr("precedent.cli.cache.open_store", opening)
    assert run("import", tmp_path / "other", tmp_path / "out").exit_code == 0
    assert asked == [2**62]


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
