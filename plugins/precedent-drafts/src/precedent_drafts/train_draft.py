"""`precedent train-draft` and `precedent measure-draft`: train a draft for a target, and measure its gain."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import closing
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from precedent.cli.options import ChatTemplateOption, DeviceOption, DtypeOption, JsonOption, write_json
from precedent.cli.progress import Progress
from precedent.errors import ConfigError, UnsupportedError
from precedent.runtime.machine_load import BUSY_SHARE, OtherPrograms

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from precedent_drafts.training.lessons import Text
    from precedent_drafts.training.prompts import Prompt
    from precedent_drafts.training.training import Recipe


REPORT_FILE = "report.json"

HELD_OUT_SEED = 1 << 40
"""Added to the seeds for answers to held-out prompts."""


class Kind(StrEnum):
    """What is trained."""

    CHAIN = "chain"
    BLOCK = "block"
    EXIT = "exit"


class Condition(StrEnum):
    """What a draft reads beside tokens: its target's states, or nothing."""

    TARGET = "target"
    NONE = "none"


class Fusion(StrEnum):
    """How a chain that reads its target fuses its inputs."""

    LINEAR = "linear"
    TOKEN_GUIDED = "token-guided"


CHAIN, CONDITIONED, BLOCK, EXIT = (
    "--kind chain", "--kind chain --condition target", "--kind block", "--kind exit",
)  # fmt: skip

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
    fusion: Annotated[Fusion, typer.Option(help="How such a chain fuses tokens and states.")] = Fusion.LINEAR,
    block_size: Annotated[int, typer.Option(min=2, max=16, help="Positions of a block.")] = 8,
    iterations: Annotated[int, typer.Option(min=1, help="Forwards in which a block draft fills a block.")] = 1,
    context_tokens: Annotated[
        int, typer.Option(min=1, help="How much of a prompt the draft sees in training; all of the answer.")
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
    from precedent.target.load.first_layers import FIRST_LAYERS, first_layers
    from precedent_drafts.training.prompts import read_completions
    from precedent_drafts.training.training import Training

    check_folder(out, resume)
    recipe = recipe_of(ctx, kind, condition)  # raises for an invalid value before the model is loaded
    progress: Progress = ctx.obj
    model, tokenizer = _load(progress, target, device, dtype, chat_template)
    learned, held_out = _split(progress, prompts, tokenizer, max_prompt_tokens, seed)
    completions: Sequence[Text] = ()
    if from_cache is not None:
        completions = read_completions(from_cache, tokenizer, tenant, answer_tokens)
    trained = Training(
        model, tokenizer, learned, recipe, out, completions=completions, announce=progress.say,
        progress=partial(_show_phase, progress),
    ).run(minutes)  # fmt: skip
    drafts = {str(out): trained.draft}
    if kind is Kind.EXIT:  # beside the layers that it stands behind
        drafts = {f"{FIRST_LAYERS}{exit_layer}": first_layers(model, exit_layer)} | drafts
    report = report_on(progress, model, tokenizer, drafts, held_out, temperature, answer_tokens, seed)
    report |= {"recipe": dataclasses.asdict(recipe), "plan": dataclasses.asdict(trained.plan)}
    report["tokens"] = trained.num_tokens
    write_json(out / REPORT_FILE, report)
    progress.rest()
    show_report(report)
    if json:
        write_json(json, report)


def recipe_of(context: typer.Context, kind: Kind, condition: Condition | None) -> Recipe:
    """The recipe of the options. Raises ConfigError for a value out of range, and for an option of another kind."""
    from precedent_drafts.training.blocks import BlockRecipe
    from precedent_drafts.training.chains import ChainRecipe, ConditionedRecipe, ExitRecipe

    recipes: Mapping[str, type[Recipe]] = {
        CHAIN: ChainRecipe, CONDITIONED: ConditionedRecipe, BLOCK: BlockRecipe, EXIT: ExitRecipe,
    }  # fmt: skip
    chain = CONDITIONED if condition is Condition.TARGET else CHAIN
    asked = {Kind.CHAIN: chain, Kind.BLOCK: BLOCK, Kind.EXIT: EXIT}[kind]
    taken = {way: {each.name for each in dataclasses.fields(recipe)} for way, recipe in recipes.items()}
    for name in context.params:
        takers = [way for way, names in taken.items() if name in names or (name == "condition" and way != EXIT)]
        source = context.get_parameter_source(name)
        if takers and asked not in takers and source is not None and source.name == "COMMANDLINE":
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{option} is for {' or '.join(takers)}, and this is {asked}: leave it out")
    given = {name: value for name, value in context.params.items() if name in taken[asked] and value is not None}
    return recipes[asked](**given)


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
    report = report_on(progress, model, tokenizer, drafts, held_out, temperature, answer_tokens, seed)
    progress.rest()
    show_report(report)
    if json:
        write_json(json, report)


def check_folder(out: Path, resume: bool) -> None:
    """Raise ConfigError unless the folder is new, or holds a training for `--resume` to continue."""
    from precedent_drafts.training.training import WORK_FOLDER

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
    from precedent.target.load.source import gguf_file

    progress.show(f"loading {target}")
    if dtype is None and gguf_file(target) is not None:
        dtype = "bfloat16"  # gradients need ordinary weights
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


def _show_phase(progress: Progress, phase: str, done: int, total: int, loss: float | None = None) -> None:
    """Show the progress of a training phase."""
    progress.show(phase, done, total, "" if loss is None else f"loss {loss:.3f}")


# Reports: measured on the target's answers to held-out prompts


def report_on(
    progress: Progress,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    drafts: Mapping[str, PreTrainedModel],
    held_out: Sequence[Prompt],
    temperature: float,
    answer_tokens: int,
    seed: int,
) -> dict[str, Any]:
    """The reports on drafts of any kind, on the target's answers to held-out prompts."""
    from precedent_drafts.fingerprints import name_of
    from precedent_drafts.training.lessons import Author
    from precedent_drafts.training.measure import Measurement

    others, first_seed = OtherPrograms(), seed + HELD_OUT_SEED
    progress.show("answering held-out prompts", 0, len(held_out))
    with closing(Author(model, tokenizer, temperature)) as author:
        texts = author.texts(held_out, range(first_seed, first_seed + len(held_out)), answer_tokens)
    report: dict[str, Any] = {"target": name_of(model)}
    measurement = Measurement(model, texts, temperature)
    for name, draft in drafts.items():
        found = measurement.report(name, draft, partial(progress.show, f"measuring {name}"))
        report.setdefault("blocks" if "nodes" in found else "drafts", []).append(found)
    share = others.share()
    return report | {"others_cpu_share": None if share is None else round(share, 3)}


def show_report(report: Mapping[str, Any]) -> None:
    """A table of a report, and a warning if other programs disturbed it."""
    if reports := [*report.get("drafts", ()), *report.get("blocks", ())]:
        Console().print(_table(report["target"], reports))
    busy = report["others_cpu_share"]
    if busy is not None and busy > BUSY_SHARE:
        Console().print(
            f"other programs used {busy:.0%} of the CPU meanwhile: acceptance holds, but milliseconds, cost and speed "
            "do not (run measure-draft again on an idle machine)",
            highlight=False,
        )


def _table(target: str, reports: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title=f"target {target}: {reports[0]['target_milliseconds']:.1f} ms per step")
    for column in ("draft", "accepted", "same", "ms", "cost", "draws", "per step", "speed"):
        table.add_column(column, justify="left" if column == "draft" else "right")
    for each in reports:
        if "nodes" in each:
            accepted, same, draws = each["acceptance"], "", f"{each['nodes']} nodes"
        else:
            accepted, same, draws = each["acceptance_by_draw"], f"{each['agreement']:.3f}", str(each["best_draws"])
        table.add_row(
            Path(each["draft"]).name,
            " ".join(f"{share:.2f}" for share in accepted) if len(accepted) > 1 else f"{accepted[0]:.3f}",
            same, f"{each['cost'] * each['target_milliseconds']:.1f}", f"1/{1 / each['cost']:.1f}", draws,
            f"{each['tokens_per_step']:.2f}", f"{each['speed']:.2f}x",
        )  # fmt: skip
    return table
