"""`precedent`: registers the commands and turns errors into one line and an exit status."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import entry_points
from io import TextIOWrapper
from typing import Annotated, NoReturn

import typer

from precedent import COMMANDS, __version__
from precedent.cache.store_url import hide_secrets
from precedent.cli.cache import app as cache_app
from precedent.cli.doctor import doctor
from precedent.cli.progress import Progress
from precedent.cli.run import run
from precedent.errors import ConfigError, PrecedentError
from precedent.runtime.plain_values import hide_keys

BAD_INPUT = 2
"""Exit status for bad usage and bad input; 0 is success, 130 is Ctrl-C."""

GROUP = "precedent.commands"
"""An entry point names a `typer.Typer`; its commands join those of `precedent`, a named one as a group of its own."""

_log = logging.getLogger(__name__)

app = typer.Typer(
    name="precedent",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"precedent {__version__}")
        raise typer.Exit


@app.callback(epilog="Start with: precedent demo")
def _precedent(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Lossless speculative decoding for agents, drafted from a semantic cache of earlier completions."""
    ctx.obj = ctx.with_resource(Progress())


def add_installed(app: typer.Typer) -> None:
    """Add the commands of installed packages, then for each missing one a command that says which package brings it.

    A package whose commands cannot be imported is reported and left out, so that the others work.
    """
    found = {entry.name: entry for entry in entry_points(group=GROUP)}
    for name, entry in sorted(found.items()):
        try:
            app.add_typer(entry.load())
        except Exception as error:
            _log.warning("the command %s of %s is left out: %s", name, entry.value, error)
    for name, extra in COMMANDS.items():
        if name not in found:
            app.command(name, hidden=True, context_settings={"ignore_unknown_options": True})(_missing(name, extra))


def _missing(name: str, extra: str) -> Callable[..., None]:
    def command(arguments: Annotated[list[str] | None, typer.Argument(hidden=True)] = None) -> None:
        raise ConfigError(f"`precedent {name}` is not installed: pip install 'precedent-llm[{extra}]'")

    return command


app.command(epilog='Example: precedent run "Name three rivers." --draft-model first-layers:4 --show-sources')(run)
app.command(epilog="Example: precedent doctor Qwen/Qwen3-8B --draft-model Qwen/Qwen3-0.6B")(doctor)
app.add_typer(cache_app, name="cache")
add_installed(app)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; the entry point of `precedent`. Bad usage or input prints a line on stderr and exits 2.

    `arguments` are those after the program's name; by default those of the process.
    """
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # the commands show their own progress
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # Windows writes files in encodings that lack what models say
            with suppress(OSError):  # a file that was replaced by a pipe cannot be told its place
                stream.reconfigure(errors="replace")
    try:
        status = app(arguments, prog_name="precedent", standalone_mode=False)
    except (PrecedentError, typer.TyperException, OSError) as error:
        _refuse(error)
    raise SystemExit(status if isinstance(status, int) else 0)  # typer returns the status of an Exit


def _refuse(error: PrecedentError | typer.TyperException | OSError) -> NoReturn:
    text = error.format_message() if isinstance(error, typer.TyperException) else str(error)
    text = hide_keys(hide_secrets(" ".join(text.split()).rstrip(".")))
    context = getattr(error, "ctx", None)
    hint = f" (see {context.command_path} --help)" if context else ""
    if text:  # empty when no command was given and typer has shown the help instead
        typer.echo(f"error: {text}{hint}", err=True)
    raise SystemExit(BAD_INPUT)
