"""`precedent train-draft` and `precedent measure-draft`: train a draft for a target, and measure its gain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from precedent.cli.options import ChatTemplateOption, DeviceOption, DtypeOption, JsonOption, write_json
from precedent.cli.progress import Progress
from precedent.errors import ConfigError, UnsupportedError
from precedent_drafts.draft_reports import REPORT_FILE, report_on, show_report
from precedent_drafts.train_kinds import Asked, Condition, Kind

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from precedent_drafts.training.prompts import Prompt
    from precedent_drafts.training.texts import Text

TargetOption = Annotated[str, typer.Option("--target", help="The target model: a Hugging Face id or a folder.")]
PromptsOption = Annotated[
    Path,
    typer.Option(
        exists=True, dir_okay=False, help="Chat traces or questions (JSONL, .gz), or prompts (.txt, one per line)."
    ),
]
TemperatureOption = Annotated[float, typer.Option(help="Temperature for sampling answers and comparing distributions.")]
AnswerOption = Annotated[int, typer.Option(min=1, help="Longest answer to a prompt, in tokens.")]
LongestOption = Annotated[int, typer.Option("--max-prompt-tokens", min=1, help="Leave out longer prompts.")]
SeedOption = Annotated[int, typer.Option(help="Fixes the held-out prompts, the answers and the training order.")]


commands, measuring = typer.Typer(), typer.Typer()


@commands.command(epilog="Example: precedent train-draft --target my-model --prompts chats.jsonl --out my-draft")
def train_draft(
    ctx: typer.Context,
    target: TargetOption,
    prompts: PromptsOption,
    out: Annotated[Path, typer.Option(file_okay=False, help="New folder for the draft.")],
    from_cache: Annotated[
        Path | None, typer.Option(exists=True, help="Also learn from the completions of this speculation cache.")
    ] = None,
    tenant: Annotated[str, typer.Option(help="Tenant of --from-cache.")] = "default",
    kind: Annotated[
        Kind,
        typer.Option(
            help="chain: it drafts token after token. block: it fills several positions in one forward. "
            "exit: an adapter behind the target's first layers."
        ),
    ] = Kind.CHAIN,
    condition: Annotated[
        Condition | None,
        typer.Option(
            help="What it reads beside tokens. target: the target's states. none: nothing. "
            "Default: none for a chain, target for a block draft.",
            show_default=False,
        ),
    ] = None,
    layers: Annotated[int, typer.Option(min=1, max=3, help="Layers of a chain or block draft.")] = 2,
    start: Annotated[
        str,
        typer.Option(
            help="Its initial weights: the target's ends, or (a chain's) first or last layers, or a draft's folder."
        ),
    ] = "ends",
    head_tokens: Annotated[
        int, typer.Option(min=0, help="Size of its head, for the most frequent tokens; 0 is the whole vocabulary.")
    ] = 8192,
    minutes: Annotated[float, typer.Option(min=0.1, help="About how long to collect answers and train.")] = 30.0,
    rounds: Annotated[
        int,
        typer.Option(min=1, help="A chain's training rounds; from the second on it also learns from its own texts."),
    ] = 3,
    passes: Annotated[
        int,
        typer.Option(min=1, max=8, help="Passes over a text of a chain that reads its target, on its own outputs."),
    ] = 3,
    mask_top_k: Annotated[
        int,
        typer.Option(min=0, help="A token counts in a later pass if it was among so many likeliest; 0 counts all."),
    ] = 0,
    fusion: Annotated[
        str, typer.Option(help="How such a chain fuses tokens and states: linear or token-guided.")
    ] = "linear",
    block_size: Annotated[int, typer.Option(min=2, max=16, help="Positions of a block.")] = 8,
    iterations: Annotated[int, typer.Option(min=1, help="Forwards in which a block draft fills a block.")] = 1,
    context_tokens: Annotated[
        int, typer.Option(min=1, help="How much of a prompt a draft that reads its target sees; all of the answer.")
    ] = 256,
    exit_layer: Annotated[int, typer.Option(min=1, help="The target's layer behind which an exit stands.")] = 4,
    exit_width: Annotated[int, typer.Option(min=1, help="Size of an exit's gated unit.")] = 1024,
    temperature: TemperatureOption = 1.0,
    answer_tokens: AnswerOption = 128,
    max_prompt_tokens: LongestOption = 1024,
    seed: SeedOption = 0,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    chat_template: ChatTemplateOption = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the training begun in --out.")] = False,
    json: JsonOption = None,
) -> None:
    """Distil a small draft from a target's own outputs, and report what it gains.

    It says what it will cost before it starts, and a killed training goes on with --resume. The draft shares the
    target's embeddings and head. Use its folder as --draft-model or draft_model=.
    """
    check_folder(out, resume)
    asked = Asked(kind, condition, ctx.params)
    asked.check(ctx)
    recipe, training = asked.recipe_and_training()  # raises for an invalid value before the model is loaded
    progress: Progress = ctx.obj
    model, tokenizer = _load(progress, target, device, dtype, chat_template)
    learned, held_out = _split(progress, prompts, tokenizer, max_prompt_tokens, seed)
    completions = _completions(from_cache, tokenizer, tenant, answer_tokens)
    trained = training(
        model, tokenizer, learned, recipe, out, completions=completions, announce=progress.say,
        progress=partial(_show_phase, progress),
    ).run(minutes)  # fmt: skip
    drafts = {**asked.compared_with(model), str(out): trained.draft}
    report = report_on(progress, model, tokenizer, drafts, held_out, recipe)
    report |= {"recipe": asdict(recipe), "plan": asdict(trained.plan), "tokens": trained.num_tokens}
    write_json(out / REPORT_FILE, report)
    progress.rest()
    show_report(report)
    if json:
        write_json(json, report)


@measuring.command(
    epilog="Example: precedent measure-draft --target my-model --draft-model my-draft --draft-model first-layers:2 "
    "--prompts chats.jsonl"
)
def measure_draft(
    ctx: typer.Context,
    target: TargetOption,
    draft_model: Annotated[
        list[str],
        typer.Option("--draft-model", help="A folder, a Hugging Face id or first-layers:N; repeatable."),
    ],
    prompts: PromptsOption,
    temperature: TemperatureOption = 1.0,
    answer_tokens: AnswerOption = 128,
    max_prompt_tokens: LongestOption = 1024,
    seed: SeedOption = 0,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    chat_template: ChatTemplateOption = None,
    json: JsonOption = None,
) -> None:
    """Compare draft models by how many of their tokens a target accepts and by what they cost.

    The measurement uses answers to the prompts that train-draft holds out with the same --seed.
    """
    from precedent.drafters import load_draft
    from precedent_drafts.eagle import EagleHead
    from precedent_drafts.training.schedule import Recipe

    recipe = Recipe(temperature=temperature, answer_tokens=answer_tokens, seed=seed)
    progress: Progress = ctx.obj
    model, tokenizer = _load(progress, target, device, dtype, chat_template)
    _, held_out = _split(progress, prompts, tokenizer, max_prompt_tokens, seed)
    specs = progress.each(draft_model, "loading draft models", len(draft_model))
    drafts = {spec: load_draft(spec, model, tokenizer) for spec in specs}
    for spec, draft in drafts.items():
        if isinstance(draft, EagleHead):
            raise UnsupportedError(
                f"{spec} is an EAGLE head, which measure-draft cannot measure without its target's states: compare it "
                "by precedent bench"
            )
    report = report_on(progress, model, tokenizer, drafts, held_out, recipe)
    progress.rest()
    show_report(report)
    if json:
        write_json(json, report)


def check_folder(out: Path, resume: bool) -> None:
    """Raise ConfigError unless the folder is new, or holds a training for `--resume` to continue."""
    from precedent_drafts.training.distil import (
        WORK_FOLDER,  # imports torch too, so import it before any model is loaded
    )

    begun = (out / WORK_FOLDER).is_dir()
    if resume and not begun:
        raise ConfigError(f"there is nothing to resume in {out}; leave out --resume to start")
    if begun and not resume:
        raise ConfigError(f"{out} holds an unfinished training; continue it with --resume, or give another folder")
    if out.is_dir() and any(out.iterdir()) and not begun:
        raise ConfigError(f"{out} is not empty; give a new folder")


def _load(
    progress: Progress, target: str, device: str | None, dtype: str | None, chat_template: str | None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    from precedent.target.load.loading import load_target

    progress.show(f"loading {target}")
    return load_target(target, device=device, dtype=dtype, chat_template=chat_template)


def _split(
    progress: Progress, path: Path, tokenizer: PreTrainedTokenizerBase, longest: int, seed: int
) -> tuple[list[Prompt], list[Prompt]]:
    from precedent_drafts.training.prompts import read_prompts, split

    progress.show("reading the prompts")
    prompts, left_out = read_prompts(path, tokenizer, longest)
    learned, held_out = split(prompts, seed)
    note = f", {left_out} longer than {longest} tokens and left out" if left_out else ""
    progress.say(f"{len(learned)} prompts to learn from, {len(held_out)} held out{note}")
    return learned, held_out


def _completions(path: Path | None, tokenizer: PreTrainedTokenizerBase, tenant: str, longest: int) -> Sequence[Text]:
    from precedent_drafts.training.completions import read_completions

    return () if path is None else read_completions(path, tokenizer, tenant, longest)


def _show_phase(progress: Progress, phase: str, done: int, total: int, loss: float | None = None) -> None:
    """Show the progress of a training phase."""
    progress.show(phase, done, total, "" if loss is None else f"loss {loss:.3f}")
