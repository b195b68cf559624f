"""`precedent demo`: runs an agent over repeated workflows, decodes it in five or more ways, and prints one table."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from precedent.cli.options import ChatTemplateOption, DeviceOption, DtypeOption, HtmlOption, JsonOption, write_json
from precedent.cli.progress import Progress
from precedent.errors import ConfigError, PrecedentError

if TYPE_CHECKING:
    from precedent_demo.demo_differences import Difference
    from precedent_demo.demo_runs import Bench
    from precedent_demo.demo_state import DemoState

ORDER_DESK = "smollm2-135m-order-desk"
"""The packaged model with the order desk's adapter merged in; it has draft models trained for it."""

UNTRAINED_DRAFT = "first-layers:4"
"""The default draft model of every other target."""


@dataclass(frozen=True, slots=True)
class Asked:
    """The options of one `precedent demo` command."""

    target: str
    draft_model: str | None
    other_draft_model: str | None
    device: str | None
    dtype: str | None
    temperature: float
    full: bool
    requests: int | None
    fresh: bool
    tool_latency: float | None = None
    chat_template: str | None = None


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
    other_draft_model: Annotated[
        str | None, typer.Option(help="Measure draft-only and both with this draft model as well, interleaved.")
    ] = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    chat_template: ChatTemplateOption = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy. Above 0, topdown verification runs too.")] = 0.0,
    full: Annotated[
        bool,
        typer.Option(
            "--full", help="Warm with 60 requests, measure 40; also recall alone, and the order desk's other draft."
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
    need_order_desk()
    asked = Asked(
        target, draft_model, other_draft_model, device, dtype, temperature, full, requests, fresh, tool_latency,
        chat_template,
    )  # fmt: skip
    progress = ctx.obj
    if tool_latency is not None:
        _with_slow_tools(asked, progress, json, html)
        return
    bench, state, drafts = _loaded(asked, progress)
    try:
        warmed, busy = _measured(bench, state, asked, progress)
        progress.show("comparing the answers")
        results = _results(bench, _differences(bench) if temperature == 0 else [], temperature)
        results["machine"] |= {**drafts, "others_cpu_share": busy}
        results["warming_requests"] = warmed
        progress.rest()
        _hand_out(results, bench, json, html)
    finally:
        bench.close()


def _with_slow_tools(asked: Asked, progress: Progress, json: Path | None, html: Path | None) -> None:
    """Measure with slow tools; in float32 unless a precision was asked for, so that every way says the same."""
    if asked.temperature > 0 or html:
        raise ConfigError("--tool-latency compares transcripts: leave out --temperature and --html")
    bench, state, _ = _loaded(dataclasses.replace(asked, dtype=asked.dtype or "float32"), progress)
    from precedent_demo import demo_tools, make_requests

    try:
        others, own = (make_requests(name, full=asked.full, seed=0) for name in ("A", "B"))
        cache, latency = bench.warm_cache, asked.tool_latency or 0.0
        demo_tools.warm(bench, cache, state, others, progress)
        runs = demo_tools.measure(bench, cache, own[: asked.requests], latency, progress)
        found = demo_tools.results(runs, latency, bench.machine())
        progress.rest()
        demo_tools.show(Console(), found)
        if json:
            write_json(json, found)
    finally:
        bench.close()


def _hand_out(results: dict[str, Any], bench: Bench, json: Path | None, html: Path | None) -> None:
    from precedent_demo import demo_table
    from precedent_demo.demo_page import demo_page

    demo_table.show(Console(), results)
    if json:
        write_json(json, results)
    if html:
        tokenizer = bench.engines["plain"].tokenizer
        html.write_text(demo_page(results, bench.runs, lambda ids: str(tokenizer.decode(list(ids)))), encoding="utf-8")


def need_order_desk() -> None:
    """Raise PrecedentError, with what to do, where the order desk is not installed."""
    try:
        import precedent_demo  # noqa: F401  # only to see whether it is installed
    except ImportError:
        raise PrecedentError(
            "the demo's order desk is not installed: run `make demo` in a clone of the repository, "
            "or pip install ./plugins/precedent-demo"
        ) from None


def _loaded(asked: Asked, progress: Progress) -> tuple[Bench, DemoState, dict[str, str]]:
    """The model with its caches and engines, the state that earlier demos left, and the draft models' names."""
    own = asked.target == ORDER_DESK
    progress.show(f"loading {asked.target}", note="built on the first run" if own else "")
    from precedent.cache import SpeculationCache
    from precedent.drafters import load_draft
    from precedent.target.load.loading import load_target
    from precedent_demo import MAX_TOKENS_PER_TURN
    from precedent_demo.demo_runs import Bench, ways_of
    from precedent_demo.demo_state import DemoState

    source, drafts = _sources(asked)
    model, tokenizer = load_target(source, device=asked.device, dtype=asked.dtype, chat_template=asked.chat_template)
    loaded = {role: load_draft(draft, model, tokenizer) for role, draft in drafts.items()}
    other = loaded.get("other_draft_model")
    with_tools = () if asked.tool_latency is None else ("with actions",)
    state = DemoState(source, asked.draft_model or "", model.dtype, asked.temperature, asked.full, *with_tools)
    if asked.fresh:
        shutil.rmtree(state.folder, ignore_errors=True)
    progress.show("starting engines and measuring this machine's cost per step")
    cache = SpeculationCache.open(state.cache_path)
    cache.warm_up()  # loading the embedder later would distort the measurement
    ways = ways_of(asked.temperature, asked.full, other is not None)
    if asked.tool_latency is not None:
        ways = tuple(way for way in ways if way.name in ("plain", "both"))
    bench = Bench(
        model, tokenizer, asked.target, loaded["draft_model"], cache, ways,
        temperature=asked.temperature, max_tokens=MAX_TOKENS_PER_TURN, other_draft=other,
    )  # fmt: skip
    return bench, state, {role: _named(draft) for role, draft in drafts.items()}


def packaged_target() -> str:
    """Folder of the packaged target; while it is built, the inner loops are compiled.

    On a new machine each takes half a minute of one processor.
    """
    from precedent.engine.warm_up import compile_inner_loops
    from precedent_demo import adapted_target

    with ThreadPoolExecutor(1, "precedent-compile") as beside:
        compiling = beside.submit(compile_inner_loops)
        folder = adapted_target()
        compiling.result()
    return str(folder)


def _sources(asked: Asked) -> tuple[str, dict[str, str]]:
    """The target and the draft models to load."""
    from precedent_demo import block_folder, draft_folder

    given = {"draft_model": asked.draft_model, "other_draft_model": asked.other_draft_model}
    if asked.target != ORDER_DESK:
        return asked.target, _known({"draft_model": UNTRAINED_DRAFT}, given)
    own = {"draft_model": str(draft_folder())}
    if asked.full and asked.draft_model is None:
        own["other_draft_model"] = str(block_folder())
    return packaged_target(), _known(own, given)


def _known(default: dict[str, str], given: dict[str, str | None]) -> dict[str, str]:
    """The draft models by role: those given, else the default ones."""
    return default | {role: draft for role, draft in given.items() if draft is not None}


def _named(draft: str) -> str:
    """What the results call a draft model: one of the order desk's own by its kind, others as they were given."""
    from precedent_demo import block_folder, draft_folder
    from precedent_demo.demo_table import OWN_BLOCK, OWN_CHAIN

    return {str(block_folder()): OWN_BLOCK, str(draft_folder()): OWN_CHAIN}.get(draft, draft)


def _measured(bench: Bench, state: DemoState, asked: Asked, progress: Progress) -> tuple[int, float | None]:
    """Warm the cache and measure; returns the warming requests, and other programs' CPU share, None if unknown."""
    from precedent_demo import make_requests
    from precedent_demo.demo_measuring import Extent, measure, warm

    extent = Extent.of(asked.full, asked.requests)
    others, own = (make_requests(name, full=asked.full, seed=0) for name in ("A", "B"))
    warmed = warm(bench, state, others[: extent.warming], progress, seconds=extent.warming_seconds)
    bench.copy_warm_cache()
    busy = measure(bench, own[: extent.measured], progress, adaptive=extent.adaptive)
    return warmed, None if busy is None else round(busy, 3)


def _differences(bench: Bench) -> list[Difference]:
    from precedent_demo.demo_differences import compare

    plain = bench.runs["plain"]
    found = []
    for name, run in bench.runs.items():
        if name != "plain":
            found += compare(plain, run, bench.logit_gap)[1]
    return found


def _results(bench: Bench, differences: Sequence[Difference], temperature: float) -> dict[str, Any]:
    from precedent_demo.demo_runs import with_speedups

    total = len(bench.runs["plain"].requests)
    differing = {name: sum(d.way == name for d in differences) for name in bench.runs}
    return {
        "temperature": temperature,
        "machine": bench.machine(),
        "runs": with_speedups(bench.runs),
        # sampled texts differ by chance: counting equal ones means nothing
        "identical_outputs": {}
        if temperature > 0
        else {name: [total - differing[name], total] for name in bench.runs if name != "plain"},
        "first_differences": [
            {"run": d.way, "request": d.request, "position": d.position, "logit_gap": round(d.logit_gap, 6)}
            for d in differences
        ],
    }
