"""`precedent demo`: runs an agent over repeated workflows, decodes it in five or more ways, and prints one table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from precedent.cli.options import ChatTemplateOption, DeviceOption, DtypeOption, HtmlOption, JsonOption
from precedent.errors import ConfigError

ORDER_DESK = "smollm2-135m-order-desk"
"""The packaged model with the order desk's adapter merged in; it has draft models trained for it."""

UNTRAINED_DRAFT = "first-layers:4"
"""The default draft model of every other target."""


@dataclass(frozen=True, slots=True)
class Asked:
    """The options of one `precedent demo` command that decide what is measured."""

    target: str
    draft_model: str | None
    device: str | None
    dtype: str | None
    chat_template: str | None
    temperature: float
    full: bool
    requests: int | None
    fresh: bool
    tool_latency: float | None


commands = typer.Typer()


@commands.command(epilog="Example: precedent demo --json demo.json")
def demo(
    ctx: typer.Context,
    target: Annotated[
        str, typer.Option(help="Target model: the packaged order-desk model, a Hugging Face id, or a folder.")
    ] = ORDER_DESK,
    draft_model: Annotated[
        str | None,
        typer.Option(
            help="Draft model: a Hugging Face id, a folder, or first-layers:N. Default: the order desk's own for its "
            f"model, else {UNTRAINED_DRAFT}.",
            show_default=False,
        ),
    ] = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    chat_template: ChatTemplateOption = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy. Above 0, topdown verification runs too.")] = 0.0,
    full: Annotated[
        bool,
        typer.Option(
            "--full",
            help="Warm with 60 requests, measure 40; also recall alone, the order desk's other draft, its bfloat16.",
        ),
    ] = False,
    requests: Annotated[int | None, typer.Option(min=1, help="Measure exactly this many requests.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Delete the demo's warm cache first.")] = False,
    tool_latency: Annotated[
        float | None,
        typer.Option(min=0.0, help="Let tools that read take so many seconds, and run them ahead: four ways, greedy."),
    ] = None,
    json: JsonOption = None,
    html: HtmlOption = None,
) -> None:
    """Run a LangChain tool-calling agent over repeated workflows, with and without speculation, and compare.

    Measures until the speed-ups are known within 10 percent, or for about two minutes.
    """
    from precedent.config import SamplingParams

    SamplingParams(temperature=temperature)  # raises for an invalid value before anything is loaded
    asked = Asked(target, draft_model, device, dtype, chat_template, temperature, full, requests, fresh, tool_latency)
    if tool_latency is None:
        from precedent_demo.demo_runs import run_demo

        run_demo(asked, ctx.obj, json, html)
    elif temperature > 0 or html:
        raise ConfigError("--tool-latency compares transcripts: leave out --temperature and --html")
    else:
        from precedent_demo.demo_tools import run_with_slow_tools

        run_with_slow_tools(asked, ctx.obj, json)
