"""`precedent replay --replicas N`: what replicas that share a store would gain on recorded logs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from precedent.errors import ConfigError

if TYPE_CHECKING:
    from precedent.replay.fleet import Fleet


def fleet_of(
    replicas: int | None, routing: str, tenants: int, staleness: int, memory: int | None, others: Mapping[str, object]
) -> Fleet | None:
    """The fleet that was asked for, None for a plain replay. Raises ConfigError for options that would be ignored."""
    from precedent.replay.fleet import Fleet

    if replicas is None:
        given = {
            "--routing": routing != "tenant",
            "--tenants": tenants != 1,
            "--staleness": staleness,
            "--memory": memory,
        }
        for option, used in given.items():
            if used:
                raise ConfigError(f"{option} is for a simulation of replicas: give --replicas as well")
        return None
    for option, wanted in others.items():
        if wanted:
            raise ConfigError(f"{option} belongs to a replay of one process: leave it out beside --replicas")
    return Fleet(replicas, routing, tenants, staleness, memory)


def show_fleet(console: Console, found: Mapping[str, Any]) -> None:
    """The figures of a simulation, in one table and a line."""
    table = Table("drafters", "tok/step", "nodes/step")
    for row in found["drafters"]:
        table.add_row(row["name"], f"{row['tokens_per_step']:.3f}", f"{row['draft_tokens_per_step']:.1f}")
    console.print(table)
    fleet = found["fleet"]
    console.print(
        f"{found['turns']} answers on {found['replicas_used']} of {fleet['replicas']} replicas, by {fleet['routing']}: "
        f"memory at hand for {found['hit_rate']:.1%} of the turns that had any, {found['prefix_hit_rate']:.1%} of the "
        f"prompt tokens kept, the busiest replica answered {found['busiest_share']:.1%}.",
        highlight=False,
    )
