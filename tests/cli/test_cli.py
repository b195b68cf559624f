"""The command line as a user meets it: help, answers on stdout, one clear line and a status when something is wrong."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
import typer
from helpers.command_line import precedent
from helpers.saved_models import saved
from helpers.small_engines import load_by
from rich.text import Text
from typer.testing import CliRunner

from precedent import COMMANDS as EXTRAS
from precedent import PLUGINS, __version__
from precedent.cli import app as cli
from precedent.cli.options import DEFAULT_TARGET
from precedent.errors import ConfigError, ModelLoadError
from precedent.target.load.loading import DEMO_TARGET
from precedent_testing.embedders import HashEmbedder
from precedent_testing.tiny_models import tiny_causal_lm

COMMANDS, GROUPS = ("demo", "run", "bench", "doctor", "models", "cache", "keys"), ("cache", "keys")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a tiny chat model."""
    return str(saved(tmp_path_factory.mktemp("model"), tiny_causal_lm(dtype=torch.float32, scale=2.0)))


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert precedent(command, "--help") == 0
    shown = capsys.readouterr().out
    assert f"precedent {command}" in (shown if command in GROUPS else shown.rpartition("Example:")[2])


@pytest.mark.parametrize(
    "command",
    ["demo", "run", "serve", "bench", "doctor", "cache warm", "train-draft", "measure-draft", "train-judge"],
)
def test_every_command_that_renders_conversations_takes_a_chat_template(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert precedent(*command.split(), "--chat-template") == 2
    assert "requires an argument" in capsys.readouterr().err


def test_run_asks_in_the_given_template(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lengths = []
    for template in ("{{ messages[0].content }}", "{{ messages[0].content }}!!!"):
        report = tmp_path / "report.json"
        options = ("--chat-template", template, "--max-tokens", 2, "--json", report)
        assert precedent("run", "hi", "--target", model, *options) == 0
        lengths.append(json.loads(report.read_text())["prompt_tokens"])
    assert lengths == [2, 5]


def test_a_stream_whose_encoding_lacks_a_character_gets_a_question_mark() -> None:
    """As files on Windows, whose encoding is not UTF-8."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    with contextlib.redirect_stdout(out):
        assert precedent("--version") == 0
        print("■")
    out.seek(0)
    assert out.read() == f"precedent {__version__}\n?\n"


def test_help_comes_without_loading_torch() -> None:
    script = "import sys, precedent.cli.app; print(sorted({'torch', 'transformers', 'faiss'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert precedent("--version") == 0
    assert capsys.readouterr().out == f"precedent {__version__}\n"


def test_the_default_target_is_the_packaged_one() -> None:
    assert DEFAULT_TARGET == DEMO_TARGET


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [(ModelLoadError("first\n  second"), 2, "error: first second\n"), (KeyboardInterrupt(), 130, "")],
    ids=["an error of several lines", "Ctrl-C"],
)
def test_errors_are_one_line_and_a_status(
    error: BaseException, status: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*args: object, **settings: object) -> None:
        raise error

    load_by(monkeypatch, fail)
    assert precedent("run", "x") == status
    assert capsys.readouterr().err.endswith(said)


def test_show_sources_colours_the_same_text_and_adds_a_legend(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    plain = ("run", "abcabcabc", "--target", model, "--max-tokens", "40")
    precedent(*plain)
    text = capsys.readouterr().out
    precedent(*plain, "--show-sources")
    shown = capsys.readouterr()
    assert "\x1b[" in shown.out
    assert Text.from_ansi(shown.out).plain.split() == Text.from_ansi(text).plain.split()
    assert "tokens by source:" in shown.err
    assert "■ target" in shown.err


@pytest.mark.usefixtures("searches_at_once")
def test_the_answer_is_stored_in_the_cache_and_recalled(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second of two equal requests is drafted from the first one's answer, through a cache on disk."""
    monkeypatch.setattr("precedent.cache.speculation_cache.resolve", lambda embedder: HashEmbedder())
    results, asked = tmp_path / "out.json", ("run", "tell me", "--target", model, "--max-tokens", "40")
    accepted = []
    for _ in range(2):
        precedent(*asked, "--cache", str(tmp_path / "cache"), "--json", str(results))
        accepted.append(json.loads(results.read_text(encoding="utf-8"))["speculation"]["accepted_by_source"])
    assert "recall" not in accepted[0]
    assert accepted[1]["recall"] > 0


# Commands of packages that are not installed, or that cannot be imported


def app_with(monkeypatch: pytest.MonkeyPatch, *entries: EntryPoint) -> typer.Typer:
    """A command line with the commands of these entry points alone."""
    monkeypatch.setattr(cli, "entry_points", lambda group: entries)
    app = typer.Typer()
    app.command("own")(lambda: typer.echo("works"))
    cli.add_installed(app)
    return app


@pytest.mark.parametrize(("name", "extra"), EXTRAS.items())
def test_a_command_that_is_not_installed_says_which_package_brings_it(
    name: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = CliRunner().invoke(app_with(monkeypatch), [name, "--port", "8001"])
    assert isinstance(found.exception, ConfigError)
    assert f"precedent-llm[{extra}]" in str(found.exception)


def test_a_package_that_cannot_be_imported_leaves_the_other_commands(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = EntryPoint("serve", "no_such_package:commands", cli.GROUP)
    assert CliRunner().invoke(app_with(monkeypatch, broken), ["own"]).stdout == "works\n"
    assert "serve" in caplog.text


def test_every_extra_that_is_named_exists_and_brings_a_package_of_ours() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for extra in {*EXTRAS.values(), *(extra for _, extra in PLUGINS.values())}:
        assert any(one.startswith("precedent-") for one in project["optional-dependencies"][extra]), extra
