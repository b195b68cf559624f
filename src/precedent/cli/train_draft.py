"""`precedent train-draft` and `precedent measure-draft`: train a draft model for a target, and measure its gain."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from precedent.cli.options import DeviceOption, DtypeOption, JsonOption, write_json
from precedent.cli.progress import Progress
from precedent.cli.train_block import HELD_OUT_SEED, REPORT_FILE, Block, Kind, measured, show_blocks, train_block
from precedent.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from precedent.training.prompts import Prompt
    from precedent.training.texts import Text

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


def train_draft(
    ctx: typer.Context,
    target: TargetOption,
    prompts: PromptsOption,
    out: Annotated[Path, typer.Option(file_okay=False, help="New folder for the draft model.")],
    from_cache: Annotated[
        Path | None, typer.Option(exists=True, help="Also learn from the completions of this speculation cache.")
    ] = None,
    tenant: Annotated[str, typer.Option(help="Tenant of --from-cache.")] = "default",
    layers: Annotated[int, typer.Option(min=1, max=3, help="Layers of the draft model.")] = 2,
    start: Annotated[
        str, typer.Option(help="Initial weights: the target's ends, first or last layers, or a draft model's folder.")
    ] = "ends",
    head_tokens: Annotated[
        int, typer.Option(min=0, help="Size of its head, for the most frequent tokens; 0 is the whole vocabulary.")
    ] = 8192,
    minutes: Annotated[float, typer.Option(min=0.1, help="About how long to collect answers and train.")] = 30.0,
    rounds: Annotated[
        int,
        typer.Option(min=1, help="Training rounds; from the second on it also learns from its own texts."),
    ] = 3,
    temperature: TemperatureOption = 1.0,
    answer_tokens: AnswerOption = 128,
    max_prompt_tokens: LongestOption = 1024,
    seed: SeedOption = 0,
    kind: Annotated[
        Kind, typer.Option(help="chain: it drafts token after token. block: it fills several positions in one forward.")
    ] = Kind.CHAIN,
    block_size: Annotated[int, typer.Option(min=2, max=16, help="Positions of a block, for --kind block.")] = 8,
    context_tokens: Annotated[
        int, typer.Option(min=1, help="How much of a prompt a block draft sees, in tokens; all of the answer.")
    ] = 256,
    iterations: Annotated[int, typer.Option(min=1, help="Forwards in which a block draft fills a block.")] = 1,
    condition: Annotated[
        str, typer.Option(help="What a block draft reads: the layers of its target. Nothing else is supported.")
    ] = "target",
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the training begun in --out.")] = False,
    json: JsonOption = None,
) -> None:
    """Distil a small draft model from a target's own outputs, and report what it gains.

    It says what it will cost before it starts, and a killed training goes on with --resume. The draft model shares the
    target's embeddings and head. Use its folder as --draft-model or draft_model=.
    """
    check_folder(out, resume)
    if kind is Kind.BLOCK:
        asked = Block(layers, start, head_tokens, temperature, answer_tokens, seed, block_size, context_tokens,
                      iterations, condition)  # fmt: skip
        recipe_of_block = asked.recipe()  # raises for an invalid value before the model is loaded
        model, tokenizer = _load(ctx.obj, target, device, dtype)
        split_prompts = _split(ctx.obj, prompts, tokenizer, max_prompt_tokens, seed)
        earlier = _completions(from_cache, tokenizer, tenant, answer_tokens)
        train_block(ctx.obj, model, tokenizer, split_prompts, earlier, recipe_of_block, out, minutes, json)
        return
    if condition != "target":
        raise ConfigError(f"condition={condition!r} is for --kind block: leave it out")
    from precedent.training.distil import Distillation
    from precedent.training.schedule import Recipe

    recipe = Recipe(
        layers, start, head_tokens, temperature, answer_tokens, rounds=rounds, seed=seed
    )  # raises for an invalid value before the model is loaded
    progress: Progress = ctx.obj
    model, tokenizer = _load(progress, target, device, dtype)
    learned, held_out = _split(progress, prompts, tokenizer, max_prompt_tokens, seed)
    completions = _completions(from_cache, tokenizer, tenant, answer_tokens)
    show = partial(_show_phase, progress)
    trained = Distillation(model, tokenizer, learned, recipe, out, completions=completions, progress=show).run(minutes)
    report = _measured(model, tokenizer, {str(out): trained.draft}, held_out, recipe, progress)
    report |= {"recipe": asdict(recipe), "plan": asdict(trained.plan), "tokens": trained.num_tokens}
    write_json(out / REPORT_FILE, report)
    progress.rest()
    _show(report)
    if json:
        write_json(json, report)


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
    json: JsonOption = None,
) -> None:
    """Compare draft models by how many of their tokens a target accepts and by what they cost.

    The measurement uses answers to the prompts that train-draft holds out with the same --seed.
    """
    from precedent.target.block.draft import BlockDraft
    from precedent.target.load.loading import load_draft
    from precedent.training.schedule import Recipe

    recipe = Recipe(temperature=temperature, answer_tokens=answer_tokens, seed=seed)
    progress: Progress = ctx.obj
    model, tokenizer = _load(progress, target, device, dtype)
    _, held_out = _split(progress, prompts, tokenizer, max_prompt_tokens, seed)
    specs = progress.each(draft_model, "loading draft models", len(draft_model))
    drafts = {spec: load_draft(spec, model, tokenizer) for spec in specs}
    blocks = {spec: draft for spec, draft in drafts.items() if isinstance(draft, BlockDraft)}
    chains = {spec: draft for spec, draft in drafts.items() if spec not in blocks}
    report = _measured(model, tokenizer, chains, held_out, recipe, progress) if chains else {}
    if blocks:
        report["blocks"] = measured(progress, model, tokenizer, blocks, held_out, recipe)
    progress.rest()
    if chains:
        _show(report)
    if blocks:
        show_blocks(report["blocks"])
    if json:
        write_json(json, report)


def check_folder(out: Path, resume: bool) -> None:
    """Raise ConfigError unless the folder is new, or holds a training for `--resume` to continue."""
    from precedent.training.distil import WORK_FOLDER  # imports torch too, so import it before any model is loaded

    begun = (out / WORK_FOLDER).is_dir()
    if resume and not begun:
        raise ConfigError(f"there is nothing to resume in {out}; leave out --resume to start")
    if begun and not resume:
        raise ConfigError(f"{out} holds an unfinished training; continue it with --resume, or give another folder")
    if out.is_dir() and any(out.iterdir()) and not begun:
        raise ConfigError(f"{out} is not empty; give a new folder")


def _load(
    progress: Progress, target: str, device: str | None, dtype: str | None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    from precedent.target.load.loading import load_target

    progress.show(f"loading {target}")
    return load_target(target, device=device, dtype=dtype)


def _split(
    progress: Progress, path: Path, tokenizer: PreTrainedTokenizerBase, longest: int, seed: int
) -> tuple[list[Prompt], list[Prompt]]:
    from precedent.training.prompts import read_prompts, split

    progress.show("reading the prompts")
    prompts, left_out = read_prompts(path, tokenizer, longest)
    learned, held_out = split(prompts, seed)
    note = f", {left_out} longer than {longest} tokens and left out" if left_out else ""
    progress.say(f"{len(learned)} prompts to learn from, {len(held_out)} held out{note}")
    return learned, held_out


def _completions(path: Path | None, tokenizer: PreTrainedTokenizerBase, tenant: str, longest: int) -> Sequence[Text]:
    from precedent.training.completions import read_completions

    return () if path is None else read_completions(path, tokenizer, tenant, longest)


def _measured(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    drafts: dict[str, PreTrainedModel],
    held_out: Sequence[Prompt],
    recipe: Any,
    progress: Progress,
) -> dict[str, Any]:
    """The report on all draft models, measured on the same answers of the target."""
    from precedent.target.fingerprints import name_of
    from precedent.training.measure import Measurement
    from precedent.training.teacher import Author

    first_seed = recipe.seed + HELD_OUT_SEED
    progress.show("answering held-out prompts", 0, len(held_out))
    with closing(Author(model, tokenizer, recipe.temperature)) as author:
        texts = author.texts(held_out, range(first_seed, first_seed + len(held_out)), recipe.answer_tokens)
    measurement = Measurement(model, texts, recipe.temperature)
    reports = [
        measurement.report(name, draft, partial(progress.show, f"measuring {name}")) for name, draft in drafts.items()
    ]
    return {"target": name_of(model), "drafts": [report.as_dict() for report in reports]}


def _show(report: dict[str, Any]) -> None:
    step = report["drafts"][0]["target_milliseconds"]
    table = Table(title=f"target {report['target']}: {step:.1f} ms per step")
    for column in ("draft", "accepted", "same", "ms", "cost", "draws", "per step", "speed"):
        table.add_column(column, justify="left" if column == "draft" else "right")
    for each in report["drafts"]:
        table.add_row(
            Path(each["draft"]).name, f"{each['acceptance']:.3f}", f"{each['agreement']:.3f}",
            f"{each['draw_milliseconds']:.1f}", f"1/{1 / each['cost']:.1f}", str(each["best_draws"]),
            f"{each['tokens_per_step']:.2f}", f"{each['speed']:.2f}x",
        )  # fmt: skip
    Console().print(table)


def _show_phase(progress: Progress, phase: str, done: int, total: int, loss: float | None = None) -> None:
    """Show the progress of a training phase."""
    progress.show(phase, done, total, "" if loss is None else f"loss {loss:.3f}")
