"""`precedent cache`: inspects and maintains a speculation cache, and moves completions in and out."""

from __future__ import annotations

import typer

from precedent.cli.cache_keep import compact, forget, verify
from precedent.cli.cache_look import list_completions, search, show, stats
from precedent.cli.cache_move import export, import_export
from precedent.cli.cache_warm import warm

app = typer.Typer(help="Inspect, maintain, fill and move a speculation cache.", no_args_is_help=True)

_CACHE = "~/.cache/precedent"

app.command(epilog=f"Example:  precedent cache stats {_CACHE}")(stats)
app.command("list", epilog=f"Example:  precedent cache list {_CACHE} --tenant shop --limit 20")(list_completions)
app.command(epilog=f"Example:  precedent cache show {_CACHE} 17")(show)
app.command(epilog=f'Example:  precedent cache search {_CACHE} "refund" --limit 5')(search)
app.command(epilog=f'Example:  precedent cache forget {_CACHE} --tenant shop --containing "Elm Street"')(forget)
app.command(epilog=f"Example:  precedent cache verify {_CACHE}")(verify)
app.command(epilog=f"Example:  precedent cache compact {_CACHE}")(compact)
app.command(epilog=f"Example:  precedent cache export {_CACHE} backup --tenant shop")(export)
app.command("import", epilog=f"Example:  precedent cache import {_CACHE} backup --target my-new-model")(import_export)
app.command(epilog=f"Example:  precedent cache warm {_CACHE} chats.jsonl.gz .langchain.db --target my-model")(warm)
