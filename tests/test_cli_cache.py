"""`precedent cache stats|list|search|forget`: results on stdout, JSON on request, exit 2 and one line on bad input."""

from __future__ import annotations

import io
import json
import logging
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass

import pytest

from precedent.cache import NewCompletion, SpeculationCache
from precedent.cli.app import main
from precedent.testing.embedders import HashEmbedder


@pytest.fixture
def folder(tmp_path):
    with SpeculationCache.open(tmp_path / "cache", embedder=HashEmbedder()) as cache:
        first = cache.insert(
            NewCompletion((1, 2, 3), "tok", "model", "shop", "refund please", text="Your refund is on its way")
        )
        cache.insert(NewCompletion((4, 5), "tok", "model", "bank", "balance?", text="\x1b[31m[bold]42[/bold] euros"))
        cache.credit({first: (2, 1)})
    return tmp_path / "cache"


@dataclass
class Result:
    """What a command left behind."""

    exit_code: int
    stdout: str
    stderr: str


def run(*arguments: object, columns: int = 200) -> Result:
    """Run `precedent cache` as the command line does, in this process."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["precedent", "cache", *map(str, arguments)])
        patch.setenv("COLUMNS", str(columns))
        patch.setenv("TERM", "dumb")
        with pytest.raises(SystemExit) as ended:
            main()
    return Result(int(ended.value.code or 0), out.getvalue(), err.getvalue())


def run_json(tmp_path, *arguments: object) -> dict:
    result = run(*arguments, "--json", tmp_path / "result.json")
    assert result.exit_code == 0, result.stderr
    return json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))


def test_stats_count_in_all_and_by_tenant(folder, tmp_path):
    result = run("stats", folder)
    assert result.exit_code == 0
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
    assert "Your refund is on its way" in run("list", folder).stdout


def test_what_a_model_wrote_cannot_steer_the_terminal(folder):
    stdout = run("list", folder).stdout
    assert "\x1b" not in stdout
    assert "[bold]42[/bold] euros" in stdout


def test_search_finds_text_and_query_without_regard_to_case(folder, tmp_path):
    assert [one["id"] for one in run_json(tmp_path, "search", folder, "REFUND")["completions"]] == [1]
    assert [one["id"] for one in run_json(tmp_path, "search", folder, "balance")["completions"]] == [2]
    assert run_json(tmp_path, "search", folder, "refund", "--tenant", "bank")["completions"] == []
    assert run("search", folder, "nothing like it").exit_code == 0


def test_forget_erases_what_is_selected_and_nothing_else(folder, tmp_path):
    assert run_json(tmp_path, "forget", folder, "--tenant", "bank", "--containing", "refund") == {"forgotten": 0}
    assert run_json(tmp_path, "forget", folder, "--before", "2001-01-01") == {"forgotten": 0}
    assert run_json(tmp_path, "forget", folder, "--id", 1, "--id", 77) == {"forgotten": 1}
    assert run_json(tmp_path, "stats", folder)["records"] == 1
    assert "1 completions forgotten" in run("forget", folder, "--all").stdout
    assert run_json(tmp_path, "stats", folder)["records"] == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["forget", "{cache}"], "--containing, --id, or --all"),
        (["forget", "{cache}", "--before", "yesterday"], "'yesterday' is no date"),
        (["forget", "{cache}", "--all", "--tenant", "shop"], "--all stands alone"),
        (["forget", "{cache}", "--tenant", ""], "tenant's name is empty"),
        (["search", "{cache}", ""], "containing is empty"),
        (["stats", "{tmp}/none"], "there is no cache"),
        (["stats", "{tmp}/notes.db"], "is not a cache"),
        (["stats", "{cache}", "--json", "{tmp}/no/such/folder.json"], "there is no folder"),
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


def test_a_list_fits_80_columns_and_keeps_its_words_whole(folder):
    shown = run("list", folder, columns=80).stdout
    assert max(map(len, shown.splitlines())) <= 80
    header, _, _, _, first, second, count = [line for line in shown.splitlines() if line.strip()]
    assert header.split() == ["id", "stored", "tenant", "tokens", "accepted", "query", "→", "text"]
    assert first.split()[0::3] == ["1", "shop", "refund", "Your"]
    assert first.split()[4:6] == ["3", "2/3"]
    assert first[47:].strip() == "refund please → Your refund is"
    assert second.strip() == "on its way"
    assert count == "2 completions"


def test_a_file_that_cannot_be_written_is_one_line_as_well(folder, tmp_path):
    result = run("stats", folder, "--json", tmp_path)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)


@pytest.mark.parametrize("command", ["stats", "list", "search", "forget"])
def test_help_shows_an_example(command):
    result = run(command, "--help")
    assert result.exit_code == 0
    assert f"precedent cache {command} " in " ".join(result.stdout.split())


def test_looking_leaves_no_side_files_and_logs_nothing(folder, caplog):
    with caplog.at_level(logging.WARNING):
        for command in (["stats", folder], ["list", folder], ["search", folder, "refund"]):
            assert run(*command).exit_code == 0
    assert [file.name for file in folder.iterdir()] == ["precedent.sqlite"]
    assert caplog.records == []
