"""`precedent train-judge`: learn from recorded agent runs which of the draft's tokens may stand though rejected."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from precedent.cli.options import ChatTemplateOption, DeviceOption, DtypeOption, JsonOption, write_json
from precedent.cli.progress import Progress
from precedent.errors import ConfigError, PromptError
from precedent_drafts.train_draft import REPORT_FILE, check_folder

ORDER_DESK = "smollm2-135m-order-desk"
"""The demo's own target, known by this name where precedent-demo is installed; no import, so that help comes fast."""

if TYPE_CHECKING:
    from precedent.text.traces import Trajectory


commands = typer.Typer()


@commands.command(
    epilog="Example: precedent train-judge --target my-model --draft-model my-draft --runs runs.jsonl "
    "--outcome my_agent:outcome --out my-judge"
)
def train_judge(
    ctx: typer.Context,
    target: Annotated[str, typer.Option("--target", help=f"The target model: an id, a folder, or {ORDER_DESK}.")],
    runs: Annotated[
        list[Path], typer.Option("--runs", exists=True, dir_okay=False, help="Recorded agent runs (JSONL, .gz).")
    ],
    outcome: Annotated[
        str,
        typer.Option(
            help="What a run comes to: an installed outcome, module:factory, or text (the last line of each answer)."
        ),
    ],
    out: Annotated[Path, typer.Option(file_okay=False, help="New folder for the judge.")],
    draft_model: Annotated[
        str | None,
        typer.Option(
            "--draft-model", help=f"A folder, an id or first-layers:N. {ORDER_DESK} has its own.", show_default=False
        ),
    ] = None,
    mismatches: Annotated[int, typer.Option(help="How many mismatches to label, over all runs.")] = 300,
    features: Annotated[
        str | None,
        typer.Option(
            help="What to learn from, separated by commas; rows stands for all that rows tell. Default: rows."
        ),
    ] = None,
    keep: Annotated[
        float, typer.Option(help="Share of the mismatches that change the outcome which must stay rejected.")
    ] = 0.9,
    strength: Annotated[
        float | None, typer.Option(help="Inverse of the L2 penalty. Default: what cross-validation finds best.")
    ] = None,
    held_out: Annotated[float, typer.Option(help="Share of the tasks that is kept for the report.")] = 0.25,
    labels: Annotated[
        Path | None,
        typer.Option(exists=True, file_okay=False, help="Learn anew from the labels of an earlier judge (OUT/labels)."),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 512,
    seed: Annotated[int, typer.Option(help="Fixes which mismatches are labelled, and the held-out tasks.")] = 0,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    chat_template: ChatTemplateOption = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the training begun in --out.")] = False,
    json: JsonOption = None,
) -> None:
    """Train a judge for lossy_judge: which tokens of the draft model change what an agent run comes to.

    The target serves each recorded run anew, greedily. Where the draft disagrees, its token is put in, and the run goes
    on. After the first run it says about how long the others take; a killed training goes on with --resume.
    """
    from precedent_research.judge_training import Agent, JudgeRecipe, JudgeTraining, report_of
    from precedent_research.reruns import load_outcome

    chosen = {} if features is None else {"features": _features(features)}
    recipe = JudgeRecipe(
        mismatches=mismatches, strength=strength, held_out=held_out, keep=keep, seed=seed, **chosen
    )  # raises for an invalid value before anything is loaded
    progress: Progress = ctx.obj
    check_folder(out, resume)
    recorded = _runs(runs)
    if "" not in sys.path:
        sys.path.insert(0, "")  # so that module:factory finds a file beside the caller
    agent = Agent(outcome, load_outcome(outcome), partial(_chat_model, max_tokens=max_tokens), max_tokens)
    model, draft, tokenizer = _models(progress, target, draft_model, device, dtype, chat_template)
    training = JudgeTraining(
        model, draft, tokenizer, recorded, agent, recipe, out,
        labels=labels, announce=progress.say, progress=progress.show,
    )  # fmt: skip
    trained = training.run()
    progress.show("reporting")
    report = report_of(trained, recipe)
    write_json(out / REPORT_FILE, report)
    progress.rest()
    _show(report)
    if json:
        write_json(json, report)


def _features(text: str) -> tuple[str, ...]:
    from precedent_research.judge import OF_ROWS

    names = [name.strip() for name in text.split(",")]
    return tuple(each for name in names for each in (OF_ROWS if name == "rows" else (name,)))


def _runs(paths: list[Path]) -> list[Trajectory]:
    """The recorded runs; of the calls of one conversation, the last, which holds the others."""
    from precedent.text.traces import read_trajectories

    found = {run.number: run for run in read_trajectories(paths)}
    if not found:
        raise PromptError(f"{', '.join(map(str, paths))}: there are no runs")
    return list(found.values())


def _chat_model(engine: Any, max_tokens: int) -> Any:
    from precedent.langchain import ChatPrecedent

    return ChatPrecedent.from_engine(engine, temperature=0.0, max_tokens=max_tokens)


def _models(
    progress: Progress,
    target: str,
    draft_model: str | None,
    device: str | None,
    dtype: str | None,
    chat_template: str | None,
) -> tuple[Any, Any, Any]:
    from precedent.drafters import load_draft
    from precedent.target.load.loading import load_target
    from precedent_demo import draft_folder
    from precedent_demo.adapted import packaged_target
    from precedent_drafts.block_draft import BlockDraft

    progress.show(f"loading {target}")
    if target == ORDER_DESK:
        target, draft_model = packaged_target(), draft_model or str(draft_folder())
    if draft_model is None:
        raise ConfigError("give the draft model whose tokens are judged: --draft-model")
    model, tokenizer = load_target(target, device=device, dtype=dtype, chat_template=chat_template)
    draft = load_draft(draft_model, model, tokenizer)
    if isinstance(draft, BlockDraft):
        raise ConfigError(
            f"{draft_model} is a block draft: a judge reads the rows of a draft model that draws in a chain"
        )
    return model, draft, tokenizer


def _show(report: dict[str, Any]) -> None:
    learned, held_out = report["learned"], report["held_out"]
    console = Console()
    labels, changed = (learned[key] + held_out[key] for key in ("labels", "changed"))
    console.print(
        f"{report['runs']} runs, {report['failed_runs']} of which failed and were left out; {report['mismatches']} "
        f"mismatches in {report['tokens']} tokens; {labels} labelled, {changed} of which change the outcome"
    )
    low, high = report["interval"]
    console.print(
        f"area under the curve: {report['area']:.3f} of held-out tasks ({low:.3f} to {high:.3f}), "
        f"{report['cross_validated']:.3f} cross-validated"
    )
    right, wrong = held_out["overruled_unchanged"], held_out["overruled_changed"]
    console.print(
        f"threshold {report['threshold']:.3f}: of held-out mismatches it overrules {right[0]} of {right[1]} that leave "
        f"the outcome as it is, and {wrong[0]} of {wrong[1]} that change it"
    )
