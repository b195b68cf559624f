"""Commands of packages that are not installed, or that cannot be imported."""

from __future__ import annotations

import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import precedent
from precedent.cli import app as cli
from precedent.errors import ConfigError


def app_with(monkeypatch: pytest.MonkeyPatch, *entries: EntryPoint) -> typer.Typer:
    """A command line with the commands of these entry points alone."""
    monkeypatch.setattr(cli, "entry_points", lambda group: entries)
    app = typer.Typer()
    app.command("own")(lambda: typer.echo("works"))
    cli.add_installed(app)
    return app


@pytest.mark.parametrize(("name", "extra"), precedent.COMMANDS.items())
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
    for extra in {*precedent.COMMANDS.values(), *(extra for _, extra in precedent.PLUGINS.values())}:
        assert any(one.startswith("precedent-") for one in project["optional-dependencies"][extra]), extra
