"""`precedent keys add|list|revoke`: makes, lists and deletes the API keys of a server. Needs no model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from precedent.cli.options import JsonOption, printable, write_json

app = typer.Typer(name="keys", help="Make, list and revoke the API keys of a server.", no_args_is_help=True)

NameArgument = Annotated[
    str, typer.Argument(metavar="NAME", help="The key's name, as the access log shows it.", show_default=False)
]
FileOption = Annotated[Path, typer.Option("--file", help="The file of API keys.", show_default=False)]


@app.command(epilog="Example:  precedent keys add shop-backend --file keys.json --tenant shop")
def add(
    name: NameArgument,
    file: FileOption,
    tenant: Annotated[
        str, typer.Option("--tenant", help="Whose completions the key's requests use.", show_default=False)
    ],
    role: Annotated[
        str,
        typer.Option(
            "--role",
            metavar="[use|read-cache|admin]",
            help="What the key allows: use the models, also read the tenant's cache, also administer.",
        ),
    ] = "use",
    requests_per_minute: Annotated[
        int | None, typer.Option(help="Requests that the key may make in a minute. Default: the server's limit.")
    ] = None,
    tokens_per_minute: Annotated[
        int | None, typer.Option(help="Tokens of prompts and answers in a minute. Default: the server's limit.")
    ] = None,
) -> None:
    """Make a key and print it, alone on standard output and only this once. Makes FILE if there is none."""
    from precedent_server.keys import add_key

    key = add_key(
        file, name, tenant, role, requests_per_minute=requests_per_minute, tokens_per_minute=tokens_per_minute
    )
    typer.echo(f"the key {name} of tenant {tenant} ({role}); it is not stored and cannot be shown again:", err=True)
    typer.echo(key)


@app.command("list", epilog="Example:  precedent keys list --file keys.json")
def list_keys(file: FileOption, json_file: JsonOption = None) -> None:
    """List names, tenants, roles, times of creation and limits per minute; the keys themselves are not stored."""
    from precedent_server.keys import read_keys

    keys = read_keys(file)
    if json_file is not None:
        write_json(
            json_file, {"keys": [one.model_dump(mode="json", exclude={"sha256"}, exclude_none=True) for one in keys]}
        )
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("name", "tenant", "role", "created", "requests", "tokens"):
        table.add_column(column, overflow="fold")
    for one in keys:
        created = one.created.isoformat(" ", "minutes")
        limits = (str(limit or "") for limit in (one.requests_per_minute, one.tokens_per_minute))
        table.add_row(*(Text(printable(cell)) for cell in (one.name, one.tenant, one.role, created, *limits)))
    Console().print(table)
    typer.echo("1 key" if len(keys) == 1 else f"{len(keys)} keys")


@app.command(epilog="Example:  precedent keys revoke shop-backend --file keys.json")
def revoke(name: NameArgument, file: FileOption, json_file: JsonOption = None) -> None:
    """Delete a key. A running server refuses it from the next request on."""
    from precedent_server.keys import revoke_key

    revoke_key(file, name)
    if json_file is not None:
        write_json(json_file, {"revoked": name})
    typer.echo(f"{name} revoked")
