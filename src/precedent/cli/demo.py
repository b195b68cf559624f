"""`precedent demo`: an agent over repeated workflows, decoded five ways, with one table at the end."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from precedent.cli.options import DeviceOption, DtypeOption, JsonOption, write_json
from precedent.errors import PrecedentError

if TYPE_CHECKING:
    from precedent.cli.demo_runs import Bench, Difference
    from precedent.cli.demo_state import DemoState

ORDER_DESK = "smollm2-135m-order-desk"
"""The packaged model with the order desk's adapter merged in; beside it stands a draft model of its own."""

OTHER_DRAFT = "first-layers:4"
"""The draft model of any other target, for which none was trained."""

MEASURING_SECONDS = 120
"""About how long warming and measuring may take by default; a slow machine serves fewer requests."""

REQUEST_SECONDS = 0.55
"""Seconds that one measured request takes, with its share of warming, per millisecond of a plain step."""

FEWEST_REQUESTS, WARMING_PER_MEASURED = 3, 2


def demo(
    target: Annotated[
        str, typer.Option(help="The model trained for the order desk, a Hugging Face id, or a folder.")
    ] = ORDER_DESK,
    draft_model: Annotated[
        str | None,
        typer.Option(
            help="Hugging Face id, folder, or first-layers:N; by default what was trained for the target, "
            f"or {OTHER_DRAFT}.",
            show_default=False,
        ),
    ] = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy; above, traversal is compared with topdown.")] = 0.0,
    full: Annotated[bool, typer.Option("--full", help="60 warming and 40 measured requests.")] = False,
    requests: Annotated[int | None, typer.Option(min=1, help="Measure only this many requests.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Forget the demo's warm cache first.")] = False,
    json: JsonOption = None,
    html: Annotated[
        Path | None, typer.Option("--html", dir_okay=False, help="Write a page with every token's source here.")
    ] = None,
) -> None:
    """Run a LangChain tool-calling agent over repeated workflows, plain and speculated, and compare."""
    _need_order_desk()
    from precedent.cli import demo_table

    console = Console(stderr=True)
    bench, differences = _measured(console, target, draft_model, device, dtype, temperature, full, requests, fresh)
    results = _results(bench, differences, temperature)
    demo_table.show(Console(), results)
    if json:
        write_json(json, results)
    if html:
        from precedent.replay.provenance import write_page

        write_page(html, results, bench.runs, bench.engines["plain"].tokenizer)
    bench.close()


def _need_order_desk() -> None:
    try:
        import precedent_demo  # noqa: F401  # only whether it is there
    except ImportError:
        raise PrecedentError(
            "the demo's order desk is not installed: run `make demo` in a clone, "
            "or pip install ./plugins/precedent-demo"
        ) from None


def _measured(
    console: Console,
    target: str,
    draft_model: str | None,
    device: str | None,
    dtype: str | None,
    temperature: float,
    full: bool,
    requests: int | None,
    fresh: bool,
) -> tuple[Bench, list[Difference]]:
    """Load, warm, measure, compare."""
    from precedent.cache import SpeculationCache
    from precedent.cli.demo_runs import TOPDOWN, WAYS, Bench
    from precedent.cli.demo_state import DemoState
    from precedent.target.load.loading import load_draft, load_target
    from precedent_demo import MAX_TOKENS_PER_TURN

    with console.status(f"loading {target} (converted once on a fresh machine, about half a minute)"):
        source, draft_source = _sources(target, draft_model)
        model, tokenizer = load_target(source, device=device, dtype=dtype)
        draft = load_draft(draft_source, model, tokenizer)
    state = DemoState(source, draft_model or "", model.dtype, temperature, full)
    if fresh:
        shutil.rmtree(state.folder, ignore_errors=True)
    ways = (*WAYS, TOPDOWN) if temperature > 0 else WAYS
    with console.status("starting engines and measuring this machine's cost per step"):
        cache = SpeculationCache.open(state.cache_path)
        cache.warm_up()  # loading the embedder would disturb the measuring
        bench = Bench(
            model, tokenizer, target, draft, cache, ways, temperature=temperature, max_tokens=MAX_TOKENS_PER_TURN
        )
    with _progress(console) as progress:
        count = None if full else requests or state.measured_requests(lambda: _affordable(bench))
        _warm(bench, state, progress, full, count)
        bench.copy_warm_cache()
        _measure(bench, progress, full, count)
    return bench, _differences(bench) if temperature == 0 else []


def _sources(target: str, draft_model: str | None) -> tuple[str, str]:
    """What is loaded as target and as draft model."""
    from precedent_demo import adapted_target, draft_folder

    if target != ORDER_DESK:
        return target, draft_model or OTHER_DRAFT
    return str(adapted_target()), draft_model or str(draft_folder())


def _progress(console: Console) -> Progress:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeElapsedColumn(), TextColumn("{task.fields[note]}"), console=console)


def _affordable(bench: Bench) -> int:
    """How many requests this machine measures in about `MEASURING_SECONDS`."""
    step = bench.warm_engine.planner.cost.milliseconds(1)
    return max(FEWEST_REQUESTS, int(MEASURING_SECONDS / (REQUEST_SECONDS * step)))


def _warm(bench: Bench, state: DemoState, progress: Progress, full: bool, count: int | None) -> None:
    """Run set A, whose completions fill the cache; requests done by an earlier demo are not run again."""
    from precedent_demo import make_database, make_requests

    wanted = make_requests("A", full=full, seed=0)[: None if count is None else WARMING_PER_MEASURED * count]
    desk = make_database(seed=0)
    done = [name for name in state.warmed() if name in {request.request_id for request in wanted}]
    task = progress.add_task("warming the cache (set A)", total=len(wanted), completed=len(done), note="")
    for request in wanted:
        if request.request_id in done:
            continue
        bench.warm(request, desk)
        done.append(request.request_id)
        state.mark_warmed(done)
        progress.update(task, advance=1, note=request.workflow)
    progress.update(task, note="from disk" if done and progress.tasks[0].speed is None else "")


def _measure(bench: Bench, progress: Progress, full: bool, limit: int | None) -> None:
    """Run set B, other requests of the same workflows, once per way."""
    from precedent.cli.demo_runs import rotated
    from precedent_demo import make_database, make_requests

    desk, wanted = make_database(seed=0), make_requests("B", full=full, seed=0)[:limit]
    names = list(bench.engines)
    task = progress.add_task("measuring (set B)", total=len(wanted) * len(names), note="")
    for number, request in enumerate(wanted):
        for name in bench.measure(request, desk, rotated(names, number)):
            progress.update(task, advance=1, note=f"{request.workflow}, {name}")


def _differences(bench: Bench) -> list[Difference]:
    from precedent.cli.demo_runs import compare

    plain = bench.runs["plain"]
    found = []
    for name, run in bench.runs.items():
        if name != "plain":
            found += compare(plain, run, bench.logit_gap)[1]
    return found


def _results(bench: Bench, differences: Sequence[Difference], temperature: float) -> dict[str, Any]:
    total = len(bench.runs["plain"].requests)
    differing = {name: sum(d.way == name for d in differences) for name in bench.runs}
    return {
        "temperature": temperature,
        "machine": bench.machine(),
        "runs": [run.as_dict() for run in bench.runs.values()],
        # sampled texts differ by chance, so there is nothing to count
        "identical_outputs": {}
        if temperature > 0
        else {name: [total - differing[name], total] for name in bench.runs if name != "plain"},
        "first_differences": [
            {"run": d.way, "request": d.request, "position": d.position, "logit_gap": round(d.logit_gap, 6)}
            for d in differences
        ],
    }
